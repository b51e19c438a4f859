// docs/numerics.md, sections 3 to 5, restated for one element at a time: plain loops over rows, no
// tile shared between rows, no vector, no packing. What the fast backend must equal bit for bit
// with Problem::sm90_accumulator. For tests only.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <vector>

#include "formats/bf16.h"
#include "formats/fp16.h"
#include "formats/fp8.h"
#include "kernels/cpu/fp32_ops.h"
#include "quantize/quantize.h"
#include "recipe/exponents.h"
#include "recipe/roles.h"
#include "recipe/stages.h"
#include "support/attention_case.h"

namespace mxattn::test {

using kernels::cpu::Fp32Ops;
using stages::Exponent;

/// One k32 step of the FP8 tensor core on a running accumulator.
class TensorCore {
 public:
  /// a, b: at most 32 E4M3 values each, NaN allowed.
  static float step(float acc, const float* a, const float* b, int count) {
    int top = -1000;
    const auto exponent = [](float x) { return std::max(std::ilogb(x), -6); };
    for (int i = 0; i < count; ++i) {
      if (std::isnan(a[i]) or std::isnan(b[i])) return kNan;
      if (a[i] != 0 and b[i] != 0) top = std::max(top, exponent(a[i]) + exponent(b[i]));
    }
    if (std::isnan(acc)) return kNan;
    if (acc != 0) top = std::max(top, std::ilogb(acc));
    if (top == -1000) return 0;
    // In units of 2^(top - 13), each term cut toward zero.
    double sum = std::trunc(std::ldexp(static_cast<double>(acc), 13 - top));
    for (int i = 0; i < count; ++i) {
      sum += std::trunc(std::ldexp(static_cast<double>(a[i]) * b[i], 13 - top));
    }
    if (sum == 0) return 0;
    const int extra = std::max(std::ilogb(sum) - 13, 0);
    const double cut = std::ldexp(std::trunc(std::ldexp(sum, -extra)), extra);
    return static_cast<float>(std::ldexp(cut, top - 13));
  }

  /// Steps of 32 ascending.
  static float dot(float acc, const std::vector<float>& a, const std::vector<float>& b) {
    for (std::size_t k = 0; k < a.size(); k += 32) {
      acc = step(acc, a.data() + k, b.data() + k,
                 static_cast<int>(std::min(a.size() - k, std::size_t{32})));
    }
    return acc;
  }
};

/// One document and query head, with everything the passes read, by position in the document.
struct ReferenceHead {
  struct Rows {
    std::vector<std::vector<float>> code;  // values of codes, (length, dim)
    std::vector<std::int8_t> exponent, norm;
    Exponent e(int t) const { return Exponent::stored(exponent[static_cast<std::size_t>(t)]); }
    Exponent n(int t) const { return Exponent::stored(norm[static_cast<std::size_t>(t)]); }
  };

  static Rows rows_of(const Operand& x, int head, std::int64_t slot, int length) {
    Rows rows;
    for (int t = 0; t < length; ++t) {
      std::vector<float> row;
      for (int c = 0; c < x.dim; ++c) row.push_back(e4m3_to_float(x.row(head, slot + t)[c]));
      rows.code.push_back(row);
      rows.exponent.push_back(x.exponents_of(head)[slot + t]);
      rows.norm.push_back(x.norms_of(head)[slot + t]);
    }
    return rows;
  }

  Recipe recipe;
  Mask mask;
  float scale = 0;  // stages::score_scale
  int q_len = 0, k_len = 0, dim = 0;
  Rows q, k, v, g;
  std::vector<std::int8_t> output_norm;
  std::vector<float> delta;
  std::vector<std::int32_t> mu;

  Range keys_of(int i) const { return visible_keys(mask, q_len, k_len, i); }
  float a(int i, int j) const { return stages::score_factor(scale, q.e(i), k.e(j)); }
  float score(int i, int j) const { return TensorCore::dot(0, q.code[i], k.code[j]); }
  float gradient(int i, int j) const { return TensorCore::dot(0, g.code[i], v.code[j]); }
  bool is_live(int tile) const {
    for (int i = tile * 128; i < std::min(q_len, tile * 128 + 128); ++i) {
      for (const float x : g.code[i]) {
        if (x != 0) return true;
      }
    }
    return false;
  }
};

/// What a head is made of: operands, what the backward prepared, and mu of (heads, total_q).
struct ReferenceOperands {
  const Operand &q, &k, &v, &g;
  const std::vector<std::int8_t>& output_norms;
  const std::vector<float>& delta;
  const std::vector<std::int32_t>& row_reference;
};

inline ReferenceHead reference_head(const AttentionCase& test, const Document& document, int head,
                                    const ReferenceOperands& from) {
  const CaseSpec& spec = test.spec();
  const int key_head = head / (spec.heads_q / spec.heads_k);
  ReferenceHead x;
  x.recipe = spec.recipe;
  x.mask = spec.mask;
  x.scale = stages::score_scale(spec.softmax_scale);
  x.q_len = document.q_len;
  x.k_len = document.k_len;
  x.dim = spec.dim;
  x.q = ReferenceHead::rows_of(from.q, head, document.q_slot, document.q_len);
  x.g = ReferenceHead::rows_of(from.g, head, document.q_slot, document.q_len);
  x.k = ReferenceHead::rows_of(from.k, key_head, document.k_slot, document.k_len);
  x.v = ReferenceHead::rows_of(from.v, key_head, document.k_slot, document.k_len);
  const auto part = [&](const auto& table, std::int64_t at) {
    return std::vector(table.begin() + at, table.begin() + at + x.q_len);
  };
  const std::int64_t slot = head * test.pack().q_slots + document.q_slot;
  x.output_norm = part(from.output_norms, slot);
  x.delta = part(from.delta, slot);
  x.mu = part(from.row_reference, head * test.pack().total_q + document.q_token);
  return x;
}

/// The end of dQ and dK: times softmax_scale, rotated back.
inline std::vector<float> finished(const AttentionCase& test, std::vector<float> sum) {
  for (float& x : sum) x = mul_rn(x, test.spec().softmax_scale);
  const int dim = static_cast<int>(sum.size());
  if (is_rotated(Role::kQ, dim, test.problem().rotate)) rotate_rows(sum.data(), 1, dim, dim, 1);
  return sum;
}

/// Bits of a BF16 value, one pattern for every NaN and both zeros.
inline int plain_bits(std::uint16_t bits) {
  if ((bits & 0x7fff) > 0x7f80) return 0x7fff;
  return (bits & 0x7fff) == 0 ? 0 : bits;
}

/// A written BF16 row against the reference's.
inline void expect_row(const char* what, const std::uint16_t* got, const std::vector<float>& want,
                       int token) {
  for (std::size_t c = 0; c < want.size(); ++c) {
    ASSERT_EQ(plain_bits(got[c]), plain_bits(float_to_bf16(want[c])))
        << what << " of token " << token << ", channel " << c << ": " << bf16_to_float(got[c])
        << " against " << want[c];
  }
}

/// The largest of f(t) over [begin, end).
template <class F>
Exponent largest(int begin, int end, const F& f) {
  Exponent most(-400);
  for (int t = begin; t < end; ++t) most = max(most, f(t));
  return most;
}

/// Where the restatement rounds P and dS to E4M3 and forms 2^x between maxima. A test that replays
/// what somebody else rounded puts its own in place; each is given what is computed here.
struct OwnWeights {
  float alpha(int /*query*/, int /*tile*/, float own) const { return own; }
  float row_weight(int /*query*/, int /*key*/, float value) const { return round_e4m3(value); }
  float value_weight(int /*query*/, int /*key*/, float value) const { return round_e4m3(value); }
  float gradient_weight(int /*query*/, int /*key*/, float value) const { return round_e4m3(value); }
  float ds_of_dq(int /*query*/, int /*key*/, float value) const { return round_e4m3(value); }
  float ds_of_dk(int /*query*/, int /*key*/, float value) const { return round_e4m3(value); }
};

/// Section 3, one row.
struct ReferenceForward {
  std::vector<float> o;
  float m = -kInfinity, l = 0;

  template <class Weights = OwnWeights>
  ReferenceForward(const ReferenceHead& x, int i, Weights&& weights = {}) : o(x.dim, 0.0f) {
    const Range seen = x.keys_of(i);
    for (int t = (x.k_len - 1) / 128; t >= 0; --t) {
      const Range keys{std::max(seen.begin, t * 128), std::min(seen.end, t * 128 + 128)};
      if (not keys.empty()) add_tile(x, i, t, keys, weights);
    }
  }

 private:
  template <class Weights>
  void add_tile(const ReferenceHead& x, int i, int t, Range keys, Weights& rounded) {
    std::array<float, 128> acc{};
    float top = -kInfinity;
    for (int j = keys.begin; j < keys.end; ++j) {
      acc[j - t * 128] = x.score(i, j);
      const float z = stages::score<Fp32Ops>(acc[j - t * 128], x.a(i, j));
      if (z > top) top = z;
    }
    if (x.recipe.row_reference == RowReference::kInteger) top = std::ceil(top);
    const float new_m = std::max(m, top);
    const float alpha = rounded.alpha(i, t, m == new_m ? 1.0f : stages::rescale<Fp32Ops>(m, new_m));
    m = new_m;

    const Exponent c = largest(keys.begin, keys.end, [&](int j) { return x.v.e(j); });
    std::vector<float> h(128, 0.0f), hs(128, 0.0f), ones(128, 1.0f);
    std::array<float, 16> weights{};
    for (int j = keys.begin; j < keys.end; ++j) {
      const int n = j - t * 128;
      const float p =
          stages::probability<Fp32Ops>(acc[n], x.a(i, j), stages::forward_addend<Fp32Ops>(m));
      weights[n % 16] += p;
      hs[n] = rounded.row_weight(i, j, p);
      h[n] = rounded.value_weight(i, j, mul_rn(p, stages::factor(x.v.e(j) - c)));
    }
    float sum = TensorCore::dot(0, hs, ones);
    if (x.recipe.row_sum == RowSum::kWeights) {
      for (int width = 8; width > 0; width /= 2) {
        for (int q = 0; q < width; ++q) weights[q] += weights[q + width];
      }
      sum = weights[0];
    }
    l = stages::update_row_sum<Fp32Ops>(l, alpha, sum);
    for (int channel = 0; channel < x.dim; ++channel) {
      std::vector<float> column(128, 0.0f);
      for (int n = 0; n < std::min(128, x.k_len - t * 128); ++n) {
        column[n] = x.v.code[t * 128 + n][channel];
      }
      o[channel] = stages::update_output<Fp32Ops>(o[channel], alpha, TensorCore::dot(0, h, column),
                                                  stages::output_factor(c));
    }
  }
};

/// Section 4, the dQ pass, one row; before the epilogue.
template <class Weights = OwnWeights>
std::vector<float> reference_dq(const ReferenceHead& x, int i, Weights&& rounded = {}) {
  const bool row_scale = x.recipe.ds_scale == DsScale::kRow;
  std::vector<float> sum(x.dim, 0.0f), acc(x.dim, 0.0f);
  const Range seen = x.keys_of(i);
  Exponent r(0);
  int chunk = -1;
  const auto promote = [&](Exponent e) {
    for (int c = 0; c < x.dim; ++c) {
      sum[c] = stages::promote<Fp32Ops>(sum[c], acc[c], stages::factor(e));
      acc[c] = 0;
    }
  };
  for (int t = 0; t * 128 < x.k_len; ++t) {
    if (not row_scale and stages::promotes_dq(t, i / 64 % 2)) promote(r);
    const Range keys{std::max(seen.begin, t * 128), std::min(seen.end, t * 128 + 128)};
    if (keys.empty()) continue;
    if (stages::chunk_of(t * 128) != chunk) {
      chunk = stages::chunk_of(t * 128);
      const int begin = stages::chunk_begin(chunk);
      const int end = std::min(seen.end, stages::chunk_end(chunk));
      const Exponent nv = largest(begin, end, [&](int j) { return x.v.n(j); });
      const Exponent ek =
          largest(std::max(begin, seen.begin), end, [&](int j) { return x.k.e(j); });
      const Exponent before = r;
      r = stages::ds_exponent_dq(x.g.n(i), Exponent::stored(x.output_norm[i]), nv, ek);
      for (float& y : acc) {
        y = stages::rescale_accumulator<Fp32Ops>(y, stages::factor(before - r));
      }
    }
    std::vector<float> ds(128, 0.0f);
    for (int j = keys.begin; j < keys.end; ++j) {
      const Exponent e = stages::dq_addend(x.mu[i], x.g.e(i), x.v.e(j), x.k.e(j), r);
      const float p = stages::probability<Fp32Ops>(x.score(i, j), x.a(i, j),
                                                   e.nan ? kNan : static_cast<float>(e.value));
      ds[j - t * 128] = stages::dq_ds<Fp32Ops>(p, x.gradient(i, j),
                                               stages::dq_delta(x.delta[i], x.g.e(i), x.v.e(j)));
    }
    Exponent extra(0);
    if (row_scale) {
      float most = 0;
      for (const float y : ds) most = std::max(most, std::abs(y));
      extra = Exponent::stored(
          static_cast<std::int8_t>(stages::token_exponent(ExponentRule::kRoundUp, most)));
    }
    for (int j = keys.begin; j < keys.end; ++j) {
      float& y = ds[j - t * 128];
      y = rounded.ds_of_dq(i, j, row_scale ? mul_rn(y, stages::factor(-extra)) : y);
    }
    for (int c = 0; c < x.dim; ++c) {
      std::vector<float> column(128, 0.0f);
      for (int n = 0; n < std::min(128, x.k_len - t * 128); ++n) {
        column[n] = x.k.code[t * 128 + n][c];
      }
      acc[c] = TensorCore::dot(acc[c], ds, column);
    }
    if (row_scale) promote(r + extra);
  }
  if (not row_scale) promote(r);
  return sum;
}

/// c and r's parts for each query tile of a head; `spreads` counts chunks taken tile by tile.
struct ReferenceScales {
  std::vector<stages::ChunkScales> tile;
  std::vector<bool> live;
  int spreads = 0;

  explicit ReferenceScales(const ReferenceHead& x) {
    const int tiles = (x.q_len + 127) / 128;
    const auto of_tokens = [&](int begin, int end) {
      stages::ChunkScales s;
      s.c = largest(begin, end, [&](int i) { return x.g.e(i); });
      s.b = largest(begin, end, [&](int i) { return x.g.n(i) + x.q.e(i); });
      s.a = largest(begin, end, [&](int i) {
        const bool zero = x.output_norm[i] == stages::kNormExponentMin;
        return zero ? Exponent(-400) : x.g.n(i) + x.q.e(i) + Exponent::stored(x.output_norm[i]);
      });
      return s;
    };
    for (int t = 0; t < tiles; ++t) {
      tile.push_back(of_tokens(t * 128, std::min(x.q_len, t * 128 + 128)));
      live.push_back(x.is_live(t));
    }
    const std::vector<stages::ChunkScales> own = tile;
    for (int chunk = 0; stages::chunk_begin(chunk) < x.q_len; ++chunk) {
      std::vector<int> members;
      for (int t = 0; t < tiles; ++t) {
        if (stages::chunk_of(t * 128) == chunk and live[t]) members.push_back(t);
      }
      if (members.empty()) continue;
      stages::ChunkScales most = own[members[0]], least = most;
      for (const int t : members) {
        most = {max(most.a, own[t].a), max(most.b, own[t].b), max(most.c, own[t].c)};
        least = {std::min(least.a.value, own[t].a.value), std::min(least.b.value, own[t].b.value),
                 std::min(least.c.value, own[t].c.value)};
      }
      const bool spread = most.a.value - least.a.value > 6 or most.b.value - least.b.value > 6 or
                          most.c.value - least.c.value > 6;
      spreads += spread ? 1 : 0;
      for (const int t : members) tile[t] = spread ? own[t] : most;
    }
  }
};

/// Section 4, the dK/dV pass: adds one query head to the FP32 sums of key j.
template <class Weights = OwnWeights>
void reference_dkv(const ReferenceHead& x, const ReferenceScales& scales, int j,
                   std::vector<float>& dk, std::vector<float>& dv, Weights&& rounded = {}) {
  const bool row_scale = x.recipe.ds_scale == DsScale::kRow;
  const int half = j / 64 % 2;
  const Range seen = visible_queries(x.mask, x.q_len, x.k_len, j);
  const Exponent nv = largest(j / 128 * 128, std::min(x.k_len, j / 128 * 128 + 128),
                              [&](int t) { return x.v.n(t); });
  std::vector<float> k_acc(x.dim, 0.0f), v_acc(x.dim, 0.0f);
  Exponent c(8), r(0);
  const auto promote = [&](std::vector<float>& to, std::vector<float>& acc, Exponent e) {
    for (int n = 0; n < x.dim; ++n) {
      to[n] = stages::promote<Fp32Ops>(to[n], acc[n], stages::factor(e));
      acc[n] = 0;
    }
  };
  const auto rescale = [](std::vector<float>& acc, Exponent change) {
    for (float& y : acc) y = stages::rescale_accumulator<Fp32Ops>(y, stages::factor(change));
  };
  for (int step = 0; step * 64 < x.q_len; ++step) {
    if (stages::promotes_dv(step, half)) promote(dv, v_acc, c - 8);
    if (not row_scale and stages::promotes_dk(step, half)) promote(dk, k_acc, r);
    const Range queries{std::max(seen.begin, step * 64), std::min(seen.end, step * 64 + 64)};
    if (queries.empty()) continue;
    if (scales.live[step / 2]) {
      const stages::ChunkScales& now = scales.tile[step / 2];
      rescale(v_acc, c - now.c);
      c = now.c;
      const Exponent before = r;
      r = stages::ds_exponent_dk(now, nv);
      rescale(k_acc, before - r);
    }
    std::vector<float> t(64, 0.0f), ds(64, 0.0f);
    for (int i = queries.begin; i < queries.end; ++i) {
      const Exponent e = stages::dkv_addend(x.mu[i], x.g.e(i), c);
      const float p = stages::probability<Fp32Ops>(x.score(i, j), x.a(i, j),
                                                   e.nan ? kNan : static_cast<float>(e.value));
      const float d16 = fp16_to_float(float_to_fp16(
          std::clamp(mul_rn(x.delta[i], stages::dkv_delta_factor(c, x.g.e(i), x.q.e(i), r)),
                     -65504.0f, 65504.0f)));
      t[i - step * 64] = rounded.gradient_weight(i, j, p);
      ds[i - step * 64] = stages::dkv_ds<Fp32Ops>(
          p, x.gradient(i, j), stages::dkv_gradient_factor(c, x.v.e(j), x.q.e(i), r), d16);
    }
    Exponent extra(0);
    if (row_scale) {
      float most = 0;
      for (const float y : ds) most = std::max(most, std::abs(y));
      extra = Exponent::stored(
          static_cast<std::int8_t>(stages::token_exponent(ExponentRule::kRoundUp, most)));
    }
    for (int i = queries.begin; i < queries.end; ++i) {
      float& y = ds[i - step * 64];
      y = rounded.ds_of_dk(i, j, row_scale ? mul_rn(y, stages::factor(-extra)) : y);
    }
    for (int n = 0; n < x.dim; ++n) {
      std::vector<float> q_column(64, 0.0f), g_column(64, 0.0f);
      for (int i = step * 64; i < std::min(x.q_len, step * 64 + 64); ++i) {
        q_column[i - step * 64] = x.q.code[i][n];
        g_column[i - step * 64] = x.g.code[i][n];
      }
      v_acc[n] = TensorCore::dot(v_acc[n], t, g_column);
      k_acc[n] = TensorCore::dot(k_acc[n], ds, q_column);
    }
    if (row_scale) promote(dk, k_acc, r + extra);
  }
  promote(dv, v_acc, c - 8);
  if (not row_scale) promote(dk, k_acc, r);
}

}  // namespace mxattn::test
