// Division of many numbers by one, with the rounding of IEEE division.
#pragma once

#include "base/numeric.h"

namespace mxattn {

/// x / divisor, rounded to nearest-even, where x and the quotient are below 2^kLimit in magnitude
/// and the divisor lies in [2^-60, 2^126]. A NaN gives NaN. Quotients below 2^-126 are not exact.
/// Two corrections of x times the correctly rounded reciprocal: the first leaves less than an ulp,
/// after which the second is exact (Markstein, "Computation of elementary functions on the IBM RISC
/// System/6000 processor", 1990, theorem 8). x is scaled by 2^60 meanwhile, so that no remainder is
/// subnormal.
class Divisor {
 public:
  static constexpr int kLimit = 60;

  MXATTN_HOST_DEVICE explicit Divisor(float divisor)
      : divisor_(divisor), reciprocal_(div_rn(1.0f, divisor)) {}

  MXATTN_HOST_DEVICE float divide(float x) const {
    const float a = mul_rn(x, pow2(kScale));
    float q = mul_rn(a, reciprocal_);
    // With remainders of this sign a zero over a positive divisor keeps its own.
    q = fma_rn(fma_rn(q, divisor_, -a), -reciprocal_, q);
    q = fma_rn(fma_rn(q, divisor_, -a), -reciprocal_, q);
    return mul_rn(q, pow2(-kScale));
  }

 private:
  static constexpr int kScale = 60;
  float divisor_, reciprocal_;
};

}  // namespace mxattn
