// E4M3, BF16 and single-rounding FMA on Highway vectors. Included once a target (foreach_target).
//
// The same bits as formats/fp8.h and formats/bf16.h for every input, and the same speed for
// subnormal codes: no branch, no denormal operand.

#if defined(MXATTN_QUANTIZE_CPU_E4M3_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MXATTN_QUANTIZE_CPU_E4M3_INL_H_
#undef MXATTN_QUANTIZE_CPU_E4M3_INL_H_
#else
#define MXATTN_QUANTIZE_CPU_E4M3_INL_H_
#endif

#include <hwy/highway.h>

#include <cstdint>

#include "base/numeric.h"
#include "formats/limits.h"

HWY_BEFORE_NAMESPACE();
namespace mxattn {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

/// E4M3 codes of x, one a 32-bit lane: to nearest even, saturating; NaN becomes 0x7F.
template <class D, class V = hn::Vec<D>>
HWY_INLINE hn::Vec<hn::RebindToUnsigned<D>> encode_e4m3(D d, V x) {
  const hn::RebindToUnsigned<D> du;
  constexpr int kDrop = 23 - E4M3::kMantissaBits;
  // Where one unit of the last place is the subnormal step of E4M3: adding it rounds to that step.
  constexpr float kRounder = E4M3::kMinSubnormal * 0x1p23f;
  const auto bits = hn::BitCast(du, x);
  const auto sign = hn::And(hn::ShiftRight<24>(bits), hn::Set(du, 0x80u));
  const auto magnitude = hn::And(bits, hn::Set(du, 0x7FFFFFFFu));
  const auto bounded = hn::Min(magnitude, hn::Set(du, bits_of(E4M3::kMax)));

  const auto odd = hn::And(hn::ShiftRight<kDrop>(bounded), hn::Set(du, 1u));
  const auto rounded = hn::Add(hn::Add(bounded, hn::Set(du, (1u << (kDrop - 1)) - 1u)), odd);
  const auto normal = hn::Sub(hn::ShiftRight<kDrop>(rounded),
                              hn::Set(du, (127u - E4M3::kBias) << E4M3::kMantissaBits));
  const auto shifted = hn::Add(hn::BitCast(d, bounded), hn::Set(d, kRounder));
  const auto subnormal = hn::Sub(hn::BitCast(du, shifted), hn::Set(du, bits_of(kRounder)));

  const auto is_small = hn::Lt(hn::BitCast(d, bounded), hn::Set(d, E4M3::kMinNormal));
  const auto code = hn::Or(hn::IfThenElse(hn::RebindMask(du, is_small), subnormal, normal), sign);
  return hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(x)),
                        hn::Set(du, std::uint32_t{E4M3::kMagnitudeMask}), code);
}

/// Values of E4M3 codes, one a 32-bit lane; NaN codes give NaN.
template <class D>
HWY_INLINE hn::Vec<D> decode_e4m3(D d, hn::Vec<hn::RebindToUnsigned<D>> codes) {
  const hn::RebindToUnsigned<D> du;
  constexpr int kRebias = 127 - E4M3::kBias;
  const auto magnitude = hn::And(codes, hn::Set(du, std::uint32_t{E4M3::kMagnitudeMask}));
  const auto sign = hn::ShiftLeft<24>(hn::And(codes, hn::Set(du, 0x80u)));
  const auto fields = hn::ShiftLeft<23 - E4M3::kMantissaBits>(magnitude);
  const auto normal = hn::BitCast(d, hn::Add(fields, hn::Set(du, kRebias * 0x800000u)));
  // A subnormal m/8 2^-6 as (1 + m/8) 2^-6 - 2^-6: exact.
  const auto raised = hn::BitCast(d, hn::Add(fields, hn::Set(du, (kRebias + 1) * 0x800000u)));
  const auto subnormal = hn::Sub(raised, hn::Set(d, E4M3::kMinNormal));
  const auto is_small = hn::Lt(normal, hn::Set(d, E4M3::kMinNormal));
  const auto value = hn::IfThenElse(is_small, subnormal, normal);
  const auto is_nan = hn::Gt(normal, hn::Set(d, E4M3::kMax));
  return hn::Or(hn::IfThenElse(is_nan, hn::Set(d, kNan), value), hn::BitCast(d, sign));
}

/// Lanes(d) codes from memory as values.
template <class D>
HWY_INLINE hn::Vec<D> load_e4m3(D d, const std::uint8_t* codes) {
  const hn::RebindToUnsigned<D> du;
  const hn::Rebind<std::uint8_t, D> d8;
  return decode_e4m3(d, hn::PromoteTo(du, hn::LoadU(d8, codes)));
}

/// Lanes(d) rounded codes to memory.
template <class D, class V = hn::Vec<D>>
HWY_INLINE void store_e4m3(D d, V x, std::uint8_t* codes) {
  const hn::Rebind<std::uint8_t, D> d8;
  hn::StoreU(hn::TruncateTo(d8, encode_e4m3(d, x)), d8, codes);
}

/// Lanes(d) BF16 values from memory.
template <class D>
HWY_INLINE hn::Vec<D> load_bf16(D d, const std::uint16_t* values) {
  const hn::RebindToUnsigned<D> du;
  const hn::Rebind<std::uint16_t, D> d16;
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(du, hn::LoadU(d16, values))));
}

/// a b + c with one rounding on every target; where the hardware has no FMA, lane by lane.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V fma_rn(D d, V a, V b, V c) {
#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_SSSE3 || HWY_TARGET == HWY_SSE4 || \
    HWY_TARGET == HWY_EMU128
  HWY_ALIGN float x[hn::MaxLanes(d)], y[hn::MaxLanes(d)], z[hn::MaxLanes(d)];
  hn::Store(a, d, x);
  hn::Store(b, d, y);
  hn::Store(c, d, z);
  for (std::size_t i = 0; i < hn::Lanes(d); ++i) z[i] = mxattn::fma_rn(x[i], y[i], z[i]);
  return hn::Load(d, z);
#else
  (void)d;
  return hn::MulAdd(a, b, c);
#endif
}

}  // namespace HWY_NAMESPACE
}  // namespace mxattn
HWY_AFTER_NAMESPACE();

#endif
