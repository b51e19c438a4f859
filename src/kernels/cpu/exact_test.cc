// The oracle against attention as a textbook writes it, and against finite differences.
#include "kernels/cpu/exact.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "support/attention_case.h"
#include "support/inputs.h"
#include "support/textbook.h"

namespace mxattn::test {
namespace {

using kernels::exact_backend;

/// Outputs are rounded to BF16 once: half an ulp, at most 2^-8 of the value. The saved row sum is
/// an FP32: an error of 2^-24 common to the weights of a row, in terms that may cancel. These are
/// at most 32 for normal inputs: five standard deviations of dP times as many of K or Q.
double output_bound(double value) { return 0x1p-8 * std::abs(value) + 32 * 0x1p-24; }

void expect_rounded(const std::string& what, const Bf16Vector& got,
                    const std::vector<double>& want) {
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t n = 0; n < got.size(); ++n) {
    ASSERT_NEAR(value_of(got[n]), want[n], output_bound(want[n])) << what << " at " << n;
  }
}

void expect_textbook(AttentionCase& test) {
  fill_normal(test, 7);
  const Result got = test.run(exact_backend());
  const Exact want = textbook(test);
  expect_rounded("out", got.out, want.out);
  expect_rounded("dq", got.dq, want.dq);
  expect_rounded("dk", got.dk, want.dk);
  expect_rounded("dv", got.dv, want.dv);
  for (std::size_t n = 0; n < want.lse.size(); ++n) {
    if (std::isinf(want.lse[n])) {
      ASSERT_EQ(got.lse[n], -kInfinity) << "lse at " << n;
    } else {
      ASSERT_NEAR(got.lse[n], want.lse[n], 0x1p-23 * (1 + std::abs(want.lse[n])));
    }
  }
}

TEST(ExactBackend, BoundedAgainstTextbookOverDimensions) {
  for (const int dim : {40, 64, 72, 128, 256}) {
    SCOPED_TRACE(dim);
    AttentionCase test({.recipe = recipes::exact, .q_lens = {130, 33}, .dim = dim});
    expect_textbook(test);
  }
}

TEST(ExactBackend, BoundedAgainstTextbookOverLengths) {
  AttentionCase test({.recipe = recipes::exact,
                      .q_lens = {0, 1, 31, 32, 0, 33, 127, 128, 129, 257},
                      .dim = 16,
                      .spare = 5});
  expect_textbook(test);
}

TEST(ExactBackend, BoundedAgainstTextbookOverMasks) {
  const Mask masks[] = {{},
                        {.causal = true, .window_left = 0},
                        {.causal = true, .window_left = 77},
                        {.window_left = 150, .window_right = 3},
                        {.window_right = 0},
                        {.window_left = 1 << 30, .window_right = 1 << 30}};
  for (const Mask& mask : masks) {
    SCOPED_TRACE(testing::Message()
                 << mask.causal << ' ' << mask.window_left << ' ' << mask.window_right);
    // More keys than queries, fewer (rows without keys), none of one or the other.
    AttentionCase test({.recipe = recipes::exact,
                        .q_lens = {140, 200, 5, 0},
                        .k_lens = {290, 130, 0, 9},
                        .dim = 16,
                        .mask = mask});
    expect_textbook(test);
  }
}

TEST(ExactBackend, BoundedAgainstTextbookOverHeadGroups) {
  for (const int heads_k : {1, 4, 8}) {
    SCOPED_TRACE(heads_k);
    AttentionCase test({.recipe = recipes::exact,
                        .q_lens = {65, 150},
                        .heads_q = 8,
                        .heads_k = heads_k,
                        .dim = 24,
                        .softmax_scale = 0.4f});
    expect_textbook(test);
  }
}

// d sum(O dO) / dx by central differences of the textbook's forward. Inputs are multiples of 2^-4,
// so that steps of 2^-7 and 2^-6 are exact in BF16; two steps estimate the error of the smaller.
TEST(ExactBackend, BoundedByFiniteDifferences) {
  AttentionCase test({.recipe = recipes::exact,
                      .q_lens = {7, 5},
                      .k_lens = {9, 4},
                      .heads_q = 2,
                      .dim = 8,
                      .mask = {.causal = true, .window_left = 4}});
  Normal normal(3);
  for (Bf16Vector* x : {&test.q, &test.k, &test.v, &test.dout}) {
    for (auto& bits : *x) bits = double_to_bf16((normal.below(31) - 15) * 0x1p-4);
  }
  const Result got = test.run(exact_backend());

  const auto loss_at = [&](std::uint16_t& x, double step) {
    const std::uint16_t kept = x;
    x = double_to_bf16(value_of(kept) + step);
    EXPECT_EQ(value_of(x), value_of(kept) + step) << "the step is not exact";
    const Exact at = textbook(test);
    x = kept;
    double loss = 0;
    for (std::size_t n = 0; n < at.out.size(); ++n) loss += at.out[n] * value_of(test.dout[n]);
    return loss;
  };
  const auto slope = [&](std::uint16_t& x, double step) {
    return (loss_at(x, step) - loss_at(x, -step)) / (2 * step);
  };
  const auto expect_slopes = [&](Bf16Vector& x, const Bf16Vector& gradient) {
    double most = 0;
    for (std::size_t n = 0; n < x.size(); ++n) {
      const double fine = slope(x[n], 0x1p-7), coarse = slope(x[n], 0x1p-6);
      most = std::max(most, std::abs(fine));
      ASSERT_NEAR(value_of(gradient[n]), fine, output_bound(fine) + std::abs(fine - coarse));
    }
    EXPECT_GT(most, 0.01) << "the gradient is nothing to check";
  };
  expect_slopes(test.q, got.dq);
  expect_slopes(test.k, got.dk);
  expect_slopes(test.v, got.dv);
}

TEST(ExactBackend, SupportsSaysWhy) {
  AttentionCase test({.recipe = recipes::fp8, .q_lens = {1}, .dim = 256});
  kernels::Problem problem = test.problem();
  EXPECT_EQ(exact_backend().supports(problem), "");
  problem.dim = 257;
  EXPECT_NE(exact_backend().supports(problem), "");
  problem.dim = 128;
  problem.sm90_accumulator = true;
  EXPECT_NE(exact_backend().supports(problem), "");
}

}  // namespace
}  // namespace mxattn::test
