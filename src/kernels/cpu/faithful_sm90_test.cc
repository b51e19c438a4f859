// The fast backend with the H200's accumulator against the page restated element by element
// (support/faithful_reference.h), bit for bit: O, LSE, mu, L, dQ, dK, dV.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/cpu/faithful.h"
#include "quantize/quantize.h"
#include "recipe/registry.h"
#include "recipe/roles.h"
#include "support/attention_case.h"
#include "support/faithful_reference.h"
#include "support/inputs.h"

namespace mxattn::test {
namespace {

using kernels::faithful_backend;

/// What the inputs of a comparison exercised: a test asserts that they are hard.
struct Exercised {
  int uneven_keys = 0;     // key tiles with more than one exponent of K or V
  int uneven_queries = 0;  // query tiles with more than one exponent of Q
  int spreads = 0;         // chunks whose scales are taken tile by tile
};

bool is_uneven(const std::vector<std::int8_t>& exponents, int tile) {
  const int end = std::min<int>(static_cast<int>(exponents.size()), tile * 128 + 128);
  for (int t = tile * 128; t < end; ++t) {
    if (exponents[t] != exponents[tile * 128]) return true;
  }
  return false;
}

/// Runs the case and compares all it wrote.
Exercised expect_reference(const AttentionCase& test) {
  const CaseSpec& spec = test.spec();
  const Pack& pack = test.pack();
  const kernels::Problem problem = test.problem();
  const Result got = test.run(faithful_backend());
  const auto view = [&](const Bf16Vector& x, std::int64_t tokens, int heads) {
    return TensorView<const std::uint16_t>{
        x.data(), tokens, heads, spec.dim, std::int64_t{heads} * spec.dim, spec.dim};
  };
  const auto q_view = view(test.q, pack.total_q, spec.heads_q);
  OwnedOperand q(spec.recipe, spec.heads_q, pack.q_slots, spec.dim),
      k(spec.recipe, spec.heads_k, pack.k_slots, spec.dim),
      v(spec.recipe, spec.heads_k, pack.k_slots, spec.dim),
      g(spec.recipe, spec.heads_q, pack.q_slots, spec.dim);
  quantize(spec.recipe, Role::kQ, q_view, pack, problem.rotate, 1, q.operand());
  quantize(spec.recipe, Role::kK, view(test.k, pack.total_k, spec.heads_k), pack, problem.rotate, 1,
           k.operand());
  quantize(spec.recipe, Role::kV, view(test.v, pack.total_k, spec.heads_k), pack, problem.rotate, 1,
           v.operand());
  const auto rows = static_cast<std::size_t>(pack.q_slots * spec.heads_q);
  std::vector<std::int8_t> output_norms(rows);
  std::vector<float> delta(rows);
  prepare_gradient(spec.recipe, spec.mask, view(got.out, pack.total_q, spec.heads_q),
                   view(test.dout, pack.total_q, spec.heads_q), got.row_sum.data(), pack, 1,
                   {.g = g.operand(), .output_norms = output_norms.data(), .delta = delta.data()});

  Exercised exercised;
  const int group = spec.heads_q / spec.heads_k;
  for (const Document& document : pack.documents) {
    std::vector<std::vector<float>> dk, dv;
    for (int head = 0; head < spec.heads_q; ++head) {
      if (head % group == 0) {
        dk.assign(document.k_len, std::vector<float>(spec.dim, 0.0f));
        dv = dk;
      }
      const ReferenceHead x = reference_head(test, document, head,
                                             {.q = q.operand(),
                                              .k = k.operand(),
                                              .v = v.operand(),
                                              .g = g.operand(),
                                              .output_norms = output_norms,
                                              .delta = delta,
                                              .row_reference = got.row_reference});
      const std::int64_t row = head * pack.total_q + document.q_token;

      for (int i = 0; i < x.q_len; ++i) {
        const std::size_t at = test.q_at(document.q_token + i, head);
        const ReferenceForward f(x, i);
        std::vector<float> o(spec.dim, 0.0f);
        const bool keyless = x.keys_of(i).empty();
        for (int c = 0; c < spec.dim and not keyless; ++c) o[c] = div_rn(f.o[c], f.l);
        expect_row("O", &got.out[at], o, i);
        if (not keyless) {
          const float mu = std::ceil(f.m);
          EXPECT_EQ(got.row_reference[row + i], static_cast<int>(mu)) << i;
          EXPECT_EQ(got.row_sum[row + i], mul_rn(f.l, Fp32Ops::exp2(f.m - mu))) << i;
          EXPECT_EQ(got.lse[row + i], stages::log_sum_exp<Fp32Ops>(f.m, f.l)) << i;
        }
        expect_row("dQ", &got.dq[at], finished(test, reference_dq(x, i)), i);
        if (testing::Test::HasFailure()) return exercised;
      }

      const ReferenceScales scales(x);
      exercised.spreads += scales.spreads;
      for (int j = 0; j < x.k_len; ++j) {
        reference_dkv(x, scales, j, dk[j], dv[j]);
        if (head % group != group - 1) continue;
        const std::size_t at = test.k_at(document.k_token + j, head / group);
        expect_row("dV", &got.dv[at], dv[j], j);
        expect_row("dK", &got.dk[at], finished(test, dk[j]), j);
        if (testing::Test::HasFailure()) return exercised;
      }
      for (int t = 0; t * 128 < x.k_len; ++t) {
        exercised.uneven_keys += is_uneven(x.k.exponent, t) or is_uneven(x.v.exponent, t);
      }
      for (int t = 0; t * 128 < x.q_len; ++t)
        exercised.uneven_queries += is_uneven(x.q.exponent, t);
    }
  }
  return exercised;
}

CaseSpec sm90(CaseSpec spec) {
  spec.sm90_accumulator = true;
  return spec;
}

/// Rows that grow now and then by powers of two: running exponents step up inside tiles.
void grow(Bf16Vector& x, std::size_t width, std::uint64_t seed, int every) {
  Normal random(seed);
  double factor = 1;
  for (std::size_t i = 0; i + width <= x.size(); i += width) {
    if (random.below(every) == 0) factor *= std::ldexp(1.0, 1 + random.below(4));
    if (factor > 0x1p12) factor = 1;
    multiply(x, i, width, factor);
  }
}

TEST(FaithfulSm90, BitEqualOverChunks) {
  AttentionCase test(sm90({.recipe = recipes::fp8, .q_lens = {600}, .dim = 32}));
  fill_normal(test, 1);
  expect_reference(test);
}

TEST(FaithfulSm90, BitEqualWithUnevenExponents) {
  AttentionCase test(sm90({.recipe = recipes::fp8, .q_lens = {33, 0, 300}, .dim = 40}));
  fill_normal(test, 2);
  for (Bf16Vector* x : {&test.q, &test.k, &test.v}) grow(*x, 40, 3 + (x == &test.k), 40);
  const Exercised exercised = expect_reference(test);
  EXPECT_GE(exercised.uneven_keys, 2);
  EXPECT_GE(exercised.uneven_queries, 2);
}

TEST(FaithfulSm90, BitEqualOverPromotions) {
  // 1100 queries: dV is promoted before steps 7, and dK before 15; dQ of rows 0-63 before tile 7.
  AttentionCase test(sm90({.recipe = recipes::fp8, .q_lens = {1100}, .dim = 16}));
  fill_normal(test, 4);
  expect_reference(test);
}

TEST(FaithfulSm90, BitEqualOverPromotionsOfItemsThatStartLate) {
  // Places count from the document's start, not from the first tile that the window shows.
  AttentionCase test(sm90({.recipe = recipes::fp8,
                           .q_lens = {1100},
                           .dim = 16,
                           .mask = {.causal = true, .window_left = 300}}));
  fill_normal(test, 14);
  expect_reference(test);
}

TEST(FaithfulSm90, BitEqualWhereChunksSpread) {
  // The second chunk spreads; the third would, if its tile of zero gradient counted.
  AttentionCase test(sm90({.recipe = recipes::fp8, .q_lens = {800}, .dim = 16}));
  fill_normal(test, 5);
  const double factors[] = {1, 0x1p-14, 0, 1, 0x1p-3, 0, 0x1p-3};
  for (std::size_t i = 0; i < test.dout.size(); i += 16) {
    multiply(test.dout, i, 16, factors[i / 16 / 128]);
  }
  EXPECT_EQ(expect_reference(test).spreads, 1);
}

TEST(FaithfulSm90, BitEqualOverMasksAndLengths) {
  const Mask masks[] = {{},
                        {.causal = true},
                        {.causal = true, .window_left = 50},
                        {.window_left = 140, .window_right = 20}};
  for (const Mask& mask : masks) {
    AttentionCase test(sm90({.recipe = recipes::fp8,
                             .q_lens = {140, 70},
                             .k_lens = {200, 33},
                             .heads_q = 2,
                             .heads_k = 1,
                             .dim = 16,
                             .mask = mask}));
    fill_normal(test, 6);
    grow(test.v, 16, 7, 50);
    expect_reference(test);
  }
}

TEST(FaithfulSm90, BitEqualOverRecipes) {
  for (const Recipe& recipe : {recipes::mxfp8, recipes::mxfp8_token, recipes::mxfp8_floor,
                               recipes::fp8_ds_row, recipes::fp8_integer_ref}) {
    SCOPED_TRACE(info_of(recipe).name);
    AttentionCase test(sm90({.recipe = recipe, .q_lens = {210}, .dim = 32}));
    fill_normal(test, 8);
    for (Bf16Vector* x : {&test.q, &test.k, &test.v}) grow(*x, 32, 9, 40);
    const Exercised exercised = expect_reference(test);
    EXPECT_GE(exercised.uneven_keys, 1);
    EXPECT_GE(exercised.uneven_queries, 1);
  }
}

}  // namespace
}  // namespace mxattn::test
