// The fast backend with FP32 accumulators against the FP64 oracle of the same recipe, and against
// exact attention. Its promises are in promises_test.cc, its model of the H200 in
// faithful_sm90_test.cc.
#include "kernels/cpu/faithful.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "hwy/targets.h"
#include "kernels/cpu/exact.h"
#include "kernels/cpu/tile_gemm.h"
#include "recipe/registry.h"
#include "support/attention_case.h"
#include "support/cosines.h"
#include "support/inputs.h"

namespace mxattn::test {
namespace {

using kernels::exact_backend;
using kernels::faithful_backend;

/// ||a - b|| / ||b||.
double relative_error(const Bf16Vector& a, const Bf16Vector& b) {
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double x = value_of(a[i]), y = value_of(b[i]);
    error += (x - y) * (x - y);
    norm += y * y;
  }
  return norm == 0 ? std::sqrt(error) : std::sqrt(error / norm);
}

/// How far two evaluations of one recipe may lie apart, relative to the whole tensor's norm. Both
/// round their results to BF16: 2^-9 each of a value. FP32 moves the argument of an exponential,
/// at most 2^6 in size, by 2^-24 of it, three times (a, the product, the sum), and so a value
/// before its rounding to E4M3 by a share of 2^-16. Where it crosses the border between two codes,
/// which are 2^-4 of it or more apart, that is in a share of 2^-12 of the elements, the code moves
/// by up to 2^-3. The codes of four tensors enter a gradient (P, dS, dO / L, and O through D).
double evaluation_bound() {
  const double one_rounding = std::sqrt(0x1p-12) * 0x1p-3;
  return 2 * 0x1p-9 + 4 * one_rounding;
}

void expect_oracle(const AttentionCase& test, int threads = 1) {
  const Result got = test.run(faithful_backend(), threads);
  const Result want = test.run(exact_backend(), threads);
  const double bound = evaluation_bound();
  EXPECT_LE(relative_error(got.out, want.out), bound);
  EXPECT_LE(relative_error(got.dq, want.dq), bound);
  EXPECT_LE(relative_error(got.dk, want.dk), bound);
  EXPECT_LE(relative_error(got.dv, want.dv), bound);
  for (std::size_t n = 0; n < want.lse.size(); ++n) {
    // The sum of codes moves by what one rounding of all its terms may move it.
    if (std::isinf(want.lse[n])) {
      ASSERT_EQ(got.lse[n], want.lse[n]) << n;
    } else {
      ASSERT_NEAR(got.lse[n], want.lse[n], 0x1p-3 + 0x1p-20 * std::abs(want.lse[n])) << n;
    }
  }
}

TEST(Faithful, BoundedByOracleOverShapes) {
  const CaseSpec shapes[] = {
      {.q_lens = {0, 1, 31, 32, 33, 0, 127, 128, 129}, .dim = 32, .spare = 5},
      {.q_lens = {140, 1, 1, 2, 20}, .heads_q = 8, .heads_k = 1, .dim = 64},
      {.q_lens = {150, 70}, .k_lens = {200, 33}, .heads_q = 4, .heads_k = 2, .dim = 72},
      {.q_lens = {200, 40}, .k_lens = {130, 170}, .dim = 128, .mask = {}},
      {.q_lens = {310}, .dim = 40, .mask = {.causal = true, .window_left = 140}},
      {.q_lens = {280}, .dim = 8, .mask = {.window_left = 20, .window_right = 150}},
      {.q_lens = {150}, .k_lens = {200}, .dim = 256},
      {.q_lens = {90, 30}, .heads_q = 2, .heads_k = 2, .dim = 5},
  };
  std::size_t turn = 0;  // sister recipes share the loops: each takes every third shape
  for (const CaseSpec& shape : shapes) {
    AttentionCase base(shape);
    fill_normal(base, 11);
    for (const RecipeInfo& info : supported_recipes(faithful_backend())) {
      const bool every = info.recipe == recipes::fp8 or info.recipe == recipes::bf16;
      if (not every and turn++ % 3 != 0) continue;
      SCOPED_TRACE(testing::Message() << info.name << " d " << shape.dim);
      expect_oracle(with_recipe(base, info.recipe), 2);
    }
  }
}

TEST(Faithful, BoundedByOracleWhereExponentsStep) {
  AttentionCase base({.q_lens = {130, 400}, .heads_q = 2, .heads_k = 1, .dim = 64});
  fill_normal(base, 12);
  Normal random(13);
  int steps = 0;
  for (Bf16Vector* x : {&base.q, &base.k, &base.v, &base.dout}) {
    for (std::size_t i = 0; i + 64 <= x->size(); i += 64) {
      if (random.below(50) != 0) continue;
      multiply(*x, i, 64, std::ldexp(1.0, random.below(9) - 3));
      ++steps;
    }
  }
  EXPECT_GE(steps, 20);
  for (const RecipeInfo& info : supported_recipes(faithful_backend())) {
    SCOPED_TRACE(info.name);
    expect_oracle(with_recipe(base, info.recipe), 2);
  }
}

// The exponent r of dS leaves the range of factors where zeros, whose exponent is -96, end a chunk
// and dO is tiny. The chunk itself adds nothing; those before it must keep their size.
TEST(Faithful, BoundedWhereZerosEndAChunk) {
  constexpr std::size_t kDim = 64;
  for (const RecipeInfo& info : supported_recipes(faithful_backend())) {
    if (info.recipe.gradient != GradientOperand::kDividedByL or info.recipe.control) continue;
    SCOPED_TRACE(info.name);
    for (const bool keys : {false, true}) {
      AttentionCase test({.recipe = info.recipe, .q_lens = {600}, .dim = kDim});
      fill_normal(test, 14);
      multiply(test.dout, 0x1p-30);
      multiply(keys ? test.k : test.q, 512 * kDim, 88 * kDim, 0);
      const Result exact = with_recipe(test, recipes::exact).run(exact_backend(), 2);
      for (const auto* const backend : {&faithful_backend(), &exact_backend()}) {
        const Result got = test.run(*backend, 2);
        // The errors of the figures of section 6: cosines of 0.997.
        EXPECT_LE(relative_error(got.dq, exact.dq), std::sqrt(2 * 0.003));
        EXPECT_LE(relative_error(got.dk, exact.dk), std::sqrt(2 * 0.003));
        EXPECT_LE(relative_error(got.dv, exact.dv), std::sqrt(2 * 0.003));
      }
    }
  }
}

// Section 6: N = 1024, d = 128, causal.
TEST(Faithful, BoundedFiguresOfNormalInputs) {
  AttentionCase test({.recipe = recipes::fp8, .q_lens = {1024}});
  fill_normal(test, 0);
  const Result exact = with_recipe(test, recipes::exact).run(exact_backend(), 2);
  for (const bool sm90 : {false, true}) {
    CaseSpec spec = test.spec();
    spec.sm90_accumulator = sm90;
    const AttentionCase each = with_spec(test, spec);
    expect_near(cosines(each.run(faithful_backend(), 2), exact), {0.9990, 0.9979, 0.9979, 0.9988},
                0.0003);
  }
}

TEST(Faithful, BoundedFiguresOfHardCases) {
  for (const HardCase& hard : hard_cases()) {
    SCOPED_TRACE(hard.name);
    AttentionCase test({.recipe = recipes::fp8, .q_lens = {1024}});
    fill_normal(test, 5);
    hard.apply(test);
    const Result exact = with_recipe(test, recipes::exact).run(exact_backend(), 2);
    expect_near(cosines(test.run(faithful_backend(), 2), exact), hard.expected, hard.tolerance);
  }
}

// Every engine of this CPU runs the same loops; the two that share an order give the same bits.
TEST(Faithful, BitEqualOnEnginesOfOneOrder) {
  const kernels::cpu::TileGemm* const highway = kernels::cpu::find_tile_gemm("highway");
  const kernels::cpu::TileGemm* const dot = kernels::cpu::find_tile_gemm("avx512_bf16");
  if (dot == nullptr) GTEST_SKIP() << "one engine only";
  for (const Recipe& recipe : {recipes::fp8, recipes::bf16}) {
    AttentionCase test({.recipe = recipe, .q_lens = {190}, .heads_q = 2, .dim = 64});
    fill_normal(test, 3);
    kernels::cpu::set_tile_gemm(highway);
    const Result want = test.run(faithful_backend());
    kernels::cpu::set_tile_gemm(dot);
    EXPECT_EQ(test.run(faithful_backend()), want);
    kernels::cpu::set_tile_gemm(nullptr);
  }
}

// Vectors of any width: every SIMD target of this CPU gives the same bits.
TEST(Faithful, BitEqualOnEveryTarget) {
  const std::vector<std::int64_t> targets = hwy::SupportedAndGeneratedTargets();
  EXPECT_GE(targets.size(), 2u);
  kernels::cpu::set_tile_gemm(kernels::cpu::find_tile_gemm("highway"));
  for (const RecipeInfo& info : supported_recipes(faithful_backend())) {
    SCOPED_TRACE(info.name);
    AttentionCase test({.recipe = info.recipe, .q_lens = {20, 150}, .dim = 40});
    fill_normal(test, 3);
    multiply(test.v, test.k_at(90), 40, 64);
    multiply(test.q, test.q_at(100), 40, 64);
    const Result want = test.run(faithful_backend());
    for (const std::int64_t target : targets) {
      SCOPED_TRACE(hwy::TargetName(target));
      hwy::SetSupportedTargetsForTest(target);
      EXPECT_EQ(test.run(faithful_backend()), want);
    }
    hwy::SetSupportedTargetsForTest(0);
  }
  kernels::cpu::set_tile_gemm(nullptr);
}

TEST(Faithful, NamesWhatItCannotRun) {
  const auto reason = [](const CaseSpec& spec) {
    return faithful_backend().supports(AttentionCase(spec).problem());
  };
  EXPECT_EQ(reason({.recipe = recipes::fp8, .q_lens = {1}}), "");
  EXPECT_NE(reason({.recipe = recipes::mxfp8_paper, .q_lens = {1}}), "");
  EXPECT_NE(reason({.recipe = recipes::fp8_tensor, .q_lens = {1}}), "");
  EXPECT_NE(reason({.recipe = recipes::exact, .q_lens = {1}}), "");
  EXPECT_NE(reason({.recipe = recipes::fp8, .q_lens = {1}, .dim = 264}).find("264"),
            std::string::npos);
  EXPECT_NE(reason({.recipe = recipes::bf16, .q_lens = {1}, .sm90_accumulator = true}), "");
}

}  // namespace
}  // namespace mxattn::test
