#include "quantize/cpu/rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "quantize/cpu/rows.cc"
#include <hwy/cache_control.h>
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "base/numeric.h"
#include "formats/exponent.h"
#include "quantize/cpu/e4m3-inl.h"
#include "recipe/exponents.h"
#include "recipe/stages.h"

HWY_BEFORE_NAMESPACE();
namespace mxattn {
namespace HWY_NAMESPACE {
namespace {

using rows::Bf16Rows;
using rows::GradientRows;
using rows::kMaxDim;

using Lanes = hn::CappedTag<float, 16>;
using Codes = hn::RebindToUnsigned<Lanes>;
constexpr int kChains = 4;
using ChainLanes = hn::CappedTag<float, kChains>;

constexpr int kPadding = 16;
constexpr int padded(int dim) { return (dim + kPadding - 1) / kPadding * kPadding; }

/// One row as FP32; channels from dim to padded(dim) are 0, so that loops need no tail.
struct Row {
  HWY_ALIGN float x[padded(kMaxDim)];
};

void load_row(const std::uint16_t* source, int dim, Row& row) {
  const Lanes d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  int c = 0;
  for (; c + lanes <= dim; c += lanes) hn::Store(load_bf16(d, source + c), d, row.x + c);
  for (; c < dim; ++c) row.x[c] = float_of(std::uint32_t{source[c]} << 16);
  for (; c < padded(dim); ++c) row.x[c] = 0;
}

// ---- rotation: butterflies of stride 1, 2, 4, ..., then times 1 / sqrt(dim) -------------------

#if HWY_TARGET != HWY_SCALAR  // which has no lanes to swap

/// Lanes whose index differs in bit kBit change places.
template <int kBit, class D>
HWY_INLINE hn::Vec<D> swap_lanes(D d, hn::Vec<D> v) {
  if constexpr (kBit == 0) return hn::Shuffle2301(v);
  if constexpr (kBit == 1) return hn::Shuffle1032(v);
  if constexpr (kBit == 2) return hn::SwapAdjacentBlocks(v);
  if constexpr (kBit == 3) return hn::ConcatLowerUpper(d, v, v);
}

/// (a, b) -> (a + b, a - b) on lanes 2^kBit apart, if the row and the vector hold such pairs.
template <int kBit, class D>
HWY_INLINE hn::Vec<D> butterfly_in_vector(D d, hn::Vec<D> v, int dim) {
  constexpr std::size_t kStride = std::size_t{1} << kBit;
  if constexpr (hn::MaxLanes(D()) > kStride) {
    if (static_cast<std::size_t>(dim) > kStride and hn::Lanes(d) > kStride) {
      const hn::RebindToUnsigned<D> du;
      const auto second = hn::And(hn::Iota(du, 0), hn::Set(du, std::uint32_t{kStride}));
      const auto sign = hn::BitCast(d, hn::ShiftLeft<31 - kBit>(second));
      // The product is exact: one rounding, with or without hardware FMA.
      return hn::MulAdd(v, hn::Or(hn::Set(d, 1.0f), sign), swap_lanes<kBit>(d, v));
    }
  }
  return v;
}

#endif

void rotate_row(float* HWY_RESTRICT x, int dim, float scale) {
  const Lanes d;
  const int lanes = static_cast<int>(hn::Lanes(d));
#if HWY_TARGET != HWY_SCALAR
  for (int c = 0; c < dim; c += lanes) {
    auto v = hn::Load(d, x + c);
    v = butterfly_in_vector<0>(d, v, dim);
    v = butterfly_in_vector<1>(d, v, dim);
    v = butterfly_in_vector<2>(d, v, dim);
    v = butterfly_in_vector<3>(d, v, dim);
    hn::Store(v, d, x + c);
  }
#endif
  for (int stride = lanes; stride < dim; stride *= 2) {
    for (int block = 0; block < dim; block += 2 * stride) {
      for (int c = block; c < block + stride; c += lanes) {
        const auto a = hn::Load(d, x + c), b = hn::Load(d, x + c + stride);
        hn::Store(hn::Add(a, b), d, x + c);
        hn::Store(hn::Sub(a, b), d, x + c + stride);
      }
    }
  }
  for (int c = 0; c < dim; c += lanes) {
    hn::Store(hn::Mul(hn::Load(d, x + c), hn::Set(d, scale)), d, x + c);
  }
}

/// 1 / sqrt(dim), rounded once to FP32.
float rotation_scale(int dim) {
  return static_cast<float>(1.0 / std::sqrt(static_cast<double>(dim)));
}

/// Asks for a row some rows ahead: rows of one head lie a stride apart, which no hardware
/// prefetcher follows.
void prefetch(const Bf16Rows& rows, std::int64_t i) {
  constexpr std::int64_t kAhead = 4;
  constexpr int kLine = 64 / sizeof(std::uint16_t);
  const std::uint16_t* const row = rows.row(std::min(i + kAhead, rows.count - 1));
  for (int c = 0; c < rows.dim; c += kLine) hwy::Prefetch(row + c);
}

void load_row(const Bf16Rows& rows, std::int64_t i, float scale, Row& row) {
  prefetch(rows, i);
  load_row(rows.row(i), rows.dim, row);
  if (rows.rotate) rotate_row(row.x, rows.dim, scale);
}

// ---- maxima, codes, sums ----------------------------------------------------------------------

/// Largest magnitude; NaN or Inf if the row holds one: as integers, magnitudes order like that.
float max_magnitude(const Row& row, int dim) {
  const Lanes d;
  const Codes du;
  const int lanes = static_cast<int>(hn::Lanes(d));
  auto largest = hn::Zero(du);
  for (int c = 0; c < dim; c += lanes) {
    const auto bits = hn::BitCast(du, hn::Load(d, row.x + c));
    largest = hn::Max(largest, hn::And(bits, hn::Set(du, 0x7FFFFFFFu)));
  }
  return float_of(hn::GetLane(hn::MaxOfLanes(du, largest)));
}

/// Codes of x factor; with `keep_values` x becomes the values of the codes.
template <bool keep_values>
void encode_row(Row& row, int dim, float factor, std::uint8_t* codes) {
  const Lanes d;
  const hn::Rebind<std::uint8_t, Lanes> d8;
  const int lanes = static_cast<int>(hn::Lanes(d));
  HWY_ALIGN std::uint8_t tail[padded(kMaxDim)];
  std::uint8_t* const target = dim % lanes == 0 ? codes : tail;
  for (int c = 0; c < dim; c += lanes) {
    const auto code = encode_e4m3(d, hn::Mul(hn::Load(d, row.x + c), hn::Set(d, factor)));
    hn::StoreU(hn::TruncateTo(d8, code), d8, target + c);
    if constexpr (keep_values) hn::Store(decode_e4m3(d, code), d, row.x + c);
  }
  if (target != codes) std::memcpy(codes, target, static_cast<std::size_t>(dim));
}

/// sum_c a_c b_c: four FMA chains over c = q, q + 4, ..., then (0 + 1) + (2 + 3). Lane q of one
/// vector is chain q; a target with single lanes runs the chains one after the other.
float dot(const Row& a, const Row& b, int dim) {
  const ChainLanes d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  HWY_ALIGN float chain[kChains];
  for (int q = 0; q < kChains; q += lanes) {
    auto sum = hn::Zero(d);
    for (int c = q; c < dim; c += kChains) {
      sum = fma_rn(d, hn::Load(d, a.x + c), hn::Load(d, b.x + c), sum);
    }
    hn::Store(sum, d, chain + q);
  }
  return add_rn(add_rn(chain[0], chain[1]), add_rn(chain[2], chain[3]));
}

void scale_row(Row& row, int dim, float factor) {
  const Lanes d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  for (int c = 0; c < dim; c += lanes) {
    hn::Store(hn::Mul(hn::Load(d, row.x + c), hn::Set(d, factor)), d, row.x + c);
  }
}

/// Norm exponent of values that carry no exponent of their own: they are first multiplied by the
/// power of two that brings the largest into [1, 2). `row` is changed.
int norm_of_values(Row& row, int dim) {
  const float largest = max_magnitude(row, dim);
  if (not(largest < kInfinity)) return stages::kNanExponent;
  if (largest == 0) return stages::kNormExponentMin;
  const int exponent = mxattn::detail::normalise(largest).exponent;
  // Beyond the powers of two that FP32 holds as normal numbers in two steps.
  const int first = clamp_int(-exponent, stages::kFactorExponentMin, stages::kFactorExponentMax);
  scale_row(row, dim, pow2(first));
  if (first != -exponent) scale_row(row, dim, pow2(-exponent - first));
  return stages::norm_exponent(dot(row, row, dim), exponent);
}

// ---- loops over rows --------------------------------------------------------------------------

float token_exponents(const Bf16Rows& rows, ExponentRule rule, std::int8_t* exponents) {
  const float scale = rotation_scale(rows.dim);
  Row row;
  float largest = 0;
  for (std::int64_t i = 0; i < rows.count; ++i) {
    load_row(rows, i, scale, row);
    const float max = max_magnitude(row, rows.dim);
    exponents[i] = static_cast<std::int8_t>(stages::token_exponent(rule, max));
    if (max < kInfinity) largest = std::max(largest, max);
  }
  return largest;
}

void encode_rows(const Bf16Rows& rows, const std::int8_t* exponents, float tensor_scale,
                 std::uint8_t* codes, std::int8_t* norms) {
  const float scale = rotation_scale(rows.dim);
  Row row;
  for (std::int64_t i = 0; i < rows.count; ++i) {
    const int exponent = exponents[i];
    if (exponent == stages::kNanExponent) {
      std::memset(codes + i * rows.dim, 0, static_cast<std::size_t>(rows.dim));
      if (norms != nullptr) norms[i] = stages::kNanExponent;
      continue;
    }
    load_row(rows, i, scale, row);
    const float factor = tensor_scale != 0 ? tensor_scale : pow2(-exponent);
    std::uint8_t* const row_codes = codes + i * rows.dim;
    if (norms == nullptr) {
      encode_row<false>(row, rows.dim, factor, row_codes);
    } else {
      encode_row<true>(row, rows.dim, factor, row_codes);
      const float sum = dot(row, row, rows.dim);
      norms[i] = static_cast<std::int8_t>(stages::norm_exponent(sum, exponent));
    }
  }
}

void gradient_rows(const Bf16Rows& dout, const Bf16Rows& out, ExponentRule rule,
                   const GradientRows& g) {
  const Lanes d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  const int dim = dout.dim;
  Row grad, output;
  for (std::int64_t i = 0; i < dout.count; ++i) {
    load_row(dout.row(i), dim, grad);
    load_row(out.row(i), dim, output);
    const auto divisor = hn::Set(d, g.row_sum[i]);
    for (int c = 0; c < dim; c += lanes) {
      hn::Store(hn::Div(hn::Load(d, grad.x + c), divisor), d, grad.x + c);
    }
    // The padding is 0 / L, which is NaN where L is.
    for (int c = dim; c < padded(dim); ++c) grad.x[c] = 0;

    const int exponent = stages::token_exponent(rule, max_magnitude(grad, dim));
    g.exponents[i] = static_cast<std::int8_t>(exponent);
    if (exponent == stages::kNanExponent) {
      std::memset(g.codes + i * dim, 0, static_cast<std::size_t>(dim));
      g.norms[i] = stages::kNanExponent;
      g.delta[i] = kNan;
    } else {
      encode_row<true>(grad, dim, pow2(-exponent), g.codes + i * dim);
      g.norms[i] = static_cast<std::int8_t>(stages::norm_exponent(dot(grad, grad, dim), exponent));
      scale_row(grad, dim, pow2(exponent));
      const float delta = dot(grad, output, dim);
      g.delta[i] = is_nan(delta) ? kNan : delta;
    }
    g.output_norms[i] = static_cast<std::int8_t>(norm_of_values(output, dim));
  }
}

void restore_rows(const std::uint8_t* codes, const std::int8_t* exponents, const float* scale,
                  std::int64_t count, int dim, bool rotate, float* y, std::int64_t stride) {
  const Lanes d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  const float normalisation = rotation_scale(dim);
  Row row;
  for (std::int64_t i = 0; i < count; ++i) {
    const auto exponent = stages::Exponent::stored(exponents[i]);
    const float factor = scale == nullptr or exponent.nan ? stages::factor(exponent) : *scale;
    const std::uint8_t* code = codes + i * dim;
    HWY_ALIGN std::uint8_t tail[padded(kMaxDim)];
    if (dim % lanes != 0) {
      std::memcpy(tail, code, static_cast<std::size_t>(dim));
      std::memset(tail + dim, 0, static_cast<std::size_t>(padded(dim) - dim));
      code = tail;
    }
    for (int c = 0; c < dim; c += lanes) {
      hn::Store(hn::Mul(load_e4m3(d, code + c), hn::Set(d, factor)), d, row.x + c);
    }
    if (rotate) rotate_row(row.x, dim, normalisation);
    std::memcpy(y + i * stride, row.x, static_cast<std::size_t>(dim) * sizeof(float));
  }
}

void rotate_rows(float* x, std::int64_t count, int dim, std::int64_t stride) {
  const float scale = rotation_scale(dim);
  Row row;
  for (std::int64_t i = 0; i < count; ++i) {
    std::memset(row.x, 0, sizeof(float) * static_cast<std::size_t>(padded(dim)));
    std::memcpy(row.x, x + i * stride, static_cast<std::size_t>(dim) * sizeof(float));
    rotate_row(row.x, dim, scale);
    std::memcpy(x + i * stride, row.x, static_cast<std::size_t>(dim) * sizeof(float));
  }
}

const char* simd_target() { return hwy::TargetName(HWY_TARGET); }

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace mxattn
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace mxattn {

HWY_EXPORT(token_exponents);
HWY_EXPORT(encode_rows);
HWY_EXPORT(gradient_rows);
HWY_EXPORT(restore_rows);
HWY_EXPORT(rotate_rows);
HWY_EXPORT(simd_target);

namespace rows {

float token_exponents(const Bf16Rows& x, ExponentRule rule, std::int8_t* exponents) {
  return HWY_DYNAMIC_DISPATCH(token_exponents)(x, rule, exponents);
}

void encode_rows(const Bf16Rows& x, const std::int8_t* exponents, float tensor_scale,
                 std::uint8_t* codes, std::int8_t* norms) {
  HWY_DYNAMIC_DISPATCH(encode_rows)(x, exponents, tensor_scale, codes, norms);
}

void gradient_rows(const Bf16Rows& dout, const Bf16Rows& out, ExponentRule rule,
                   const GradientRows& g) {
  HWY_DYNAMIC_DISPATCH(gradient_rows)(dout, out, rule, g);
}

void restore_rows(const std::uint8_t* codes, const std::int8_t* exponents, const float* scale,
                  std::int64_t count, int dim, bool rotate, float* y, std::int64_t stride) {
  HWY_DYNAMIC_DISPATCH(restore_rows)
  (codes, exponents, scale, count, dim, rotate, y, stride);
}

void rotate_rows(float* x, std::int64_t count, int dim, std::int64_t stride) {
  HWY_DYNAMIC_DISPATCH(rotate_rows)(x, count, dim, stride);
}

const char* simd_target() { return HWY_DYNAMIC_DISPATCH(simd_target)(); }

}  // namespace rows
}  // namespace mxattn
#endif
