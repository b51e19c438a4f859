// SIMD parts that the three passes share: factors of vectors of exponents, masks, rounding to the
// recipe's element, products, outputs. Included once for each SIMD target.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/numeric.h"
#include "formats/bf16.h"
#include "formats/limits.h"
#include "kernels/cpu/faithful_items.h"
#include "kernels/cpu/faithful_tiles.h"
#include "quantize/quantize.h"
#include "recipe/exponents.h"
#include "recipe/stages.h"

#if defined(MXATTN_KERNELS_CPU_FAITHFUL_TILES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MXATTN_KERNELS_CPU_FAITHFUL_TILES_INL_H_
#undef MXATTN_KERNELS_CPU_FAITHFUL_TILES_INL_H_
#else
#define MXATTN_KERNELS_CPU_FAITHFUL_TILES_INL_H_
#endif

#include "hwy/highway.h"
#include "kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace mxattn::kernels::cpu {
namespace HWY_NAMESPACE {

using FloatMask = hn::Mask<FloatTag>;
using Ints = hn::Vec<IntTag>;

using Ops = SimdOps;

/// What both passes of the backward need of a thread's scratch. `sums`: FP32 arrays of a tile that
/// a unit has; its rows are two packed operands.
struct PassScratch {
  PassScratch(Carver& carver, int padded, int sums)
      : width(padded),
        staging(carver.take<Bf16Bits>(static_cast<std::size_t>(kTile) * padded)),
        s(carver.take<float>(kBlock * kTile)),
        dp(carver.take<float>(kBlock * kTile)),
        ds(carver.take<std::uint16_t>(kBlock * kTile)),
        t(carver.take<float>(static_cast<std::size_t>(kBlock) * padded)) {
    const auto tile = static_cast<std::size_t>(kTile) * padded;
    for (int u = 0; u < kMaxUnits; ++u) {
      unit_rows[u] = carver.take<std::uint16_t>(2 * tile);
      unit_sums[u] = carver.take<float>(static_cast<std::size_t>(sums) * tile);
    }
  }

  int width;
  Bf16Bits* staging;
  float *s, *dp;  // of a block
  std::uint16_t* ds;
  float* t;
  std::uint16_t* unit_rows[kMaxUnits];
  float* unit_sums[kMaxUnits];
};

/// Lanes of the vector at column v that lie in `range`.
HWY_INLINE FloatMask lanes_inside(Range range, int v) {
  const FloatTag d;
  const auto below_begin = static_cast<std::size_t>(std::max(range.begin - v, 0));
  const auto below_end = static_cast<std::size_t>(std::max(range.end - v, 0));
  return hn::AndNot(hn::FirstN(d, below_begin), hn::FirstN(d, below_end));
}

/// 2^e, e clamped to [low, high] inside the range of normal numbers.
HWY_INLINE Floats pow2_clamped(Ints e, int low, int high) {
  const IntTag di;
  const Ints bounded = hn::Min(hn::Max(e, hn::Set(di, low)), hn::Set(di, high));
  return hn::BitCast(FloatTag(), hn::ShiftLeft<23>(hn::Add(bounded, hn::Set(di, 127))));
}

/// stages::factor of vectors: NaN where `nan` is.
HWY_INLINE Floats factors(Ints e, Floats nan) {
  return hn::Add(pow2_clamped(e, stages::kFactorExponentMin, stages::kFactorExponentMax), nan);
}

/// Exponents of a tile at column v, plus a common one.
HWY_INLINE Ints exponents_at(const TileExponents& tile, int v, Exponent plus) {
  return hn::Add(hn::Load(IntTag(), tile.value + v), hn::Set(IntTag(), plus.value));
}
HWY_INLINE Floats nans_at(const TileExponents& tile, int v, bool nan) {
  return hn::Add(hn::Load(FloatTag(), tile.nan + v), hn::Set(FloatTag(), nan ? kNan : 0.0f));
}

/// stages::score_factor of a row of exponent `row` and the columns from v on.
HWY_INLINE Floats score_factors(float score_scale, Exponent row, const TileExponents& tile, int v) {
  const Floats power = pow2_clamped(exponents_at(tile, v, row), stages::kScoreExponentMin,
                                    stages::kScoreExponentMax);
  return hn::Add(hn::Mul(hn::Set(FloatTag(), score_scale), power), nans_at(tile, v, row.nan));
}

template <Element kElement>
HWY_INLINE Floats round_element(Floats x) {
  if constexpr (kElement == Element::kE4m3) {
    return round_e4m3(x);
  } else {
    return round_bf16(x);
  }
}

/// x rounded once to FP16, beyond the largest to the largest; NaN stays.
HWY_INLINE Floats round_fp16(Floats x) {
  const FloatTag d;
  const Floats max = hn::Set(d, stages::kFp16Max);
  x = hn::IfThenElse(hn::Gt(x, max), max, hn::IfThenElse(hn::Lt(x, hn::Neg(max)), hn::Neg(max), x));
  // As round_e4m3 (simd-inl.h): adding 1.5 2^(e + 13) drops what FP16 cannot hold.
  constexpr float kRounder = 1.5f * (1 << (23 - Fp16::kMantissaBits));
  const Floats binade = hn::Max(Ops::and_bits(x, 0x7F800000u), hn::Set(d, Fp16::kMinNormal));
  const Floats rounder = hn::Mul(binade, hn::Set(d, kRounder));
  return hn::Sub(hn::Add(x, rounder), rounder);
}

/// The sum of sixteen chains, chain q holding the terms of columns q, q + 16, ...: neighbours
/// eight, four, two and one apart are added. The same bits whatever the width of a vector.
constexpr int kSumChains = 16;
HWY_INLINE float sum_of_chains(float* chains) {
  for (int width = kSumChains / 2; width > 0; width /= 2) {
    for (int q = 0; q < width; ++q) chains[q] = add_rn(chains[q], chains[q + width]);
  }
  return chains[0];
}

/// DsScale::kRow: the exponent that brings a largest magnitude under the largest code.
HWY_INLINE Exponent row_exponent(float largest) {
  return Exponent::stored(
      static_cast<std::int8_t>(stages::token_exponent(ExponentRule::kRoundUp, largest)));
}

/// C (rows, n) [+]= A (rows, k) B.
HWY_INLINE void multiply(const TileGemm& engine, int rows, int n, int k, const std::uint16_t* a,
                         std::ptrdiff_t lda, const std::uint16_t* b, std::ptrdiff_t ldb, float* c,
                         std::ptrdiff_t ldc, bool accumulate) {
  engine.run({rows, n, k, a, lda, b, ldb, c, ldc, accumulate});
}

/// Multiplies an accumulator's rows by a power of two.
HWY_INLINE void rescale_rows(float* x, int rows, int width, float change) {
  const FloatTag d;
  const int count = rows * width;
  const Floats factor = hn::Set(d, change);
  for (int v = 0; v < count; v += static_cast<int>(float_lanes())) {
    hn::Store(stages::rescale_accumulator<Ops>(hn::Load(d, x + v), factor), d, x + v);
  }
}

/// sum += factor * partial, and the accumulator starts afresh.
HWY_INLINE void promote_rows(float* sum, float* partial, int rows, int width, float factor) {
  const FloatTag d;
  const int count = rows * width;
  const Floats f = hn::Set(d, factor);
  for (int v = 0; v < count; v += static_cast<int>(float_lanes())) {
    const Floats total = stages::promote<Ops>(hn::Load(d, sum + v), hn::Load(d, partial + v), f);
    hn::Store(total, d, sum + v);
    hn::Store(hn::Zero(d), d, partial + v);
  }
}

/// A row of `dim` floats to BF16, nearest even. x is readable up to a whole vector.
HWY_INLINE void store_row(const float* x, int dim, Bf16Bits* to) {
  const FloatTag d;
  const int lanes = static_cast<int>(float_lanes());
  int v = 0;
  for (; v + lanes <= dim; v += lanes) store_bf16(round_bf16(hn::Load(d, x + v)), to + v);
  for (; v < dim; ++v) to[v] = float_to_bf16(x[v]);
}

/// A gradient's rows: times softmax_scale, rotated back, BF16. x: (rows, width), overwritten.
HWY_INLINE void store_gradient(float* x, int rows, int width, float scale, bool rotate_back,
                               const TensorView<Bf16Bits>& to, std::int64_t token, int head) {
  const FloatTag d;
  const Floats s = hn::Set(d, scale);
  for (int v = 0; v < rows * width; v += static_cast<int>(float_lanes())) {
    hn::Store(hn::Mul(hn::Load(d, x + v), s), d, x + v);
  }
  if (rotate_back) rotate_rows(x, rows, to.dim, width, 1);
  for (int r = 0; r < rows; ++r) {
    store_row(x + static_cast<std::ptrdiff_t>(r) * width, to.dim, to.row(token + r, head));
  }
}

/// Calls body(std::bool_constant<a>{}, std::bool_constant<b>{}).
template <class Body>
HWY_INLINE void with_switches(bool a, bool b, const Body& body) {
  using Yes = std::true_type;
  using No = std::false_type;
  if (a) {
    b ? body(Yes{}, Yes{}) : body(Yes{}, No{});
  } else {
    b ? body(No{}, Yes{}) : body(No{}, No{});
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace mxattn::kernels::cpu
HWY_AFTER_NAMESPACE();

#endif  // MXATTN_KERNELS_CPU_FAITHFUL_TILES_INL_H_
