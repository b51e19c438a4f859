// What the backward prepares, restored values, rotation, transposed copies and maxima of norms.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "quantize/quantize.h"
#include "recipe/exponents.h"
#include "recipe/roles.h"
#include "support/operands.h"

namespace mxattn::quantize_test {
namespace {

// ---- gradient preparation ---------------------------------------------------------------------

struct Gradient {
  Buffers g;
  std::vector<std::int8_t> output_norms;
  std::vector<float> delta;

  Gradient(std::int64_t slots, int heads, int dim)
      : g(slots, heads, dim, true, false),
        output_norms(g.exponents.size(), 77),
        delta(g.exponents.size(), 77.0f) {}
};

struct GradientInput {
  Pack pack;
  Mask mask;
  Tensor out, dout;
  std::vector<float> row_sum;  // (heads, total)

  GradientInput(Random& random, Pack documents, Mask who, int heads, int dim)
      : pack(std::move(documents)),
        mask(who),
        out(heavy_tailed(random, pack.total_q, heads, dim, 3)),
        dout(heavy_tailed(random, pack.total_q, heads, dim, 8)) {
    for (std::int64_t i = 0; i < heads * pack.total_q; ++i) {
      row_sum.push_back(std::uniform_real_distribution<float>(0.5f, 300.0f)(random));
    }
  }
};

Gradient library(const GradientInput& in, int threads = 1, Recipe recipe = recipes::fp8) {
  Gradient result(in.pack.q_slots, in.dout.heads, in.dout.dim);
  prepare_gradient(recipe, in.mask, in.out.view(), in.dout.view(), in.row_sum.data(), in.pack,
                   threads, {result.g.operand, result.output_norms.data(), result.delta.data()});
  return result;
}

Gradient definition(const GradientInput& in) {
  const int heads = in.dout.heads, dim = in.dout.dim;
  Gradient result(in.pack.q_slots, heads, dim);
  std::fill(result.g.codes.begin(), result.g.codes.end(), 0);
  std::fill(result.g.exponents.begin(), result.g.exponents.end(), -96);
  std::fill(result.g.norms.begin(), result.g.norms.end(), -96);
  std::fill(result.output_norms.begin(), result.output_norms.end(), -96);
  std::fill(result.delta.begin(), result.delta.end(), 0.0f);
  for (const Document& document : in.pack.documents) {
    for (int i = 0; i < document.q_len; ++i) {
      if (visible_keys(in.mask, document.q_len, document.k_len, i).empty()) continue;
      for (int head = 0; head < heads; ++head) {
        const std::int64_t token = document.q_token + i;
        const std::int64_t at = head * in.pack.q_slots + document.q_slot + i;
        std::vector<float> g = values_of(in.dout.view().row(token, head), dim);
        const std::vector<float> out = values_of(in.out.view().row(token, head), dim);
        for (float& value : g) value /= in.row_sum[head * in.pack.total_q + token];
        result.output_norms[at] = static_cast<std::int8_t>(norm_of_values(out));
        const int e = exponent_of(ExponentRule::kRoundUp, magnitude_of(g));
        result.g.exponents[at] = static_cast<std::int8_t>(e);
        if (e == 127) {
          result.g.norms[at] = 127;
          result.delta[at] = kNan;
          continue;
        }
        std::vector<float> coded, restored;
        for (int c = 0; c < dim; ++c) {
          const std::uint8_t code = nearest_code(std::ldexp(double{g[c]}, -e));
          result.g.codes[at * dim + c] = code;
          coded.push_back(static_cast<float>(value_of_signed_code(code)));
          restored.push_back(static_cast<float>(std::ldexp(value_of_signed_code(code), e)));
        }
        result.g.norms[at] = static_cast<std::int8_t>(norm_of(chained_dot(coded, coded), e));
        const float delta = chained_dot(restored, out);
        result.delta[at] = std::isnan(delta) ? kNan : delta;
      }
    }
  }
  return result;
}

void expect_same(const Gradient& got, const Gradient& expected) {
  ASSERT_EQ(got.g.exponents, expected.g.exponents);
  ASSERT_EQ(got.g.norms, expected.g.norms);
  ASSERT_EQ(got.g.codes, expected.g.codes);
  ASSERT_EQ(got.output_norms, expected.output_norms);
  for (std::size_t i = 0; i < got.delta.size(); ++i) {
    ASSERT_EQ(bits_of(got.delta[i]), bits_of(expected.delta[i])) << i;
  }
}

TEST(Gradient, BitEqualDefinitionOverRandomPacks) {
  Random random(21);
  const Mask masks[] = {{},
                        {.causal = true},
                        {.window_left = 20, .window_right = 3},
                        {.causal = true, .window_left = 0}};
  const int dims[] = {4, 12, 64, 128, 256};
  int num_keyless = 0;
  for (int repeat = 0; repeat < 80; ++repeat) {
    GradientInput in(random, random_pack(random, 200), masks[repeat % 4], draw(random, 1, 3),
                     dims[draw(random, 0, 4)]);
    for (const Document& document : in.pack.documents) {
      for (int i = 0; i < document.q_len; ++i) {
        num_keyless += visible_keys(in.mask, document.q_len, document.k_len, i).empty();
      }
    }
    const Gradient got = library(in);
    expect_same(got, definition(in));
    if (HasFatalFailure()) return;
    expect_same(library(in, 2), got);
    expect_same(library(in, 3), got);
  }
  EXPECT_GT(num_keyless, 500);
}

TEST(Gradient, BitEqualOnEverySimdTarget) {
  Random random(25);
  for (const int dim : {6, 64, 128}) {
    const GradientInput in(random, pack_of({30, 50}), {.causal = true}, 2, dim);
    const Gradient expected = definition(in);
    on_every_target([&] { expect_same(library(in), expected); });
  }
}

TEST(Gradient, BitEqualAtEveryMagnitude) {
  Random random(22);
  for (int scale = -132; scale <= 120; scale += 12) {
    GradientInput in(random, pack_of({40}), {.causal = true}, 1, 128);
    in.out = heavy_tailed(random, 40, 1, 128, 1, scale);
    in.dout = heavy_tailed(random, 40, 1, 128, 1, -scale / 2);
    expect_same(library(in), definition(in));
    in.dout = heavy_tailed(random, 40, 1, 128, 1, std::clamp(-scale, -118, 118));
    expect_same(library(in), definition(in));
    if (HasFatalFailure()) return;
  }
}

TEST(Gradient, BitEqualNanRowsStayAlone) {
  Random random(23);
  GradientInput in(random, pack_of({50}, 10), {.causal = true}, 1, 64);
  const Gradient clean = library(in);
  in.dout.row(5, 0)[63] = 0x7FC0;
  in.dout.row(6, 0)[0] = 0xFF80;
  in.row_sum[7] = kNan;
  in.out.row(8, 0)[1] = 0x7FC0;
  std::fill(in.out.data.begin() + 50 * 64, in.out.data.end(), 0x7FC0);  // outside the document
  std::fill(in.dout.data.begin() + 50 * 64, in.dout.data.end(), 0x7FC0);
  std::fill(in.row_sum.begin() + 50, in.row_sum.end(), kNan);
  const Gradient got = library(in);
  expect_same(got, definition(in));
  for (std::int64_t slot = 0; slot < in.pack.q_slots; ++slot) {
    const bool poisoned = slot >= 5 and slot <= 8;
    EXPECT_EQ(is_nan(got.delta[slot]), poisoned) << slot;
    EXPECT_EQ(got.g.exponents[slot] == 127, poisoned and slot != 8) << slot;
    EXPECT_EQ(got.output_norms[slot] == 127, slot == 8) << slot;
    if (not poisoned) {
      EXPECT_EQ(got.g.norms[slot], clean.g.norms[slot]);
      EXPECT_EQ(got.delta[slot], clean.delta[slot]);
    }
  }
}

TEST(Gradient, BoundedDeltaIsTheDotProduct) {
  // Products of 4 and 8 significant bits are exact; each of the dim + 3 additions of a chain is
  // within 2^-24 of a sum that is at most the sum of magnitudes.
  Random random(24);
  const int dim = 128;
  const GradientInput in(random, pack_of({200}), {.causal = true}, 1, dim);
  const Gradient got = library(in);
  for (int t = 0; t < 200; ++t) {
    double exact = 0, magnitudes = 0;
    for (int c = 0; c < dim; ++c) {
      const double product =
          std::ldexp(value_of_signed_code(got.g.codes[t * dim + c]), got.g.exponents[t]) *
          double{value_of_bf16(in.out.data[static_cast<std::size_t>(t) * dim + c])};
      exact += product;
      magnitudes += std::fabs(product);
    }
    EXPECT_LE(std::fabs(got.delta[t] - exact), magnitudes * (dim / 4 + 2) * 0x1p-24) << t;
  }
}

// ---- restored values and rotation -------------------------------------------------------------

TEST(Restore, BitEqualCodeTimesScale) {
  Random random(31);
  for (const Recipe& recipe : {recipes::fp8, recipes::mxfp8_token, recipes::fp8_tensor}) {
    for (const int dim : {20, 64, 128}) {
      const Case c{
          .recipe = recipe, .role = Role::kK, .pack = pack_of({30, 0, 90}, 9), .rotate = false};
      Tensor x = heavy_tailed(random, c.tokens(), 2, dim, 3);
      x.row(60, 1)[2] = 0x7F80;
      const Buffers operand = library(c, x.view());
      std::vector<float> y(x.data.size(), -7.0f);
      const TensorView<float> view{y.data(), c.tokens(), 2, dim, 2 * dim, dim};
      restore(operand.operand, c.role, c.pack, false, 2, view);
      int num_nan = 0;
      for (const Document& document : c.pack.documents) {
        for (int t = 0; t < c.length(document); ++t) {
          for (int head = 0; head < 2; ++head) {
            const std::int64_t slot = c.slot(document) + t;
            const int e = operand.operand.exponents_of(head)[slot];
            for (int i = 0; i < dim; ++i) {
              const float got = view.row(c.token(document) + t, head)[i];
              const double code = value_of_signed_code(operand.operand.row(head, slot)[i]);
              num_nan += std::isnan(got);
              if (e == 127) {
                ASSERT_TRUE(std::isnan(got));
              } else if (c.with_scale()) {
                ASSERT_EQ(got, static_cast<float>(code) * operand.scale[0]);
              } else {
                ASSERT_EQ(got, static_cast<float>(std::ldexp(code, e)));
              }
            }
          }
        }
      }
      EXPECT_EQ(num_nan, (recipe.scale_group == ScaleGroup::kRunning ? 90 - 30 : 1) * dim);
      for (std::int64_t t = 120; t < c.tokens(); ++t) {
        for (int i = 0; i < 2 * dim; ++i) ASSERT_EQ(view.row(t, 0)[i], 0.0f);
      }
    }
  }
}

TEST(Restore, BoundedQuantisationError) {
  // Rotation preserves norms. A code is within half a step: 2^-4 of a normal value, 2^-10 of the
  // scale for a subnormal one. So is the restored row, with both rotations' FP32 rounding on top.
  Random random(32);
  const int dim = 128;
  for (const bool rotate : {false, true}) {
    const Case c{
        .recipe = recipes::fp8, .role = Role::kQ, .pack = pack_of({150}), .rotate = rotate};
    const Tensor x = heavy_tailed(random, 150, 1, dim, 3);
    const Buffers operand = library(c, x.view());
    std::vector<float> y(x.data.size());
    restore(operand.operand, c.role, c.pack, rotate, 1, {y.data(), 150, 1, dim, dim, dim});
    double worst = 0;
    for (int t = 0; t < 150; ++t) {
      double error = 0, norm = 0;
      for (int i = 0; i < dim; ++i) {
        const double value = value_of_bf16(x.data[static_cast<std::size_t>(t) * dim + i]);
        error += std::pow(y[static_cast<std::size_t>(t) * dim + i] - value, 2);
        norm += value * value;
      }
      const double step = std::ldexp(std::sqrt(double{dim}), operand.exponents[t] - 10);
      const double rounding = 2 * (7 + 2) * 0x1p-24 * std::sqrt(norm);
      EXPECT_LE(std::sqrt(error), std::sqrt(norm) * 0x1p-4 + step + rounding) << t;
      if (norm > 0) worst = std::max(worst, std::sqrt(error / norm));
    }
    EXPECT_GT(worst, 0.01);  // codes of 4 bits do round
  }
}

TEST(Rotation, BitEqualScalarButterflies) {
  Random random(33);
  std::normal_distribution<float> normal;
  for (int dim = 1; dim <= 512; dim *= 2) {
    std::vector<float> x(static_cast<std::size_t>(dim) * 5);
    for (float& value : x) value = std::ldexp(normal(random), draw(random, -20, 20));
    std::vector<float> got = x;
    on_every_target([&] {
      got = x;
      rotate_rows(got.data(), 5, dim, dim, 2);
      for (int r = 0; r < 5; ++r) {
        std::vector<float> row(x.begin() + r * dim, x.begin() + (r + 1) * dim);
        rotate(row);
        for (int c = 0; c < dim; ++c) ASSERT_EQ(bits_of(got[r * dim + c]), bits_of(row[c]));
      }
    });
  }
}

TEST(Rotation, BoundedOrthogonalAndSelfInverse) {
  // Each stage and the last product round by 2^-24 of the row's norm at most, the constant by
  // 2^-24.
  Random random(34);
  std::normal_distribution<float> normal;
  for (const int dim : {64, 128, 256}) {
    const double bound = (std::log2(dim) + 2) * 0x1p-24;
    std::vector<float> x(static_cast<std::size_t>(dim));
    for (float& value : x) value = std::ldexp(normal(random), draw(random, -4, 4));
    const auto norm = [](const std::vector<float>& v) {
      double sum = 0;
      for (const float value : v) sum += double{value} * value;
      return std::sqrt(sum);
    };
    std::vector<float> y = x;
    rotate_rows(y.data(), 1, dim, dim, 1);
    EXPECT_LE(std::fabs(norm(y) / norm(x) - 1), bound);
    EXPECT_NE(y, x);
    // One channel spreads over all: +-1 / sqrt(dim) in every place.
    std::vector<float> unit(static_cast<std::size_t>(dim));
    unit[static_cast<std::size_t>(dim - 1)] = 1;
    rotate_rows(unit.data(), 1, dim, dim, 1);
    for (int c = 0; c < dim; ++c) {
      const bool negative = std::popcount(static_cast<unsigned>(c & (dim - 1))) % 2 != 0;
      EXPECT_EQ(unit[c], (negative ? -1 : 1) * static_cast<float>(1 / std::sqrt(double(dim))));
    }
    rotate_rows(y.data(), 1, dim, dim, 1);
    std::vector<float> error(x.size());
    for (int c = 0; c < dim; ++c) error[c] = y[c] - x[c];
    EXPECT_LE(norm(error), 2 * bound * norm(x));
  }
}

// ---- transposed copies, maxima, uniform tiles -------------------------------------------------

TEST(Transpose, BitEqualBytesInBothOrders) {
  const int fragment[16] = {0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15};
  for (int p = 0; p < 16; ++p) EXPECT_EQ(fragment_token(p), fragment[p]);
  Random random(41);
  const Case c{.recipe = recipes::fp8, .role = Role::kV, .pack = pack_of({20, 65, 3}, 5)};
  for (const int dim : {7, 64}) {
    const Tensor x = heavy_tailed(random, c.tokens(), 2, dim, 2);
    const Buffers operand = library(c, x.view());
    for (const TokenOrder order : {TokenOrder::kNatural, TokenOrder::kFragment}) {
      std::vector<std::uint8_t> got(operand.codes.size());
      transpose_codes(operand.operand, order, 2, got.data());
      for (int head = 0; head < 2; ++head) {
        for (int channel = 0; channel < dim; ++channel) {
          for (std::int64_t p = 0; p < c.slots(); ++p) {
            const std::int64_t slot =
                order == TokenOrder::kNatural ? p : p / 16 * 16 + fragment[p % 16];
            ASSERT_EQ(got[(head * dim + channel) * c.slots() + p],
                      operand.operand.row(head, slot)[channel]);
          }
        }
      }
    }
  }
}

TEST(NormMaxima, BitEqualDefinition) {
  Random random(42);
  const Case c{
      .recipe = recipes::fp8, .role = Role::kV, .pack = pack_of({1, 127, 128, 129, 600, 4500}, 5)};
  Tensor x = heavy_tailed(random, c.tokens(), 2, 16, 6);
  x.row(385 + 599, 1)[0] = 0x7FC0;  // the last token of the document of 600
  const Buffers operand = library(c, x.view());
  std::vector<std::int8_t> tile(operand.norms.size(), 77), running(operand.norms.size(), 77);
  norm_maxima(operand.operand, c.role, c.pack, 2, {tile.data(), running.data()});
  const int edges[] = {0, 128, 512, 2048, 4096, 1 << 30};
  std::vector<int> expected_tile(tile.size(), -96), expected_running(tile.size(), -96);
  for (const Document& document : c.pack.documents) {
    for (int head = 0; head < 2; ++head) {
      const std::int64_t at = head * c.slots() + c.slot(document);
      const std::int8_t* norms = operand.norms.data() + at;
      for (int t = 0; t < c.length(document); ++t) {
        const int begin = t / 128 * 128, end = std::min(c.length(document), begin + 128);
        expected_tile[at + t] = *std::max_element(norms + begin, norms + end);
        int chunk = 0;
        while (edges[chunk + 1] <= t) ++chunk;
        expected_running[at + t] = *std::max_element(norms + edges[chunk], norms + t + 1);
      }
    }
  }
  for (std::size_t i = 0; i < tile.size(); ++i) {
    ASSERT_EQ(tile[i], expected_tile[i]) << i;
    ASSERT_EQ(running[i], expected_running[i]) << i;
  }
  EXPECT_EQ(std::count(tile.begin(), tile.end(), 127), 600 - 512);
  EXPECT_EQ(std::count(running.begin(), running.end(), 127), 1);
}

TEST(UniformTile, BitEqualDefinition) {
  Random random(43);
  int num_uniform = 0, num_mixed = 0;
  for (const Recipe& recipe : {recipes::fp8, recipes::mxfp8, recipes::mxfp8_token}) {
    const Case c{.recipe = recipe, .role = Role::kV, .pack = pack_of({5, 700, 129})};
    const Tensor x = heavy_tailed(random, c.tokens(), 1, 64, 0);
    const Buffers operand = library(c, x.view());
    for (const Document& document : c.pack.documents) {
      for (int begin = 0; begin < c.length(document); begin += 128) {
        const int count = std::min(128, c.length(document) - begin);
        const std::int8_t* first = operand.exponents.data() + c.slot(document) + begin;
        const bool expected = std::count(first, first + count, *first) == count;
        EXPECT_EQ(is_uniform_tile(recipe.scale_group, first, count), expected);
        (expected ? num_uniform : num_mixed) += 1;
      }
    }
  }
  EXPECT_GT(num_uniform, 3);
  EXPECT_GT(num_mixed, 3);
  EXPECT_TRUE(is_uniform_tile(ScaleGroup::kRunning, nullptr, 0));
  const std::int8_t hump[] = {0, 1, 0};  // the ends agree: only a table that never decreases may
  EXPECT_FALSE(is_uniform_tile(ScaleGroup::kToken, hump, 3));
}

}  // namespace
}  // namespace mxattn::quantize_test
