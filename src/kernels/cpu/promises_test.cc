// The promises of docs/numerics.md, section 5, bit for bit, of every CPU backend.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/cpu/exact.h"
#include "kernels/cpu/faithful.h"
#include "support/attention_case.h"
#include "support/inputs.h"

namespace mxattn::test {
namespace {

/// A backend and the accumulator it is asked for.
struct Subject {
  const char* name;
  const kernels::Backend& (*backend)();
  bool sm90;
};

class Promises : public testing::TestWithParam<Subject> {
 protected:
  const kernels::Backend& backend() const { return GetParam().backend(); }

  /// A case for this backend.
  AttentionCase make(CaseSpec spec) const {
    spec.sm90_accumulator = GetParam().sm90;
    return AttentionCase(std::move(spec));
  }

  /// The recipes that the backend runs.
  std::vector<RecipeInfo> runnable() const {
    std::vector<RecipeInfo> runs;
    for (const RecipeInfo& info : all_recipes()) {
      const AttentionCase test = make({.recipe = info.recipe, .q_lens = {1}});
      if (backend().supports(test.problem()).empty()) runs.push_back(info);
    }
    return runs;
  }
};

INSTANTIATE_TEST_SUITE_P(Cpu, Promises,
                         testing::Values(Subject{"Exact", kernels::exact_backend, false},
                                         Subject{"Faithful", kernels::faithful_backend, false},
                                         Subject{"FaithfulSm90", kernels::faithful_backend, true}),
                         [](const auto& info) { return info.param.name; });

using Rows = std::pair<std::int64_t, std::int64_t>;  // [first, second)

bool same_rows(const Bf16Vector& a, const Bf16Vector& b, std::size_t row_size, Rows rows) {
  return std::equal(a.begin() + rows.first * row_size, a.begin() + rows.second * row_size,
                    b.begin() + rows.first * row_size);
}

/// Bits of O, L, mu, LSE and dQ of the tokens `rows`, of a case with one head.
void expect_same_queries(const AttentionCase& test, const Result& a, const Result& b, Rows rows) {
  const auto size = static_cast<std::size_t>(test.spec().heads_q) * test.spec().dim;
  EXPECT_TRUE(same_rows(a.out, b.out, size, rows));
  EXPECT_TRUE(same_rows(a.dq, b.dq, size, rows));
  for (std::int64_t n = rows.first; n < rows.second; ++n) {
    const auto at = static_cast<std::size_t>(n);
    ASSERT_EQ(a.row_reference[at], b.row_reference[at]) << n;
    ASSERT_EQ(bits_of(a.row_sum[at]), bits_of(b.row_sum[at])) << n;
    ASSERT_EQ(bits_of(a.lse[at]), bits_of(b.lse[at])) << n;
  }
}

bool is_strict(const RecipeInfo& info) { return info.recipe.strictly_causal(); }

// Section 6: a pack of 200 + 400 tokens, and what from t0 on must change no bit before t0.
TEST_P(Promises, BitEqualBeforeChangedTokens) {
  const std::size_t dim = 64;
  const auto scale_from = [=](Bf16Vector& x, int t0, const std::function<double()>& factor) {
    for (std::size_t n = t0 * dim; n < x.size(); n += dim) multiply(x, n, dim, factor());
  };
  for (const RecipeInfo& info : runnable()) {
    if (not is_strict(info)) continue;
    const bool every = info.recipe == recipes::fp8;  // others take a part of the list
    for (const double peak : every ? std::vector{1.0, 4.0, 8.0} : std::vector{4.0}) {
      AttentionCase base =
          make({.recipe = info.recipe, .q_lens = {200, 400}, .dim = static_cast<int>(dim)});
      fill_normal(base, 3);
      multiply(base.q, peak);
      multiply(base.v, 130 * dim, dim, 8);
      const Result want = base.run(backend());
      Normal random(17);
      const auto decades = [&] { return std::pow(10.0, 1 + 3 * random.uniform()); };
      for (const int t0 : every ? std::vector{17, 100, 150, 199, 327, 328, 329, 500, 550}
                                : std::vector{17, 329, 500}) {
        for (const std::string_view change : {"all", "keys and values", "smaller values"}) {
          SCOPED_TRACE(testing::Message() << info.name << " t0 " << t0 << ' ' << change);
          AttentionCase test = base;
          if (change == "smaller values") {
            scale_from(test.v, t0, [] { return 0x1p-9; });
          } else {
            scale_from(test.k, t0, decades);
            scale_from(test.v, t0, decades);
            if (change == "all") {
              scale_from(test.q, t0, decades);
              scale_from(test.dout, t0, decades);
            }
          }
          const Result got = test.run(backend());
          EXPECT_NE(got.out, want.out) << "nothing changed at all";
          expect_same_queries(test, got, want, {0, t0});
        }
      }
    }
  }
}

// A token that raises an exponent, at positions all over a diagonal tile.
TEST_P(Promises, BitEqualBeforeATokenThatRaisesAnExponent) {
  for (const RecipeInfo& info : runnable()) {
    if (not is_strict(info) or not info.recipe.quantised()) continue;
    AttentionCase base = make({.recipe = info.recipe, .q_lens = {140}, .dim = 32});
    fill_normal(base, 4);
    const Result want = base.run(backend());
    for (int t0 = 0; t0 < 140; t0 += 3) {
      SCOPED_TRACE(testing::Message() << info.name << " t0 " << t0);
      AttentionCase test = base;
      for (Bf16Vector* x : {&test.q, &test.k, &test.v}) {
        multiply(*x, test.q_at(t0), 32, 0x1p7);
      }
      expect_same_queries(test, test.run(backend()), want, {0, t0});
    }
  }
}

// The same change is seen where a recipe does not promise: the test above can fail.
TEST_P(Promises, ControlsSeeLaterTokens) {
  for (const Recipe& recipe : {recipes::mxfp8, recipes::mxfp8_floor, recipes::fp8_tensor}) {
    SCOPED_TRACE(info_of(recipe).name);
    AttentionCase test = make({.recipe = recipe, .q_lens = {64}});
    if (not backend().supports(test.problem()).empty()) continue;
    fill_normal(test, 4);
    const Result want = test.run(backend());
    multiply(test.v, test.k_at(20), test.v.size() - test.k_at(20), 0x1p12);
    const Result got = test.run(backend());
    EXPECT_FALSE(same_rows(got.out, want.out, 128, {0, 20}));
  }
}

// Other documents, the place in the pack and the number of threads change no bit.
TEST_P(Promises, BitEqualInAnyPackOnAnyThreads) {
  for (const RecipeInfo& info : runnable()) {
    SCOPED_TRACE(info.name);
    const CaseSpec spec{.recipe = info.recipe,
                        .q_lens = {170, 45},
                        .heads_q = 4,
                        .heads_k = 2,
                        .dim = 32,
                        .spare = 2};
    AttentionCase test = make(spec);
    fill_normal(test, 8);
    const Result want = test.run(backend(), 1);
    EXPECT_EQ(test.run(backend(), 2), want);
    EXPECT_EQ(test.run(backend(), 3), want);
    if (info.recipe.scale_group == ScaleGroup::kTensor) continue;  // no isolation either

    // The first document again, behind another one.
    CaseSpec moved_spec = spec;
    moved_spec.q_lens = {99, 170};
    AttentionCase moved = make(moved_spec);
    fill_normal(moved, 9);
    const auto copy = [](const Bf16Vector& from, Bf16Vector& to, std::size_t at,
                         std::size_t count) {
      std::copy_n(from.begin(), count, to.begin() + static_cast<std::ptrdiff_t>(at));
    };
    const std::size_t q_count = test.q_at(170), k_count = test.k_at(170);
    copy(test.q, moved.q, moved.q_at(99), q_count);
    copy(test.dout, moved.dout, moved.q_at(99), q_count);
    copy(test.k, moved.k, moved.k_at(99), k_count);
    copy(test.v, moved.v, moved.k_at(99), k_count);
    const Result got = moved.run(backend(), 2);
    const auto same = [](const Bf16Vector& a, const Bf16Vector& b, std::size_t at,
                         std::size_t count) {
      return std::equal(a.begin(), a.begin() + static_cast<std::ptrdiff_t>(count),
                        b.begin() + static_cast<std::ptrdiff_t>(at));
    };
    EXPECT_TRUE(same(want.out, got.out, moved.q_at(99), q_count));
    EXPECT_TRUE(same(want.dq, got.dq, moved.q_at(99), q_count));
    EXPECT_TRUE(same(want.dk, got.dk, moved.k_at(99), k_count));
    EXPECT_TRUE(same(want.dv, got.dv, moved.k_at(99), k_count));
  }
}

bool any_nan(const Bf16Vector& x, std::size_t first, std::size_t last) {
  for (std::size_t n = first; n < last; ++n) {
    if (is_nan(bf16_to_float(x[n]))) return true;
  }
  return false;
}

bool all_nan(const Bf16Vector& x, std::size_t first, std::size_t last) {
  for (std::size_t n = first; n < last; ++n) {
    if (not is_nan(bf16_to_float(x[n]))) return false;
  }
  return true;
}

// NaN outside documents changes nothing; outputs there are 0.
TEST_P(Promises, BitEqualWithPoisonOutsideDocuments) {
  for (const RecipeInfo& info : runnable()) {
    SCOPED_TRACE(info.name);
    AttentionCase test = make({.recipe = info.recipe, .q_lens = {60, 70}, .dim = 32, .spare = 9});
    fill_normal(test, 6);
    const Result want = test.run(backend());
    for (Bf16Vector* x : {&test.q, &test.k, &test.v, &test.dout}) {
      std::fill(x->begin() + 130 * 32, x->end(), 0x7fc0);
    }
    const Result got = test.run(backend());
    EXPECT_EQ(got, want);
    for (const Bf16Vector* x : {&got.out, &got.dq, &got.dk, &got.dv}) {
      for (std::size_t n = 130 * 32; n < x->size(); ++n) ASSERT_EQ((*x)[n], 0);
    }
    for (std::size_t n = 130; n < got.lse.size(); ++n) EXPECT_EQ(got.lse[n], -kInfinity);
  }
}

// Promise 5: which rows a NaN or Inf at token t of one tensor reaches, and that it stays in its
// document.
TEST_P(Promises, PoisonReachesWhatSeesIt) {
  constexpr int kT = 150, kFirst = 40, kEnd = 240;  // t, and the document [40, 240)
  constexpr std::size_t kDim = 32;
  for (const RecipeInfo& info : runnable()) {
    if (not is_strict(info)) continue;
    AttentionCase base = make({.recipe = info.recipe, .q_lens = {40, 200, 30}, .dim = kDim});
    fill_normal(base, 6);
    const Result want = base.run(backend());
    for (const std::uint16_t poison : {0x7fc0, 0x7f80}) {
      for (const std::string_view tensor : {"q", "k", "v", "dout"}) {
        SCOPED_TRACE(testing::Message() << info.name << ' ' << tensor << ' ' << poison);
        AttentionCase test = base;
        Bf16Vector& x = tensor == "q"   ? test.q
                        : tensor == "k" ? test.k
                        : tensor == "v" ? test.v
                                        : test.dout;
        x[kT * kDim + 5] = poison;
        const Result got = test.run(backend());

        // Earlier rows and other documents.
        expect_same_queries(test, got, want, {0, kT});
        expect_same_queries(test, got, want, {kEnd, 270});
        for (const auto& [a, b] : {std::pair{&got.dk, &want.dk}, std::pair{&got.dv, &want.dv}}) {
          EXPECT_TRUE(same_rows(*a, *b, kDim, {0, kFirst}));
          EXPECT_TRUE(same_rows(*a, *b, kDim, {kEnd, 270}));
        }

        // What sees it. Codes carry poison by the exponent of the whole token; without codes it
        // reaches single channels only.
        if (not info.recipe.quantised()) continue;
        const bool scores = tensor == "q" or tensor == "k";
        // A running exponent stays NaN; that of single tokens of Q concerns one row.
        const bool one_row =
            tensor == "dout" or (tensor == "q" and info.recipe.scale_group != ScaleGroup::kRunning);
        const int last = one_row ? kT + 1 : kEnd;
        if (tensor != "dout") {
          EXPECT_TRUE(all_nan(got.out, kT * kDim, last * kDim));
        } else {
          EXPECT_EQ(got.out, want.out);
        }
        EXPECT_TRUE(all_nan(got.dq, kT * kDim, last * kDim));
        EXPECT_FALSE(any_nan(got.dq, last * kDim, kEnd * kDim));
        for (int n = kT; n < last; ++n) {
          const auto at = static_cast<std::size_t>(n);
          EXPECT_EQ(is_nan(got.lse[at]), scores) << n;
        }
        EXPECT_TRUE(any_nan(got.dk, kFirst * kDim, kEnd * kDim));
      }
    }
  }
}

// Promise 6: weights sum to 1, so V = 1 gives O = 1, for any scores.
TEST_P(Promises, BitEqualSumOfWeights) {
  for (const RecipeInfo& info : runnable()) {
    if (info.recipe.row_sum != RowSum::kCodes and info.recipe.operand != Element::kNone) continue;
    for (const double peak : {1.0, 8.0}) {
      SCOPED_TRACE(testing::Message() << info.name << ' ' << peak);
      AttentionCase test = make({.recipe = info.recipe, .q_lens = {300, 20}});
      fill_normal(test, 10);
      multiply(test.q, peak);
      const std::uint16_t one = float_to_bf16(1);
      std::fill(test.v.begin(), test.v.end(), one);
      const Result got = test.run(backend());
      for (std::size_t n = 0; n < got.out.size(); ++n) ASSERT_EQ(got.out[n], one) << n;
    }
  }
}

}  // namespace
}  // namespace mxattn::test
