// Fp32Ops: the scalar FP32 arithmetic of recipe/stages.h; the same bits as SimdOps (simd-inl.h).
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "base/numeric.h"
#include "recipe/stages.h"

namespace mxattn::kernels::cpu {

#include "kernels/cpu/elementary.inc"

struct Fp32Ops {
  using F = float;

  static F set(float x) { return x; }
  static F add(F a, F b) { return add_rn(a, b); }
  static F sub(F a, F b) { return add_rn(a, -b); }
  static F mul(F a, F b) { return mul_rn(a, b); }
  static F fma(F a, F b, F c) { return fma_rn(a, b, c); }
  static F sub_from_product(F a, F b, F c) { return fma_rn(a, b, -c); }
  static F exp2(F x) { return exp2_fp32<Fp32Ops>(x); }
  static F log2(F x) { return log2_fp32<Fp32Ops>(x); }
  static F flush(F x) { return flush_fp32<Fp32Ops>(x); }

  // What elementary.inc asks for besides.
  static F add_bits(F a, F b) { return float_of(bits_of(a) + bits_of(b)); }
  static F sub_bits(F a, F b) { return float_of(bits_of(a) - bits_of(b)); }
  static F and_bits(F a, std::uint32_t mask) { return float_of(bits_of(a) & mask); }
  template <int n>
  static F shift_left_bits(F a) {
    return float_of(bits_of(a) << n);
  }
  template <int n>
  static F int_of_top_bits(F a) {
    return static_cast<float>(static_cast<std::int32_t>(bits_of(a)) >> n);
  }
  static F select_less(F a, F b, F yes, F no) { return a < b ? yes : no; }
};

}  // namespace mxattn::kernels::cpu
