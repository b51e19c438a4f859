// SIMD arithmetic on FP32 and the conversions between E4M3, BF16 and FP32, once for each Highway
// target. Included by files that compile themselves for every target (hwy/foreach_target.h).
//
// Every target gives the same bits: those without a fused multiply-add are switched off by
// HWY_DISABLED_TARGETS (CMakeLists.txt of this room), and the emulated one calls std::fma.
// What the quantiser has (E4M3 codes to values, BF16 to FP32, one-rounding FMA) comes from there.

#include <cstddef>
#include <cstdint>
#include <limits>

#include "formats/limits.h"
#include "recipe/stages.h"

// Include guard of Highway's per-target headers: toggled, not set once.
#if defined(MXATTN_KERNELS_CPU_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MXATTN_KERNELS_CPU_SIMD_INL_H_
#undef MXATTN_KERNELS_CPU_SIMD_INL_H_
#else
#define MXATTN_KERNELS_CPU_SIMD_INL_H_
#endif

#include "hwy/highway.h"
#include "quantize/cpu/e4m3-inl.h"

HWY_BEFORE_NAMESPACE();
namespace mxattn::kernels::cpu {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
namespace codec = mxattn::HWY_NAMESPACE;

#include "kernels/cpu/elementary.inc"

// The formulas of recipe/stages.h, compiled for this target.
namespace stages {
using namespace mxattn::stages;
#include "recipe/formulas.inc"
}  // namespace stages

using FloatTag = hn::ScalableTag<float>;
using UintTag = hn::RebindToUnsigned<FloatTag>;
using IntTag = hn::RebindToSigned<FloatTag>;
using Bf16Tag = hn::Rebind<std::uint16_t, FloatTag>;  // as many lanes as FloatTag
using Floats = hn::Vec<FloatTag>;

HWY_INLINE std::size_t float_lanes() { return hn::Lanes(FloatTag()); }

/// FP32 arithmetic on vectors: the concept of recipe/stages.h.
struct SimdOps {
  using F = Floats;

  static HWY_INLINE F set(float x) { return hn::Set(FloatTag(), x); }
  static HWY_INLINE F add(F a, F b) { return hn::Add(a, b); }
  static HWY_INLINE F sub(F a, F b) { return hn::Sub(a, b); }
  static HWY_INLINE F mul(F a, F b) { return hn::Mul(a, b); }
  static HWY_INLINE F fma(F a, F b, F c) { return codec::fma_rn(FloatTag(), a, b, c); }
#if HWY_TARGET == HWY_EMU128 || HWY_TARGET == HWY_SCALAR
  static HWY_INLINE F sub_from_product(F a, F b, F c) { return fma(a, b, hn::Neg(c)); }
#else
  static HWY_INLINE F sub_from_product(F a, F b, F c) { return hn::MulSub(a, b, c); }
#endif
  static HWY_INLINE F exp2(F x) { return exp2_fp32<SimdOps>(x); }
  static HWY_INLINE F log2(F x) { return log2_fp32<SimdOps>(x); }
  static HWY_INLINE F flush(F x) { return flush_fp32<SimdOps>(x); }

  // What elementary.inc asks for besides.
  static HWY_INLINE F add_bits(F a, F b) {
    const UintTag du;
    return hn::BitCast(FloatTag(), hn::Add(hn::BitCast(du, a), hn::BitCast(du, b)));
  }
  static HWY_INLINE F sub_bits(F a, F b) {
    const UintTag du;
    return hn::BitCast(FloatTag(), hn::Sub(hn::BitCast(du, a), hn::BitCast(du, b)));
  }
  static HWY_INLINE F and_bits(F a, std::uint32_t mask) {
    const UintTag du;
    return hn::BitCast(FloatTag(), hn::And(hn::BitCast(du, a), hn::Set(du, mask)));
  }
  template <int n>
  static HWY_INLINE F shift_left_bits(F a) {
    return hn::BitCast(FloatTag(), hn::ShiftLeft<n>(hn::BitCast(UintTag(), a)));
  }
  template <int n>
  static HWY_INLINE F int_of_top_bits(F a) {
    return hn::ConvertTo(FloatTag(), hn::ShiftRight<n>(hn::BitCast(IntTag(), a)));
  }
  static HWY_INLINE F select_less(F a, F b, F yes, F no) {
    return hn::IfThenElse(hn::Lt(a, b), yes, no);
  }
};

/// x rounded to the nearest E4M3 value (ties to even), beyond the largest to the largest; NaN
/// stays. A result of 0 is +0 whatever the sign of x.
HWY_INLINE Floats round_e4m3(Floats x) {
  const FloatTag d;
  const Floats max = hn::Set(d, E4M3::kMax);
  const Floats min = hn::Set(d, -E4M3::kMax);
#if HWY_TARGET == HWY_EMU128 || HWY_TARGET == HWY_SCALAR
  x = hn::IfThenElse(hn::Gt(x, max), max, hn::IfThenElse(hn::Lt(x, min), min, x));
#else
  // NOTE: x86 returns the second argument where one is NaN, NEON the NaN.
  x = hn::Min(max, hn::Max(min, x));
#endif
  // 1.5 2^(e + 20), e the exponent of x but at least that of the least normal value: its last bit
  // is worth 2^(e - 3), so that adding it rounds x to the mantissa of E4M3.
  constexpr float kRounder = 1.5f * (1 << (23 - E4M3::kMantissaBits));
  const Floats binade = hn::Max(SimdOps::and_bits(x, 0x7F800000u), hn::Set(d, E4M3::kMinNormal));
  const Floats rounder = hn::Mul(binade, hn::Set(d, kRounder));
  return hn::Sub(hn::Add(x, rounder), rounder);
}

/// x rounded to the nearest BF16 value (ties to even); NaN stays NaN, quiet.
HWY_INLINE Floats round_bf16(Floats x) {
  const UintTag du;
  const auto bits = hn::BitCast(du, x);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1u));
  const auto rounded = hn::Add(bits, hn::Add(odd, hn::Set(du, 0x7FFFu)));
  const auto quiet = hn::Or(bits, hn::Set(du, 0x400000u));
  const auto result = hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(x)), quiet, rounded);
  return hn::BitCast(FloatTag(), hn::And(result, hn::Set(du, 0xFFFF0000u)));
}

/// The upper halves of the bits of x. Exact where x is a BF16 value, as every E4M3 value is.
HWY_INLINE hn::Vec<Bf16Tag> bf16_bits(Floats x) {
  const auto halves = hn::ShiftRight<16>(hn::BitCast(UintTag(), x));
  return hn::DemoteTo(Bf16Tag(), hn::BitCast(IntTag(), halves));
}

/// Values of float_lanes() BF16 patterns.
HWY_INLINE Floats load_bf16(const std::uint16_t* from) {
  return codec::load_bf16(FloatTag(), from);
}

/// Stores float_lanes() values that are BF16 values already (round_e4m3, round_bf16).
HWY_INLINE void store_bf16(Floats x, std::uint16_t* to) { hn::StoreU(bf16_bits(x), Bf16Tag(), to); }

/// BF16 bits of float_lanes() E4M3 codes; exact, NaN codes become NaN.
HWY_INLINE hn::Vec<Bf16Tag> load_e4m3(const std::uint8_t* codes) {
  return bf16_bits(codec::load_e4m3(FloatTag(), codes));
}

}  // namespace HWY_NAMESPACE
}  // namespace mxattn::kernels::cpu
HWY_AFTER_NAMESPACE();

#endif  // MXATTN_KERNELS_CPU_SIMD_INL_H_
