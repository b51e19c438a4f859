// What calls do with good input: the same bits by every way in.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <thread>

#include "api/test_case.h"

namespace mxattn::test {
namespace {

/// The outputs of a forward and a backward.
struct Bits {
  explicit Bits(const Case& c) : out(c.out), dq(c.dq), dk(c.dk), dv(c.dv), lse(c.lse.size()) {
    std::memcpy(lse.data(), c.lse.data(), lse.size() * sizeof(float));
  }
  std::vector<std::uint16_t> out, dq, dk, dv;
  std::vector<std::uint32_t> lse;
  bool operator==(const Bits&) const = default;
};

std::vector<std::string> recipe_names(bool quantised_only = false) {
  std::vector<std::string> names;
  for (const auto& recipe : recipes()) {
    if (recipe.quantized != 0 or not quantised_only) names.emplace_back(recipe.name);
  }
  return names;
}

class EveryRecipe : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Api, EveryRecipe, testing::ValuesIn(recipe_names()),
                         [](const auto& info) { return info.param; });

class QuantisedRecipe : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Api, QuantisedRecipe, testing::ValuesIn(recipe_names(true)),
                         [](const auto& info) { return info.param; });

TEST_P(QuantisedRecipe, BitEqualWhoeverQuantises) {
  Case once(Case::default_config(GetParam()));
  once.run();
  Case apart(Case::default_config(GetParam()));
  for (const auto& [operand, tensor] :
       {std::pair{MXATTN_Q, &apart.forward.q}, std::pair{MXATTN_K, &apart.forward.k},
        std::pair{MXATTN_V, &apart.forward.v}}) {
    apart.quantize.operand = operand;
    apart.quantize.tensor = *tensor;
    detail::check(mxattn_quantize(apart.problem.handle(), &apart.quantize));
    tensor->data = nullptr;  // not needed any more
  }
  apart.forward.quantized = MXATTN_Q | MXATTN_K | MXATTN_V;
  apart.backward.q.data = apart.backward.k.data = apart.backward.v.data = nullptr;
  apart.run();
  EXPECT_EQ(Bits(apart), Bits(once));
  for (std::size_t i = 0; i < once.state.size(); ++i) {
    EXPECT_EQ(std::memcmp(once.state[i].data, apart.state[i].data, once.state[i].bytes), 0)
        << once.state_memory.layout()[i].name;
  }
}

TEST_P(EveryRecipe, BitEqualOnViewsOfFusedBuffers) {
  Case packed(Case::default_config(GetParam()));
  packed.run();

  // One row of a token holds q, k, v side by side; so do the gradients. Keys have more rows than
  // queries, so k and v lie in a longer buffer of their own rows.
  Case fused(Case::default_config(GetParam()));
  constexpr std::int64_t kRow = (Case::kHeadsQ + 2 * Case::kHeadsK) * Case::kDim;
  constexpr std::int64_t kKeyAt = Case::kHeadsQ * Case::kDim;
  constexpr std::int64_t kValueAt = kKeyAt + Case::kHeadsK * Case::kDim;
  std::vector<std::uint16_t> qkv(Case::kTotalK * kRow, 0x7FC0);  // NaN between the views
  std::vector<std::uint16_t> gradients(qkv.size(), 0xA5A5);
  const auto view = [](std::vector<std::uint16_t>& buffer, std::int64_t at, std::int64_t tokens,
                       std::int64_t heads) {
    return rows(buffer.data() + at, MXATTN_BF16, tokens, heads, Case::kDim, kRow, Case::kDim);
  };
  const auto copy = [](const std::vector<std::uint16_t>& from, const Tensor& to) {
    const std::int64_t row = to.shape[1] * to.shape[2];
    for (std::int64_t t = 0; t < to.shape[0]; ++t) {
      std::copy_n(from.begin() + t * row, row,
                  static_cast<std::uint16_t*>(to.data) + t * to.strides[0]);
    }
  };
  fused.forward.q = view(qkv, 0, Case::kTotalQ, Case::kHeadsQ);
  fused.forward.k = view(qkv, kKeyAt, Case::kTotalK, Case::kHeadsK);
  fused.forward.v = view(qkv, kValueAt, Case::kTotalK, Case::kHeadsK);
  copy(fused.q, fused.forward.q);
  copy(fused.k, fused.forward.k);
  copy(fused.v, fused.forward.v);
  fused.backward.q = fused.forward.q;
  fused.backward.k = fused.forward.k;
  fused.backward.v = fused.forward.v;
  fused.backward.dq = view(gradients, 0, Case::kTotalQ, Case::kHeadsQ);
  fused.backward.dk = view(gradients, kKeyAt, Case::kTotalK, Case::kHeadsK);
  fused.backward.dv = view(gradients, kValueAt, Case::kTotalK, Case::kHeadsK);
  fused.run();

  const auto equal = [](const std::vector<std::uint16_t>& expected, const Tensor& view) {
    const std::int64_t row = view.shape[1] * view.shape[2];
    for (std::int64_t t = 0; t < view.shape[0]; ++t) {
      if (not std::equal(expected.begin() + t * row, expected.begin() + (t + 1) * row,
                         static_cast<std::uint16_t*>(view.data) + t * view.strides[0])) {
        return testing::AssertionFailure() << "token " << t;
      }
    }
    return testing::AssertionSuccess();
  };
  EXPECT_EQ(fused.out, packed.out);
  EXPECT_TRUE(equal(packed.dq, fused.backward.dq));
  EXPECT_TRUE(equal(packed.dk, fused.backward.dk));
  EXPECT_TRUE(equal(packed.dv, fused.backward.dv));
  // Queries end before keys do: what follows belongs to nobody.
  EXPECT_EQ(gradients[Case::kTotalQ * kRow], 0xA5A5);
}

TEST_P(EveryRecipe, BitEqualWhateverUnusedStridesAre) {
  Config config = Case::default_config(GetParam());
  config.backend = "auto";
  config.total_q = config.total_k = 1;
  config.num_documents = config.heads_q = config.heads_k = 1;
  const auto run = [&config](std::int64_t token_stride, std::int64_t head_stride) {
    Case one(config);
    one.cu_q = {0, 1};
    for (mxattn_call* call : {&one.forward.call, &one.backward.call}) {
      call->cu_seqlens_q = lengths(one.cu_q);
      call->cu_seqlens_k.data = nullptr;
    }
    mxattn_forward_args& f = one.forward;
    mxattn_backward_args& b = one.backward;
    for (Tensor* x :
         {&f.q, &f.k, &f.v, &f.out, &b.q, &b.k, &b.v, &b.out, &b.dout, &b.dq, &b.dk, &b.dv}) {
      *x = rows(x->data, MXATTN_BF16, 1, 1, Case::kDim);
      x->strides[0] = token_stride;
      x->strides[1] = head_stride;
    }
    f.lse = b.lse = lse_tensor(one.lse.data(), 1, 1);
    one.run();
    return Bits(one);
  };
  const Bits expected = run(Case::kDim, Case::kDim);
  EXPECT_NE(expected.out[0], 0xA5A5) << "nothing was written";
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  EXPECT_EQ(run(kMost, kMost), expected);
  EXPECT_EQ(run(-kMost, -1), expected);
}

TEST_P(EveryRecipe, BitEqualForAnyNumberOfThreads) {
  Config config = Case::default_config(GetParam());
  config.threads = 1;
  Case one(config);
  one.run();
  for (const int threads : {2, 3}) {
    config.threads = threads;
    Case more(config);
    more.run();
    EXPECT_EQ(Bits(more), Bits(one)) << threads << " threads";
  }
}

TEST_P(EveryRecipe, BitEqualWithoutKeyLengthsWhereTheyAreTheSame) {
  Case given(Case::default_config(GetParam()));
  given.cu_k = given.cu_q;
  given.run();
  Case omitted(Case::default_config(GetParam()));
  omitted.forward.call.cu_seqlens_k = omitted.backward.call.cu_seqlens_k = {};
  omitted.run();
  EXPECT_EQ(Bits(omitted), Bits(given));
}

// Rows behind the last document: zeros and -inf, whatever the inputs hold there.
TEST_P(EveryRecipe, BitEqualZerosBehindTheLastDocument) {
  Case clean(Case::default_config(GetParam()));
  clean.run();
  Case c(Case::default_config(GetParam()));
  const std::int64_t q_end = c.cu_q.back(), k_end = c.cu_k.back();
  constexpr std::int64_t kQRow = Case::kHeadsQ * Case::kDim, kKRow = Case::kHeadsK * Case::kDim;
  for (auto* x : {&c.q, &c.dout}) std::fill(x->begin() + q_end * kQRow, x->end(), 0x7FC0);
  for (auto* x : {&c.k, &c.v}) std::fill(x->begin() + k_end * kKRow, x->end(), 0x7F80);
  c.run();
  EXPECT_EQ(Bits(c), Bits(clean)) << "NaN outside the documents moved a bit";
  const auto zero = [](std::uint16_t bits) { return bits == 0; };
  EXPECT_TRUE(std::all_of(c.out.begin() + q_end * kQRow, c.out.end(), zero));
  EXPECT_TRUE(std::all_of(c.dq.begin() + q_end * kQRow, c.dq.end(), zero));
  EXPECT_TRUE(std::all_of(c.dk.begin() + k_end * kKRow, c.dk.end(), zero));
  EXPECT_TRUE(std::all_of(c.dv.begin() + k_end * kKRow, c.dv.end(), zero));
  for (int head = 0; head < Case::kHeadsQ; ++head) {
    for (std::int64_t t = q_end; t < Case::kTotalQ; ++t) {
      EXPECT_EQ(c.lse[static_cast<std::size_t>(head * Case::kTotalQ + t)],
                -std::numeric_limits<float>::infinity());
    }
  }
}

TEST(Api, BitEqualFromTwoThreadsOnOneHandle) {
  Case alone;
  alone.run();
  Case first, second;
  const auto run = [&alone](Case& c) {
    detail::check(mxattn_forward(alone.problem.handle(), &c.forward));
    detail::check(mxattn_backward(alone.problem.handle(), &c.backward));
  };
  std::thread other([&] { run(second); });
  run(first);
  other.join();
  EXPECT_EQ(Bits(first), Bits(alone));
  EXPECT_EQ(Bits(second), Bits(alone));
}

// E4M3 keeps 3 fraction bits of a normal value and the quantum 2^-9 of small ones, times 2^E.
TEST(Api, BoundedErrorOfRestoredValues) {
  Case c;
  detail::check(mxattn_quantize(c.problem.handle(), &c.quantize));
  detail::check(mxattn_dequantize(c.problem.handle(), &c.dequantize));
  const auto layout = c.state_memory.layout();
  const auto at = std::ranges::find_if(layout, [](const mxattn_buffer_info& info) {
    return info.name == std::string("v_exponents");
  });
  ASSERT_NE(at, layout.end());
  const auto* exponents =
      static_cast<const std::int8_t*>(c.state[static_cast<std::size_t>(at - layout.begin())].data);
  int exact = 0;
  for (int t = 0; t < 25; ++t) {  // the first document: slots are tokens
    for (int head = 0; head < Case::kHeadsK; ++head) {
      const int exponent = exponents[head * at->shape[1] + t];
      const auto row = static_cast<std::size_t>(t * Case::kHeadsK + head) * Case::kDim;
      for (int channel = 0; channel < Case::kDim; ++channel) {
        const std::size_t i = row + channel;
        const double x = from_bf16(c.v[i]), y = c.restored[i];
        EXPECT_LE(std::abs(x - y), std::max(std::abs(x) * 0x1p-4, std::ldexp(1.0, exponent - 10)));
        exact += x == y;
      }
    }
  }
  EXPECT_LT(exact, 25 * Case::kHeadsK * Case::kDim / 2) << "the input was no test";
  EXPECT_TRUE(std::all_of(c.restored.begin() + 45 * Case::kHeadsK * Case::kDim, c.restored.end(),
                          [](float x) { return x == 0; }));
}

TEST(Api, StateLayoutFollowsTotalsAlone) {
  const Problem problem(Case::default_config());
  const auto layout = problem.state_layout();
  std::vector<std::string> names;
  for (const auto& info : layout) names.emplace_back(info.name);
  EXPECT_EQ(names,
            (std::vector<std::string>{"q_codes", "q_exponents", "k_codes", "k_exponents", "v_codes",
                                      "v_exponents", "v_norms", "row_reference", "row_sum"}));
  // Slots: totals plus 16 a document, rounded up to 128.
  const auto slots = [](std::int64_t total_q, std::int64_t total_k) {
    Config config = Case::default_config();
    config.total_q = total_q;
    config.total_k = total_k;
    config.num_documents = 3;
    const auto buffers = Problem(config).state_layout();
    return std::pair{buffers[0].shape[1], buffers[2].shape[1]};
  };
  EXPECT_EQ(slots(80, 81), (std::pair<std::int64_t, std::int64_t>{128, 256}));
  EXPECT_EQ(slots(0, 1000), (std::pair<std::int64_t, std::int64_t>{128, 1152}));
  for (const auto& info : layout) {
    std::uint64_t bytes = info.dtype == MXATTN_I32 or info.dtype == MXATTN_F32 ? 4 : 1;
    for (int i = 0; i < info.rank; ++i) bytes *= static_cast<std::uint64_t>(info.shape[i]);
    EXPECT_EQ(info.bytes, bytes) << info.name;
  }
  EXPECT_EQ(problem.workspace_bytes(), 0u);
  EXPECT_EQ(Problem(Case::default_config("bf16")).state_layout().size(), 2u);
  EXPECT_STREQ(Problem(Case::default_config("fp8_tensor")).state_layout()[2].name, "q_scale");
}

TEST(Api, ProblemsWithoutTokensRun) {
  Config config = Case::default_config();
  config.total_q = config.total_k = 0;
  config.num_documents = 1;
  const Problem problem(config);
  StateBuffers state(problem);
  const std::vector<std::int32_t> none = {0, 0};
  const Call call{.cu_seqlens_q = lengths(none), .state = state.buffers()};
  const Tensor q = rows(nullptr, MXATTN_BF16, 0, 4, 32), k = rows(nullptr, MXATTN_BF16, 0, 2, 32);
  const Tensor lse = lse_tensor(nullptr, 4, 0);
  problem.forward({.call = call, .q = q, .k = k, .v = k, .out = q, .lse = lse});
  problem.backward({.call = call,
                    .q = q,
                    .k = k,
                    .v = k,
                    .out = q,
                    .lse = lse,
                    .dout = q,
                    .dq = q,
                    .dk = k,
                    .dv = k});
}

TEST(Api, ExplainNamesWhatWasChosen) {
  Config config = Case::default_config();
  config.head_dim = 128;
  const std::string text = Problem(config).explain();
  for (const char* part : {"fp8, folded form, version ", "strictly causal", "cpu_exact",
                           "asked for by name", "Walsh-Hadamard", "128 queries by 128 keys",
                           "FP64 loops", "4 query heads on 2 key heads"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " in\n" << text;
  }
  config.backend = "auto";
  EXPECT_EQ(Problem(config).backend(), "cpu");
  config.recipe = "fp8_tensor";
  EXPECT_EQ(Problem(config).backend(), "cpu_exact");
  EXPECT_NE(Problem(config).explain().find("cpu: "), std::string::npos) << "why not the fast one";
}

TEST(Api, EveryRecipeRunsSomewhere) {
  for (const std::string& name : recipe_names()) {
    Config config = Case::default_config(name);
    config.backend = "auto";
    EXPECT_TRUE(can_run(config)) << name << ": " << can_run(config).reason;
  }
}

}  // namespace
}  // namespace mxattn::test
