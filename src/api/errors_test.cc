// Bad input: the message names argument, value and expectation, and nothing is written.
#include <gtest/gtest.h>
#include <mxattn/plan.h>

#include <cmath>
#include <functional>
#include <limits>

#include "api/test_case.h"

namespace mxattn::test {
namespace {

constexpr float kNotANumber = std::numeric_limits<float>::quiet_NaN();

// ---- configurations --------------------------------------------------------------------------

struct BadConfig {
  const char* name;
  void (*spoil)(mxattn_problem_config&);
  const char* message;  // part of it
  mxattn_status status = MXATTN_INVALID_ARGUMENT;
};

const BadConfig kBadConfigs[] = {
    {"recipe", [](auto& c) { c.recipe = "fp7"; },
     "recipe = \"fp7\": expected one of fp8, mxfp8, mxfp8_token"},
    {"backend", [](auto& c) { c.backend = "tpu"; },
     "backend = \"tpu\": expected one of auto, cpu, cpu_exact, cpu_h200, cuda"},
    {"total_q", [](auto& c) { c.total_q = -1; }, "total_q = -1: expected at least 0"},
    {"total_k", [](auto& c) { c.total_k = -5; }, "total_k = -5: expected at least 0"},
    {"huge", [](auto& c) { c.total_k = std::int64_t{1} << 60; },
     "total_k = 1152921504606846976: expected a tensor of at most 2^56 elements"},
    {"documents", [](auto& c) { c.num_documents = 0; }, "num_documents = 0: expected at least 1"},
    {"heads_q", [](auto& c) { c.heads_q = 0; }, "heads_q = 0: expected at least 1"},
    {"heads_k", [](auto& c) { c.heads_k = -2; }, "heads_k = -2: expected at least 1"},
    {"head_ratio", [](auto& c) { c.heads_q = 3; },
     "heads_q = 3: expected a multiple of heads_k = 2"},
    {"no_channels", [](auto& c) { c.head_dim = 0; }, "head_dim = 0: expected 1 to 256"},
    {"many_channels", [](auto& c) { c.head_dim = 257; }, "head_dim = 257: expected 1 to 256"},
    {"causal", [](auto& c) { c.causal = 2; }, "causal = 2: expected 0 or 1"},
    {"window_left", [](auto& c) { c.window_left = -2; }, "window_left = -2: expected at least -1"},
    {"window_right", [](auto& c) { c.window_right = -7; },
     "window_right = -7: expected at least -1"},
    {"scale_nan",
     [](auto& c) {
       c.has_softmax_scale = 1;
       c.softmax_scale = kNotANumber;
     },
     "softmax_scale = nan: expected a finite number"},
    {"scale_inf",
     [](auto& c) {
       c.has_softmax_scale = 1;
       c.softmax_scale = -std::numeric_limits<float>::infinity();
     },
     "softmax_scale = -inf: expected a finite number"},
    {"scale_huge",
     [](auto& c) {
       c.has_softmax_scale = 1;
       c.softmax_scale = std::numeric_limits<float>::max();
     },
     "softmax_scale = 3.40282e+38: expected a number that log2(e) times is finite in FP32"},
    {"has_scale", [](auto& c) { c.has_softmax_scale = 7; },
     "has_softmax_scale = 7: expected 0 or 1"},
    {"rotate", [](auto& c) { c.rotate = 2; }, "rotate = 2: expected -1 (as the recipe says), 0"},
    {"rotate_odd",
     [](auto& c) {
       c.rotate = 1;
       c.head_dim = 96;
     },
     "rotate = 1: expected 0 or -1 with head_dim = 96, which is not a power of two"},
    {"rotate_plain",
     [](auto& c) {
       c.rotate = 1;
       c.recipe = "bf16";
     },
     "rotate = 1: expected 0 or -1 with a recipe that does not quantise"},
    {"threads", [](auto& c) { c.threads = -1; }, "threads = -1: expected 0 (all) to "},
    {"device", [](auto& c) { c.device_kind = 9; }, "device_kind = 9: expected MXATTN_DEVICE_CPU"},
    {"device_index", [](auto& c) { c.device_index = -1; },
     "device_index = -1: expected at least 0"},
    {"size", [](auto& c) { c.size = 8; }, "config.size = 8: expected at least "},
    {"no_cuda", [](auto& c) { c.backend = "cuda"; },
     "backend cuda cannot run the problem: ", MXATTN_UNSUPPORTED},
    {"cuda_memory",
     [](auto& c) {
       c.backend = "auto";
       c.device_kind = MXATTN_DEVICE_CUDA;
     },
     "no backend can run the problem: cpu: it runs on tensors in CPU memory only",
     MXATTN_UNSUPPORTED},
};

TEST(ApiErrors, EveryFieldOfTheConfigurationIsChecked) {
  for (const BadConfig& bad : kBadConfigs) {
    SCOPED_TRACE(bad.name);
    const Config good = Case::default_config();
    mxattn_problem_config config = good.c_config();
    bad.spoil(config);

    mxattn_problem* problem = nullptr;
    EXPECT_EQ(mxattn_problem_create(&config, &problem), bad.status);
    EXPECT_EQ(problem, nullptr);
    const std::string message = mxattn_last_error();
    EXPECT_NE(message.find(bad.message), std::string::npos) << message;

    std::int32_t can_run = 7;
    const char* reason = nullptr;
    EXPECT_EQ(mxattn_can_run(&config, &can_run, &reason), MXATTN_OK);
    EXPECT_EQ(can_run, 0);
    EXPECT_EQ(reason, message);
  }
}

// ---- calls -----------------------------------------------------------------------------------

enum class Which { kForward, kBackward, kQuantize, kDequantize };

struct BadCall {
  const char* name;
  Which which;
  std::function<void(Case&)> spoil;
  const char* message;  // part of it
};

mxattn_status call(const Case& c, Which which) {
  switch (which) {
    case Which::kForward:
      return mxattn_forward(c.problem.handle(), &c.forward);
    case Which::kBackward:
      return mxattn_backward(c.problem.handle(), &c.backward);
    case Which::kQuantize:
      return mxattn_quantize(c.problem.handle(), &c.quantize);
    case Which::kDequantize:
      return mxattn_dequantize(c.problem.handle(), &c.dequantize);
  }
  return MXATTN_OK;
}

/// A pointer some bytes on.
void* shifted(const void* data, std::ptrdiff_t bytes) {
  return static_cast<char*>(const_cast<void*>(data)) + bytes;
}

void expect_refused(const std::vector<BadCall>& calls) {
  for (const BadCall& bad : calls) {
    SCOPED_TRACE(bad.name);
    Case c;
    bad.spoil(c);
    const auto before = c.written();
    EXPECT_EQ(call(c, bad.which), MXATTN_INVALID_ARGUMENT);
    const std::string message = mxattn_last_error();
    EXPECT_NE(message.find(bad.message), std::string::npos) << message;
    EXPECT_EQ(c.written(), before) << "something was written";
  }
}

TEST(ApiErrors, TensorsAreChecked) {
  expect_refused({
      {"dtype", Which::kForward, [](Case& c) { c.forward.q.dtype = MXATTN_F32; },
       "q.dtype = f32: expected bf16"},
      {"unknown_dtype", Which::kForward, [](Case& c) { c.forward.v.dtype = 99; },
       "v.dtype = unknown: expected bf16"},
      {"rank", Which::kForward, [](Case& c) { c.forward.k.rank = 4; },
       "k.rank = 4: expected 3, that is (total_k, heads_k, head_dim)"},
      {"negative_rank", Which::kForward, [](Case& c) { c.forward.k.rank = -1; },
       "k.rank = -1: expected 3"},
      {"shape", Which::kForward, [](Case& c) { c.forward.out.shape[0] = 39; },
       "out.shape = (39, 4, 32): expected (40, 4, 32), that is (total_q, heads_q, head_dim)"},
      {"negative_shape", Which::kForward, [](Case& c) { c.forward.v.shape[1] = -2; },
       "v.shape = (50, -2, 32): expected (50, 2, 32)"},
      {"last_dimension", Which::kForward, [](Case& c) { c.forward.q.strides[2] = 2; },
       "q.strides = (128, 32, 2): expected 1 at the end: the last dimension contiguous"},
      {"negative_stride", Which::kForward, [](Case& c) { c.forward.q.strides[0] = -128; },
       "q.strides = (-128, 32, 1): expected no negative stride"},
      {"huge_stride", Which::kForward,
       [](Case& c) { c.forward.q.strides[0] = std::int64_t{1} << 60; },
       "expected a view of less than 2^61 elements"},
      {"zero_stride", Which::kForward, [](Case& c) { c.forward.out.strides[0] = 0; },
       "out.strides = (0, 32, 1): expected rows of 32 elements that do not overlap"},
      {"overlapping_heads", Which::kBackward, [](Case& c) { c.backward.dk.strides[1] = 31; },
       "dk.strides = (64, 31, 1): expected rows of 32 elements that do not overlap"},
      {"overlapping_tokens", Which::kBackward, [](Case& c) { c.backward.dv.strides[0] = 63; },
       "dv.strides = (63, 32, 1): expected rows of 32 elements that do not overlap"},
      {"null", Which::kForward, [](Case& c) { c.forward.q.data = nullptr; },
       "q.data = null: expected the address of 5120 elements"},
      {"null_gradient", Which::kBackward, [](Case& c) { c.backward.dout.data = nullptr; },
       "dout.data = null: expected the address of 5120 elements"},
      {"misaligned", Which::kForward,
       [](Case& c) { c.forward.q.data = shifted(c.forward.q.data, 1); }, "a multiple of 2"},
      {"lse_dtype", Which::kForward, [](Case& c) { c.forward.lse.dtype = MXATTN_BF16; },
       "lse.dtype = bf16: expected f32"},
      {"lse_shape", Which::kForward,
       [](Case& c) { std::swap(c.forward.lse.shape[0], c.forward.lse.shape[1]); },
       "lse.shape = (40, 4): expected (4, 40), that is (heads_q, total_q)"},
      {"lse_strides", Which::kForward, [](Case& c) { c.forward.lse.strides[0] = 41; },
       "lse.strides = (41, 1): expected (40, 1): contiguous"},
      {"restored_dtype", Which::kDequantize,
       [](Case& c) { c.dequantize.tensor.dtype = MXATTN_BF16; },
       "tensor.dtype = bf16: expected f32"},
      {"quantize_shape", Which::kQuantize, [](Case& c) { c.quantize.operand = MXATTN_Q; },
       "tensor.shape = (50, 2, 32): expected (40, 4, 32), that is (total_q, heads_q, head_dim)"},
      {"operand", Which::kQuantize, [](Case& c) { c.quantize.operand = 3; },
       "operand = 3: expected MXATTN_Q (1), MXATTN_K (2) or MXATTN_V (4)"},
      {"rotate_back", Which::kQuantize, [](Case& c) { c.quantize.rotate_back = 1; },
       "rotate_back = 1: expected 0 when quantising"},
      {"rotate_back_two", Which::kDequantize, [](Case& c) { c.dequantize.rotate_back = 2; },
       "rotate_back = 2: expected 0 or 1"},
      {"quantized", Which::kForward, [](Case& c) { c.forward.quantized = 8; },
       "quantized = 8: expected a sum of MXATTN_Q (1), MXATTN_K (2) and MXATTN_V (4)"},
      {"size", Which::kForward, [](Case& c) { c.forward.size = 0; },
       "args.size = 0: expected at least "},
  });
}

TEST(ApiErrors, LengthsAreChecked) {
  expect_refused({
      {"null", Which::kForward, [](Case& c) { c.forward.call.cu_seqlens_q.data = nullptr; },
       "cu_seqlens_q.data = null: expected the address of 4 elements"},
      {"dtype", Which::kForward, [](Case& c) { c.forward.call.cu_seqlens_q.dtype = MXATTN_F32; },
       "cu_seqlens_q.dtype = f32: expected i32"},
      {"count", Which::kForward, [](Case& c) { c.forward.call.cu_seqlens_k.shape[0] = 3; },
       "cu_seqlens_k.shape = (3,): expected (4,), that is (num_documents + 1)"},
      {"strided", Which::kForward, [](Case& c) { c.forward.call.cu_seqlens_q.strides[0] = 2; },
       "cu_seqlens_q.strides = (2,): expected (1,): contiguous"},
      {"start", Which::kForward, [](Case& c) { c.cu_q[0] = 1; }, "cu_seqlens_q"},
      {"decreases", Which::kBackward, [](Case& c) { c.cu_k[2] = 24; }, "cu_seqlens_k"},
      {"beyond", Which::kBackward, [](Case& c) { c.cu_q[3] = 41; }, "cu_seqlens_q"},
  });
}

TEST(ApiErrors, StateIsChecked) {
  expect_refused({
      {"count", Which::kForward, [](Case& c) { --c.forward.call.num_state; },
       "num_state = 8: expected 9 buffers, as mxattn_state_count says"},
      {"no_array", Which::kBackward, [](Case& c) { c.backward.call.state = nullptr; },
       "state = null: expected an array of 9 buffers"},
      {"missing", Which::kForward, [](Case& c) { c.state[0].data = nullptr; },
       "state[0] (q_codes).data = null: expected the address of"},
      {"small", Which::kBackward, [](Case& c) { --c.state.back().bytes; },
       "state[8] (row_sum).bytes = 639: expected at least 640"},
      {"misaligned", Which::kForward,
       [](Case& c) { c.state[2].data = shifted(c.state[2].data, 8); }, "expected a multiple of 16"},
      {"reserved", Which::kForward, [](Case& c) { c.forward.call.reserved = 1; },
       "call.reserved = 1: expected 0"},
      {"stream", Which::kForward, [](Case& c) { c.forward.call.stream = &c; },
       "expected null on the CPU"},
  });
}

TEST(ApiErrors, SharedMemoryIsRefused) {
  expect_refused({
      {"in_place", Which::kForward, [](Case& c) { c.forward.out.data = c.q.data(); },
       ": expected memory that q (at "},
      {"partly", Which::kForward,
       [](Case& c) { c.forward.out.data = shifted(c.q.data(), 64 * 20); }, "does not share"},
      {"two_gradients", Which::kBackward, [](Case& c) { c.backward.dk.data = c.dv.data(); },
       "does not share"},
      {"gradient_over_dout", Which::kBackward, [](Case& c) { c.backward.dq.data = c.dout.data(); },
       "does not share"},
      {"state_over_state", Which::kForward, [](Case& c) { c.state[1].data = c.state[0].data; },
       "state buffer q_codes"},
      {"out_over_lengths", Which::kForward, [](Case& c) { c.forward.lse.data = c.cu_q.data(); },
       "cu_seqlens_q"},
      {"interleaved", Which::kBackward,
       [](Case& c) {
         // Views of one buffer, half a row too close to each other.
         c.dk.resize(2 * c.dv.size());
         c.backward.dk = rows(c.dk.data(), MXATTN_BF16, Case::kTotalK, 2, 32, 128, 32);
         c.backward.dv = rows(shifted(c.dk.data(), 96), MXATTN_BF16, Case::kTotalK, 2, 32, 128, 32);
       },
       "does not share"},
  });
}

TEST(ApiErrors, AHandleIsNeeded) {
  Case c;
  EXPECT_EQ(mxattn_forward(nullptr, &c.forward), MXATTN_INVALID_ARGUMENT);
  EXPECT_STREQ(mxattn_last_error(), "problem = null: expected an address");
  EXPECT_EQ(mxattn_backward(c.problem.handle(), nullptr), MXATTN_INVALID_ARGUMENT);
  EXPECT_STREQ(mxattn_last_error(), "args = null: expected an address");
}

TEST(ApiErrors, RecipesWithoutOperandsRefuseToQuantise) {
  Case c(Case::default_config("bf16"));
  const auto before = c.written();
  EXPECT_EQ(mxattn_quantize(c.problem.handle(), &c.quantize), MXATTN_INVALID_ARGUMENT);
  EXPECT_STREQ(mxattn_last_error(),
               "recipe = bf16: expected one that quantises: this one has no operands");
  c.backward.k.data = nullptr;
  EXPECT_EQ(mxattn_backward(c.problem.handle(), &c.backward), MXATTN_INVALID_ARGUMENT);
  EXPECT_STREQ(mxattn_last_error(), "k.data = null: expected the address of 3200 elements");
  EXPECT_EQ(c.written(), before);
}

// A caller built against a newer header: fields that this library does not know must be 0.
TEST(ApiErrors, UnknownFieldsAreRefusedUnlessZero) {
  struct Newer {
    mxattn_problem_config config;
    std::int64_t unknown;
  };
  const Config good = Case::default_config();
  Newer newer{good.c_config(), 0};
  newer.config.size = sizeof newer;
  mxattn_problem* problem = nullptr;
  EXPECT_EQ(mxattn_problem_create(&newer.config, &problem), MXATTN_OK);
  mxattn_problem_destroy(problem);
  newer.unknown = 1;
  EXPECT_EQ(mxattn_problem_create(&newer.config, &problem), MXATTN_INVALID_ARGUMENT);
  EXPECT_NE(std::string(mxattn_last_error()).find("or zeros beyond"), std::string::npos);
}

// Memory behind the struct is not read: it may not be there.
TEST(ApiErrors, SizesThatNobodySetAreRefused) {
  Case c;
  for (const std::uint64_t size : {std::uint64_t{1} << 40, ~std::uint64_t{0}}) {
    mxattn_problem_config config = Case::default_config().c_config();
    config.size = size;
    mxattn_problem* problem = nullptr;
    EXPECT_EQ(mxattn_problem_create(&config, &problem), MXATTN_INVALID_ARGUMENT) << size;
    EXPECT_NE(std::string(mxattn_last_error()).find("at most 4096: was the struct initialised?"),
              std::string::npos);
    mxattn_problem_destroy(problem);
    c.forward.size = size;
    const auto before = c.written();
    EXPECT_EQ(mxattn_forward(c.problem.handle(), &c.forward), MXATTN_INVALID_ARGUMENT) << size;
    EXPECT_EQ(c.written(), before);
  }
}

TEST(ApiErrors, SchedulesAreChecked) {
  const std::int32_t ends[] = {0, 300};
  mxattn_schedule_config config;
  mxattn_schedule_config_init(&config);
  config.cu_seqlens_q = ends;
  const auto refusal = [&config] {
    mxattn_schedule* schedule = nullptr;
    EXPECT_EQ(mxattn_schedule_create(&config, &schedule), MXATTN_INVALID_ARGUMENT);
    EXPECT_EQ(schedule, nullptr);
    return std::string(mxattn_last_error());
  };
  EXPECT_EQ(refusal(), "num_documents = 0: expected at least 1");
  config.num_documents = 1;
  config.causal = 2;
  EXPECT_EQ(refusal(), "causal = 2: expected 0 or 1");
}

TEST(ApiErrors, TheCppInterfaceThrowsStatusAndMessage) {
  Config config = Case::default_config();
  config.head_dim = 300;
  try {
    const Problem problem(config);
    FAIL() << "no exception";
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), MXATTN_INVALID_ARGUMENT);
    EXPECT_STREQ(error.what(), "head_dim = 300: expected 1 to 256");
  }
}

}  // namespace
}  // namespace mxattn::test
