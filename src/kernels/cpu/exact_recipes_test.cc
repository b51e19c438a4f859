// The oracle of every recipe: the figures of docs/numerics.md, section 6. The promises of section 5
// are in promises_test.cc.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "formats/fp8.h"
#include "kernels/cpu/exact.h"
#include "support/attention_case.h"
#include "support/cosines.h"
#include "support/inputs.h"

namespace mxattn::test {
namespace {

using kernels::exact_backend;

Result run(const AttentionCase& test) { return test.run(exact_backend(), 2); }

Result exact_of(const AttentionCase& test) { return run(with_recipe(test, recipes::exact)); }

// ---- figures ----------------------------------------------------------------------------------

// Section 6: normal inputs, N = 1024, causal, d = 128, within 0.0003 for any seed. The sister
// recipes give the same; the printed form is in the table of section 2.9 of the formats' page.
TEST(ExactRecipes, BoundedFiguresOfNormalInputs) {
  const Cosines canonical{0.9990, 0.9979, 0.9979, 0.9988};
  const Cosines printed{0.9989, 0.9980, 0.9980, 0.9989};
  const struct {
    Recipe recipe;
    Cosines want;
    double tolerance;
  } cases[] = {{recipes::fp8, canonical, 0.0003},
               {recipes::mxfp8, canonical, 0.0003},
               {recipes::mxfp8_token, canonical, 0.0003},
               {recipes::fp8_ds_row, canonical, 0.0003},
               {recipes::mxfp8_paper, printed, 0.0003},
               // Measured on an H200, N = 2048.
               {recipes::fp8_tensor, {0.9985, 0.9975, 0.99755, 0.99845}, 0.001},
               // "About 0.998 on random normal inputs" (section 1).
               {recipes::fp8_integer_ref, {0.998, 0.998, 0.998, 0.998}, 0.001},
               {recipes::mxfp8_floor, {0.998, 0.998, 0.998, 0.998}, 0.001},
               // Two roundings to BF16, each at most 2^-8: 1 - cos <= (2 * 2^-8)^2 / 2.
               {recipes::bf16, {1, 1, 1, 1}, 0x1p-15}};
  AttentionCase test({.q_lens = {1024}});
  fill_normal(test, 0);
  const Result exact = exact_of(test);
  for (const auto& each : cases) {
    SCOPED_TRACE(info_of(each.recipe).name);
    expect_near(cosines(run(with_recipe(test, each.recipe)), exact), each.want, each.tolerance);
  }
}

TEST(ExactRecipes, BoundedFiguresOfHardCases) {
  for (const HardCase& hard : hard_cases()) {
    SCOPED_TRACE(hard.name);
    AttentionCase test({.recipe = recipes::fp8, .q_lens = {1024}});
    fill_normal(test, 5);
    const Bf16Vector q = test.q, k = test.k, v = test.v, dout = test.dout;
    hard.apply(test);
    EXPECT_TRUE(q != test.q or k != test.k or v != test.v or dout != test.dout);
    expect_near(cosines(run(test), exact_of(test)), hard.expected, hard.tolerance);
  }
}

// E4M3 is off by at most 2^-4 of a normal value. Six tensors are rounded (Q, K, V, dO, P, dS), with
// independent errors, so 1 - cos is at most 6 (2^-4)^2 / 2.
TEST(ExactRecipes, BoundedForEveryRecipeAndShape) {
  const CaseSpec shapes[] = {
      {.q_lens = {100, 0, 157, 1, 33}, .heads_q = 4, .heads_k = 2, .dim = 64, .spare = 3},
      {.q_lens = {200, 40}, .k_lens = {130, 170}, .dim = 72, .mask = {}},
      {.q_lens = {150}, .k_lens = {200}, .heads_q = 2, .dim = 256},
      {.q_lens = {310}, .dim = 40, .mask = {.causal = true, .window_left = 140}},
  };
  for (const CaseSpec& shape : shapes) {
    AttentionCase test(shape);
    fill_normal(test, 11);
    const Result exact = exact_of(test);
    for (const RecipeInfo& info : all_recipes()) {
      SCOPED_TRACE(testing::Message() << info.name << " d " << shape.dim);
      expect_near(cosines(run(with_recipe(test, info.recipe)), exact), {1, 1, 1, 1}, 6 * 0x1p-9);
    }
  }
}

// ---- row statistics ---------------------------------------------------------------------------

TEST(ExactRecipes, BoundedSavedRowStatistics) {
  for (const RecipeInfo& info : all_recipes()) {
    SCOPED_TRACE(info.name);
    AttentionCase test({.recipe = info.recipe, .q_lens = {150, 40}, .k_lens = {150, 30}});
    fill_normal(test, 2);
    const Result r = test.run(exact_backend());
    for (std::size_t n = 0; n < r.lse.size(); ++n) {
      const bool keyless = n >= 150 and n < 160;  // the first queries of the second document
      const bool divided = info.recipe.gradient == GradientOperand::kDividedByL;
      const double reference =
          divided ? r.row_reference[n] : float_of(static_cast<std::uint32_t>(r.row_reference[n]));
      if (keyless) {
        EXPECT_EQ(r.lse[n], -kInfinity);
        EXPECT_EQ(reference, 0);
        EXPECT_EQ(r.row_sum[n], 1);
        continue;
      }
      const double lse = stages::kLn2 * (reference + std::log2(r.row_sum[n]));
      ASSERT_NEAR(lse, r.lse[n], 0x1p-22 * (1 + std::abs(lse))) << n;
    }
  }
}

// ---- outputs in scaled E4M3 -------------------------------------------------------------------

TEST(ExactRecipes, CodeEqualGradientsOfTensorScales) {
  AttentionCase test({.recipe = recipes::fp8_tensor, .q_lens = {90, 20}, .heads_q = 2});
  fill_normal(test, 5);
  const Result got = test.run(exact_backend());
  for (const Bf16Vector* x : {&got.dq, &got.dk, &got.dv}) {
    double most = 0;
    for (const std::uint16_t bits : *x) most = std::max(most, std::abs(value_of(bits)));
    ASSERT_GT(most, 0);
    for (const std::uint16_t bits : *x) {
      // Both the value and the largest are rounded to BF16.
      const double value = value_of(bits), scale = most / E4M3::kMax;
      ASSERT_NEAR(value, round_e4m3(value / scale) * scale, 2 * 0x1p-8 * std::abs(value));
    }
  }
}

}  // namespace
}  // namespace mxattn::test
