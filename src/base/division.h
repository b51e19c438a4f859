// Division of many numbers by one, with the rounding of IEEE division.
#pragma once

#include <cstdint>

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

/// x / divisor 2^exponent where only its BF16 is kept: that of Divisor's quotient times the power
/// of two, almost always by one multiplication. x is NaN or below 2^kLimit in magnitude, as are
/// quotients.
class RoundedDivisor {
 public:
  /// `reciprocal`: within 0.501 ulp of 1 / divisor, if the divisor is ordinary.
  MXATTN_HOST_DEVICE RoundedDivisor(float divisor, int exponent, float reciprocal)
      : divisor_(divisor),
        power_(pow2(exponent)),
        factor_(mul_rn(reciprocal, power_)),
        ordinary_(bits_of(divisor) - bits_of(1.0f) <= bits_of(kMostDivisor) - bits_of(1.0f) and
                  exponent >= kLeastExponent and exponent <= kMostExponent) {}

  /// What is to be rounded.
  MXATTN_HOST_DEVICE float exact(float x) const {
    return mul_rn(Divisor(divisor_).divide(x), power_);
  }

  /// Has the BF16 of exact(x) if is_ordinary() and if it is neither near a tie nor small. Factor
  /// and product are off by a relative 1.001 2^-23, which is less than 2 ulp where a significand
  /// below 2 - 2^-8 is near a tie. At 3 ulp or more from a tie of two BF16 the quotient is more
  /// than an ulp away from it, and the FP32 next to the quotient lies on the same side.
  MXATTN_HOST_DEVICE float quick(float x) const { return mul_rn(x, factor_); }
  MXATTN_HOST_DEVICE bool is_ordinary() const { return ordinary_; }

  /// Ties have 0x8000 in their lower half. A quick quotient is near one if that half and
  /// kTieOffset, added modulo 2^16, are below kNearTie.
  static constexpr std::uint32_t kTieOffset = 0x8002, kNearTie = 5;
  /// A quick quotient is small below 2^kSmall, zeros too: they may be what was flushed.
  static constexpr int kSmall = -80;

 private:
  // Neither factors nor quotients that are not small leave the range of FP32.
  static constexpr float kMostDivisor = pow2(40);  // the least is 1
  static constexpr int kLeastExponent = -60, kMostExponent = 40;

  float divisor_, power_, factor_;
  bool ordinary_;
};

}  // namespace mxattn
