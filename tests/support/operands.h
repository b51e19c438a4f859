// What quantisation means, restated in plain scalar code, and inputs for it: for the tests of
// quantize/.
//
// Nothing here uses the library's codecs or exponent rules: codes are found by searching the values
// of E4M3, exponents by comparing in double, where powers of two and sums of two are exact.
#pragma once

#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "pack/pack.h"
#include "quantize/cpu/rows.h"
#include "quantize/quantize.h"
#include "recipe/registry.h"

namespace mxattn::quantize_test {

// ---- scalar definitions -----------------------------------------------------------------------

inline float value_of_bf16(std::uint16_t x) {
  const std::uint32_t bits = std::uint32_t{x} << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline std::uint16_t nearest_bf16(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  if (std::isnan(x)) return 0x7FC0;
  return static_cast<std::uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

/// Value of a magnitude code 0..0x7E.
inline double value_of_code(int code) {
  return code < 8 ? std::ldexp(code, -9) : std::ldexp(8 + code % 8, code / 8 - 10);
}

inline double value_of_signed_code(std::uint8_t code) {
  return code & 0x80 ? -value_of_code(code & 0x7F) : value_of_code(code & 0x7F);
}

/// The code nearest to x, of two equally near ones the even one.
inline std::uint8_t nearest_code(double x) {
  static const std::array<double, 126> middles = [] {
    std::array<double, 126> m{};
    for (int code = 0; code < 126; ++code) {
      m[code] = (value_of_code(code) + value_of_code(code + 1)) / 2;
    }
    return m;
  }();
  const double magnitude = std::fabs(x);
  const auto above = std::lower_bound(middles.begin(), middles.end(), magnitude);
  int code = static_cast<int>(above - middles.begin());
  if (above != middles.end() and *above == magnitude and code % 2 != 0) ++code;
  return static_cast<std::uint8_t>(code | (std::signbit(x) ? 0x80 : 0));
}

/// Least e with magnitude 2^-e <= 448 (round-up rule), or floor(log2 magnitude) - 8; clamped.
inline int exponent_of(ExponentRule rule, double magnitude) {
  if (not std::isfinite(magnitude)) return 127;
  if (magnitude == 0) return -96;
  int e = 0;
  if (rule == ExponentRule::kFloor) {
    e = std::ilogb(magnitude) - 8;
  } else {
    e = -300;
    while (std::ldexp(magnitude, -e) > 448) ++e;
  }
  return std::clamp(e, -96, 96);
}

/// Four FMA chains over c = q, q + 4, ..., then (0 + 1) + (2 + 3).
inline float chained_dot(const std::vector<float>& a, const std::vector<float>& b) {
  float chain[4] = {};
  for (std::size_t c = 0; c < a.size(); ++c) chain[c % 4] = std::fma(a[c], b[c], chain[c % 4]);
  const float low = chain[0] + chain[1], high = chain[2] + chain[3];
  return low + high;
}

/// Least n with sqrt(sum) 2^exponent <= 2^n.
inline int norm_of(float sum, int exponent) {
  if (sum == 0) return -96;
  int n = -200;
  while (double{sum} > std::ldexp(1.0, 2 * n)) ++n;
  return std::clamp(n + exponent, -96, 126);
}

/// Norm exponent of values without exponents of their own.
inline int norm_of_values(std::vector<float> x) {
  float largest = 0;
  for (const float value : x) {
    if (not std::isfinite(value)) return 127;
    largest = std::max(largest, std::fabs(value));
  }
  if (largest == 0) return -96;
  const int exponent = std::ilogb(largest);
  for (float& value : x) value = static_cast<float>(std::ldexp(double{value}, -exponent));
  return norm_of(chained_dot(x, x), exponent);
}

/// The butterflies of stride 1, 2, 4, ..., then times the constant.
inline void rotate(std::vector<float>& x) {
  const std::size_t dim = x.size();
  for (std::size_t stride = 1; stride < dim; stride *= 2) {
    for (std::size_t c = 0; c < dim; ++c) {
      if ((c & stride) != 0) continue;
      const float a = x[c], b = x[c + stride];
      x[c] = a + b;
      x[c + stride] = a - b;
    }
  }
  const float scale = dim == 128 ? 0.08838834764831845f
                                 : static_cast<float>(1 / std::sqrt(static_cast<double>(dim)));
  for (float& value : x) value *= scale;
}

// ---- operands ---------------------------------------------------------------------------------

/// An operand with its own buffers, filled with rubbish so that what nobody writes is seen.
struct Buffers {
  std::vector<std::uint8_t> codes;
  std::vector<std::int8_t> exponents, norms;
  std::vector<float> scale;
  Operand operand;

  Buffers(std::int64_t slots, int heads, int dim, bool with_norms, bool with_scale)
      : codes(static_cast<std::size_t>(heads * slots * dim), 0xA5),
        exponents(static_cast<std::size_t>(heads * slots), 77),
        norms(static_cast<std::size_t>(with_norms ? heads * slots : 0), 77),
        scale(with_scale ? 1 : 0, -1.0f) {
    operand = {.codes = codes.data(),
               .exponents = exponents.data(),
               .norms = with_norms ? norms.data() : nullptr,
               .scale = with_scale ? scale.data() : nullptr,
               .slots = slots,
               .heads = heads,
               .dim = dim};
  }
  Buffers(const Buffers&) = delete;
  Buffers(Buffers&&) = default;

  bool operator==(const Buffers& other) const {
    return codes == other.codes and exponents == other.exponents and norms == other.norms and
           scale == other.scale;
  }
};

/// (tokens, heads, dim) with its own memory.
struct Tensor {
  std::vector<std::uint16_t> data;
  std::int64_t tokens;
  int heads, dim;

  Tensor(std::int64_t num_tokens, int num_heads, int channels)
      : data(static_cast<std::size_t>(num_tokens * num_heads * channels)),
        tokens(num_tokens),
        heads(num_heads),
        dim(channels) {}

  TensorView<const std::uint16_t> view() const {
    return {data.data(), tokens, heads, dim, std::int64_t{heads} * dim, dim};
  }
  std::uint16_t* row(std::int64_t token, int head) {
    return data.data() + (token * heads + head) * dim;
  }
};

struct Case {
  Recipe recipe = recipes::fp8;
  Role role = Role::kQ;
  Pack pack;
  bool rotate = false;

  bool with_scale() const { return recipe.scale_group == ScaleGroup::kTensor; }
  bool with_norms() const { return role == Role::kV and not with_scale(); }
  bool query_side() const { return role == Role::kQ or role == Role::kGradient; }
  std::int64_t tokens() const { return query_side() ? pack.total_q : pack.total_k; }
  std::int64_t slots() const { return query_side() ? pack.q_slots : pack.k_slots; }
  int length(const Document& d) const { return query_side() ? d.q_len : d.k_len; }
  std::int64_t token(const Document& d) const { return query_side() ? d.q_token : d.k_token; }
  std::int64_t slot(const Document& d) const { return query_side() ? d.q_slot : d.k_slot; }
};

inline Buffers library(const Case& c, const TensorView<const std::uint16_t>& x, int threads = 1) {
  Buffers result(c.slots(), x.heads, x.dim, c.with_norms(), c.with_scale());
  quantize(c.recipe, c.role, x, c.pack, c.rotate, threads, result.operand);
  return result;
}

inline std::vector<float> values_of(const std::uint16_t* row, int dim) {
  std::vector<float> x(static_cast<std::size_t>(dim));
  for (int i = 0; i < dim; ++i) x[static_cast<std::size_t>(i)] = value_of_bf16(row[i]);
  return x;
}

inline float magnitude_of(const std::vector<float>& x) {
  float largest = 0;
  for (const float value : x) {
    if (not std::isfinite(value)) return std::numeric_limits<float>::infinity();
    largest = std::max(largest, std::fabs(value));
  }
  return largest;
}

/// The same by the definition: one document, head and token at a time.
inline Buffers definition(const Case& c, const TensorView<const std::uint16_t>& x) {
  Buffers result(c.slots(), x.heads, x.dim, c.with_norms(), c.with_scale());
  const bool power_of_two = (x.dim & (x.dim - 1)) == 0;
  const bool rotated = c.rotate and power_of_two and (c.role == Role::kQ or c.role == Role::kK);
  const auto row_of = [&](std::int64_t token, int head) {
    std::vector<float> row = values_of(x.row(token, head), x.dim);
    if (rotated) rotate(row);
    return row;
  };

  float tensor_scale = 0;
  if (c.with_scale()) {
    float amax = 0;
    for (const Document& document : c.pack.documents) {
      for (int i = 0; i < c.length(document); ++i) {
        for (int head = 0; head < x.heads; ++head) {
          const float m = magnitude_of(row_of(c.token(document) + i, head));
          if (std::isfinite(m)) amax = std::max(amax, m);
        }
      }
    }
    tensor_scale = amax == 0 ? 1.0f : std::min(448.0f / amax, 0x1p127f);
    result.scale[0] = 1.0f / tensor_scale;
  }

  std::fill(result.codes.begin(), result.codes.end(), 0);
  std::fill(result.exponents.begin(), result.exponents.end(), c.with_scale() ? 0 : -96);
  std::fill(result.norms.begin(), result.norms.end(), -96);
  for (const Document& document : c.pack.documents) {
    const int length = c.length(document);
    for (int head = 0; head < x.heads; ++head) {
      std::vector<int> own(static_cast<std::size_t>(length));
      for (int i = 0; i < length; ++i) {
        own[i] =
            exponent_of(c.recipe.exponent_rule, magnitude_of(row_of(c.token(document) + i, head)));
      }
      for (int i = 0; i < length; ++i) {
        int e = own[i];
        if (c.recipe.scale_group == ScaleGroup::kRunning) {
          e = *std::max_element(own.begin(), own.begin() + i + 1);
          if (e != 127) e = 4 * static_cast<int>(std::ceil(e / 4.0));
        } else if (c.recipe.scale_group == ScaleGroup::kBlock32) {
          const int begin = i / 32 * 32, end = std::min(length, begin + 32);
          e = *std::max_element(own.begin() + begin, own.begin() + end);
        } else if (c.with_scale()) {
          e = e == 127 ? 127 : 0;
        }
        const std::int64_t at = head * c.slots() + c.slot(document) + i;
        result.exponents[at] = static_cast<std::int8_t>(e);
        if (e == 127) {
          if (c.with_norms()) result.norms[at] = 127;
          continue;
        }
        const std::vector<float> row = row_of(c.token(document) + i, head);
        std::vector<float> coded;
        for (int channel = 0; channel < x.dim; ++channel) {
          const double scaled = c.with_scale() ? double{row[channel] * tensor_scale}
                                               : std::ldexp(double{row[channel]}, -e);
          const std::uint8_t code = nearest_code(scaled);
          result.codes[at * x.dim + channel] = code;
          coded.push_back(static_cast<float>(value_of_signed_code(code)));
        }
        if (c.with_norms()) {
          result.norms[at] = static_cast<std::int8_t>(norm_of(chained_dot(coded, coded), e));
        }
      }
    }
  }
  return result;
}

// ---- SIMD targets -----------------------------------------------------------------------------

/// Runs `body` once for each SIMD target.
template <class Body>
void on_every_target(const Body& body) {
  for (const std::int64_t target : hwy::SupportedAndGeneratedTargets()) {
    hwy::SetSupportedTargetsForTest(target);
    SCOPED_TRACE(rows::simd_target());
    body();
  }
  hwy::SetSupportedTargetsForTest(0);
}

// ---- inputs -----------------------------------------------------------------------------------

using Random = std::mt19937;

inline int draw(Random& random, int low, int high) {
  return std::uniform_int_distribution<int>(low, high)(random);
}

/// Heavy tails: normal values, tokens spread over `binades`, some channels 30 times larger, some
/// tokens zero.
inline Tensor heavy_tailed(Random& random, std::int64_t tokens, int heads, int dim, int binades,
                           int exponent = 0) {
  Tensor tensor(tokens, heads, dim);
  std::normal_distribution<float> normal;
  const int loud = draw(random, 0, dim - 1);
  for (std::int64_t token = 0; token < tokens; ++token) {
    for (int head = 0; head < heads; ++head) {
      const int shift = exponent + draw(random, -binades, binades);
      const bool zero = draw(random, 0, 19) == 0;
      std::uint16_t* row = tensor.row(token, head);
      for (int c = 0; c < dim; ++c) {
        const float x = std::ldexp(normal(random) * (c == loud ? 30.0f : 1.0f), shift);
        row[c] = zero ? 0 : nearest_bf16(x);
      }
    }
  }
  return tensor;
}

inline Pack pack_of(const std::vector<int>& lengths, int spare = 0) {
  std::vector<std::int32_t> offsets{0};
  for (const int length : lengths) offsets.push_back(offsets.back() + length);
  return make_pack(offsets, offsets, offsets.back() + spare, offsets.back() + spare);
}

inline Pack random_pack(Random& random, int longest) {
  std::vector<std::int32_t> q{0}, k{0};
  const int lengths[] = {0, 1, 15, 16, 17, 31, 32, 33, 127, 128, 129};
  const int num_documents = draw(random, 1, 5);
  for (int i = 0; i < num_documents; ++i) {
    for (std::vector<std::int32_t>* offsets : {&q, &k}) {
      const int length =
          draw(random, 0, 1) == 0 ? lengths[draw(random, 0, 10)] : draw(random, 0, longest);
      offsets->push_back(offsets->back() + std::min(length, longest));
    }
  }
  const int spare = draw(random, 0, 20);
  return make_pack(q, k, q.back() + spare, k.back() + spare);
}

}  // namespace mxattn::quantize_test
