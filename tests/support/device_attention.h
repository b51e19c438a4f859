// An AttentionCase on a CUDA device, through the C interface.
//
//   DeviceAttention device(test, {.pad = 8});
//   const Result result = device.run();
//   device.operand("v");                       // what the state holds, on the host
//
// Workspace, state and outputs are filled with 0xFF before every run, and so are the gaps between
// rows of padded tensors. CUDA errors fail the running test.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <mxattn/mxattn.h>
#include <mxattn/plan.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "kernels/sm90/workspace.h"
#include "support/attention_case.h"

namespace mxattn::test {

inline bool has_hopper() {
  cudaDeviceProp properties;
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess and count > 0 and
         cudaGetDeviceProperties(&properties, 0) == cudaSuccess and properties.major == 9;
}

/// A kernel that hangs holds the device until its process ends: it ends by itself, after
/// MXATTN_TEST_SECONDS (compute-sanitizer needs more than the default).
class Watchdog : public ::testing::Environment {
 public:
  void SetUp() override {
    constexpr int kSeconds = 120;
    const char* const wanted = std::getenv("MXATTN_TEST_SECONDS");
    alarm(static_cast<unsigned>(wanted == nullptr ? kSeconds : std::atoi(wanted)));
  }
  void TearDown() override { alarm(0); }
};
inline const auto* const kWatchdog = ::testing::AddGlobalTestEnvironment(new Watchdog);

class Hopper : public ::testing::Test {
 protected:
  void SetUp() override {
    if (not has_hopper()) GTEST_SKIP() << "no CUDA device of compute capability 9.x";
  }
};

/// What the Hopper kernels are built for.
struct HopperInstance {
  Recipe recipe;
  int dim;

  std::string name() const {
    return std::string(info_of(recipe).name) + "_d" + std::to_string(dim);
  }
};
inline constexpr HopperInstance kHopperInstances[] = {
    {recipes::fp8, 128},         {recipes::fp8, 64},         {recipes::fp8_ds_row, 128},
    {recipes::fp8_ds_row, 64},   {recipes::mxfp8, 128},      {recipes::mxfp8, 64},
    {recipes::mxfp8_token, 128}, {recipes::mxfp8_token, 64},
};

/// Tests that run for each of them.
class HopperEach : public Hopper, public ::testing::WithParamInterface<HopperInstance> {};

#define MXATTN_FOR_EACH_HOPPER_INSTANCE(suite)                                 \
  INSTANTIATE_TEST_SUITE_P(Each, suite, ::testing::ValuesIn(kHopperInstances), \
                           [](const auto& info) { return info.param.name(); })

#define MXATTN_EXPECT_CUDA(call) \
  EXPECT_EQ((call), cudaSuccess) << cudaGetErrorString(cudaGetLastError())

/// Whether buffers stay as they were allocated, for compute-sanitizer --tool initcheck, to which
/// poison is a value like any other.
inline bool leaves_memory_unset() { return std::getenv("MXATTN_TEST_INITCHECK") != nullptr; }

struct DeviceOptions {
  int pad = 0;           // elements behind every row of channels
  bool planned = false;  // work lists made in advance
};

/// Bytes of an operand on the host.
struct HostOperand {
  std::vector<std::uint8_t> codes;
  std::vector<std::int8_t> exponents, norms;

  bool operator==(const HostOperand&) const = default;
};

class DeviceAttention {
 public:
  explicit DeviceAttention(const AttentionCase& test, DeviceOptions options = {})
      : spec_(test.spec()), options_(options) {
    if (leaves_memory_unset()) options_.pad = 0;
    const Pack& pack = test.pack();
    const int documents = static_cast<int>(pack.documents.size());
    mxattn_problem_config config;
    mxattn_problem_config_init(&config);
    const std::string recipe(info_of(spec_.recipe).name);
    config.recipe = recipe.c_str();
    config.backend = "cuda";
    config.device_kind = MXATTN_DEVICE_CUDA;
    config.total_q = pack.total_q;
    config.total_k = pack.total_k;
    config.num_documents = documents;
    config.heads_q = spec_.heads_q;
    config.heads_k = spec_.heads_k;
    config.head_dim = spec_.dim;
    config.causal = spec_.mask.causal;
    config.window_left = spec_.mask.window_left;
    config.window_right = spec_.mask.window_right;
    config.has_softmax_scale = 1;
    config.softmax_scale = spec_.softmax_scale;
    config.rotate = test.problem().rotate;
    expect(mxattn_problem_create(&config, &problem_));
    if (problem_ == nullptr) return;
    device_.problem = test.problem();
    device_.num_documents = documents;
    device_.total_q = pack.total_q;
    device_.total_k = pack.total_k;
    MXATTN_EXPECT_CUDA(
        cudaDeviceGetAttribute(&device_.multiprocessors, cudaDevAttrMultiProcessorCount, 0));
    // Two walks over the same pieces: sizes first, then addresses.
    kernels::sm90::Carver sizes(nullptr);
    lay_out(sizes);
    bytes_ = sizes.bytes();
    MXATTN_EXPECT_CUDA(cudaMalloc(&block_, static_cast<std::size_t>(bytes_)));
    poison(block_, static_cast<std::size_t>(bytes_), nullptr);
    kernels::sm90::Carver carver(block_);
    lay_out(carver);
    set_lengths(test);
    set_inputs(test);
  }
  DeviceAttention(const DeviceAttention&) = delete;
  DeviceAttention& operator=(const DeviceAttention&) = delete;
  ~DeviceAttention() {
    mxattn_plan_destroy(plan_);
    mxattn_problem_destroy(problem_);
    MXATTN_EXPECT_CUDA(cudaDeviceSynchronize());
    cudaFree(block_);
  }

  /// Other lengths of as many documents with the same totals.
  void set_lengths(const AttentionCase& test) {
    std::vector<std::int32_t> cu_q{0}, cu_k{0};
    for (const Document& d : test.pack().documents) {
      cu_q.push_back(static_cast<std::int32_t>(d.q_token) + d.q_len);
      cu_k.push_back(static_cast<std::int32_t>(d.k_token) + d.k_len);
    }
    copy(cu_q.data(), cu_seqlens_q, cu_q.size() * 4);
    copy(cu_k.data(), cu_seqlens_k, cu_k.size() * 4);
  }

  void set_inputs(const AttentionCase& test) {
    upload(test.q, q);
    upload(test.k, k);
    upload(test.v, v);
    upload(test.dout, dout);
  }

  /// Fills everything that a call writes, its workspace included.
  void poison(cudaStream_t stream) { poison(written_begin_, written_bytes_, stream); }

  void forward(cudaStream_t stream) {
    if (options_.planned and plan_ == nullptr) make_plan(stream);
    mxattn_forward_args args;
    mxattn_forward_args_init(&args);
    args.call = call(stream);
    args.q = tensor(q, device_.total_q, spec_.heads_q);
    args.k = tensor(k, device_.total_k, spec_.heads_k);
    args.v = tensor(v, device_.total_k, spec_.heads_k);
    args.out = tensor(out, device_.total_q, spec_.heads_q);
    args.lse = lse_tensor();
    expect(mxattn_forward(problem_, &args));
  }

  void backward(cudaStream_t stream) {
    mxattn_backward_args args;
    mxattn_backward_args_init(&args);
    args.call = call(stream);
    args.out = tensor(out, device_.total_q, spec_.heads_q);
    args.lse = lse_tensor();
    args.dout = tensor(dout, device_.total_q, spec_.heads_q);
    args.dq = tensor(dq, device_.total_q, spec_.heads_q);
    args.dk = tensor(dk, device_.total_k, spec_.heads_k);
    args.dv = tensor(dv, device_.total_k, spec_.heads_k);
    expect(mxattn_backward(problem_, &args));
  }

  /// Poisons, runs both and copies the outputs.
  Result run(cudaStream_t stream = nullptr) {
    poison(stream);
    forward(stream);
    // What the forward leaves in the workspace is nobody's.
    poison(workspace, workspace_bytes_, stream);
    backward(stream);
    MXATTN_EXPECT_CUDA(cudaStreamSynchronize(stream));
    return result();
  }

  Result result() const {
    Result r;
    r.out = download(out, device_.total_q, spec_.heads_q);
    r.dq = download(dq, device_.total_q, spec_.heads_q);
    r.dk = download(dk, device_.total_k, spec_.heads_k);
    r.dv = download(dv, device_.total_k, spec_.heads_k);
    const auto rows = static_cast<std::size_t>(device_.total_q * spec_.heads_q);
    r.lse = host(lse, rows);
    if (rows > 0) {
      r.row_reference = host(static_cast<std::int32_t*>(state_.at("row_reference")), rows);
      r.row_sum = host(static_cast<float*>(state_.at("row_sum")), rows);
    }
    return r;
  }

  /// Operand "q", "k" or "v" of the state.
  HostOperand operand(const std::string& name) const {
    const bool query = name == "q";
    const auto rows = static_cast<std::size_t>(query ? spec_.heads_q * device_.q_slots()
                                                     : spec_.heads_k * device_.k_slots());
    HostOperand x;
    x.codes = host(static_cast<std::uint8_t*>(state_.at(name + "_codes")), rows * dim());
    x.exponents = host(static_cast<std::int8_t*>(state_.at(name + "_exponents")), rows);
    if (name == "v") x.norms = host(static_cast<std::int8_t*>(state_.at("v_norms")), rows);
    return x;
  }

  /// What the last backward prepared.
  struct Gradient {
    HostOperand g;
    std::vector<std::int8_t> output_norms;
    std::vector<float> delta;
  };
  Gradient gradient() const {
    kernels::sm90::Carver carver(workspace);
    const kernels::sm90::BackwardWorkspace left(carver, device_);
    const auto rows = static_cast<std::size_t>(spec_.heads_q * device_.q_slots());
    return {.g = {.codes = host(left.g.codes, rows * dim()),
                  .exponents = host(left.g.exponents, rows),
                  .norms = host(left.g.norms, rows)},
            .output_norms = host(left.output_norms, rows),
            .delta = host(left.delta, rows)};
  }

  const mxattn_problem* problem() const { return problem_; }

  // A call as the backend sees it.
  const kernels::DeviceProblem& device_problem() const { return device_; }
  kernels::DeviceCall device_call(cudaStream_t stream) const {
    return {.cu_seqlens_q = cu_seqlens_q,
            .cu_seqlens_k = cu_seqlens_k,
            .workspace = workspace,
            .stream = stream};
  }
  kernels::ForwardArgs forward_args() const {
    return {.q = queries<const std::uint16_t>(q),
            .k = keys<const std::uint16_t>(k),
            .v = keys<const std::uint16_t>(v),
            .state = state(),
            .out = queries(out),
            .lse = lse};
  }
  kernels::BackwardArgs backward_args() const {
    return {.q = queries<const std::uint16_t>(q),
            .k = keys<const std::uint16_t>(k),
            .v = keys<const std::uint16_t>(v),
            .out = queries<const std::uint16_t>(out),
            .dout = queries<const std::uint16_t>(dout),
            .lse = lse,
            .state = state(),
            .dq = queries(dq),
            .dk = keys(dk),
            .dv = keys(dv)};
  }
  mxattn_call call(cudaStream_t stream) const {
    mxattn_call c{};
    c.cu_seqlens_q = lengths(cu_seqlens_q);
    c.cu_seqlens_k = lengths(cu_seqlens_k);
    c.state = buffers_.data();
    c.num_state = static_cast<std::int32_t>(buffers_.size());
    c.workspace = workspace;
    c.workspace_bytes = workspace_bytes_;
    c.stream = stream;
    c.plan = plan_;
    return c;
  }
  mxattn_tensor tensor(std::uint16_t* data, std::int64_t tokens, int heads) const {
    const std::int64_t row = spec_.dim + options_.pad;
    return {data, MXATTN_BF16, 3, {tokens, heads, spec_.dim}, {heads * row, row, 1}};
  }
  mxattn_tensor lse_tensor() const {
    return {lse, MXATTN_F32, 2, {spec_.heads_q, device_.total_q}, {device_.total_q, 1}};
  }

  std::int32_t *cu_seqlens_q = nullptr, *cu_seqlens_k = nullptr;
  std::uint16_t *q = nullptr, *k = nullptr, *v = nullptr, *dout = nullptr;
  std::uint16_t *out = nullptr, *dq = nullptr, *dk = nullptr, *dv = nullptr;
  float* lse = nullptr;
  void* workspace = nullptr;

 private:
  template <class T>
  TensorView<T> view(T* data, std::int64_t tokens, int heads) const {
    const std::int64_t row = spec_.dim + options_.pad;
    return {data, tokens, heads, spec_.dim, heads * row, row};
  }
  template <class T>
  TensorView<T> queries(T* data) const {
    return view(data, device_.total_q, spec_.heads_q);
  }
  template <class T>
  TensorView<T> keys(T* data) const {
    return view(data, device_.total_k, spec_.heads_k);
  }
  State state() const {
    const auto operand = [&](const std::string& name, int heads, std::int64_t slots) {
      const auto norms = state_.find(name + "_norms");
      return Operand{
          .codes = static_cast<std::uint8_t*>(state_.at(name + "_codes")),
          .exponents = static_cast<std::int8_t*>(state_.at(name + "_exponents")),
          .norms = norms == state_.end() ? nullptr : static_cast<std::int8_t*>(norms->second),
          .scale = nullptr,
          .slots = slots,
          .heads = heads,
          .dim = spec_.dim};
    };
    return {.q = operand("q", spec_.heads_q, device_.q_slots()),
            .k = operand("k", spec_.heads_k, device_.k_slots()),
            .v = operand("v", spec_.heads_k, device_.k_slots()),
            .row_reference = static_cast<std::int32_t*>(state_.at("row_reference")),
            .row_sum = static_cast<float*>(state_.at("row_sum"))};
  }
  static void poison(void* data, std::size_t bytes, cudaStream_t stream) {
    if (leaves_memory_unset()) return;
    MXATTN_EXPECT_CUDA(cudaMemsetAsync(data, 0xFF, bytes, stream));
  }
  static void expect(mxattn_status status) { EXPECT_EQ(status, MXATTN_OK) << mxattn_last_error(); }
  static void copy(const void* from, void* to, std::size_t bytes) {
    MXATTN_EXPECT_CUDA(cudaMemcpy(to, from, bytes, cudaMemcpyDefault));
  }
  template <class T>
  static std::vector<T> host(const T* device, std::size_t count) {
    std::vector<T> x(count);
    copy(device, x.data(), count * sizeof(T));
    return x;
  }

  std::size_t dim() const { return static_cast<std::size_t>(spec_.dim); }

  void lay_out(kernels::sm90::Carver& carver) {
    const std::int64_t row = spec_.dim + options_.pad;
    const std::int64_t q_size = device_.total_q * spec_.heads_q * row;
    const std::int64_t k_size = device_.total_k * spec_.heads_k * row;
    cu_seqlens_q = carver.take<std::int32_t>(device_.num_documents + 1);
    cu_seqlens_k = carver.take<std::int32_t>(device_.num_documents + 1);
    // With an odd pad also the first row is not aligned.
    const auto rows = [&](std::int64_t size) {
      std::uint16_t* x = carver.take<std::uint16_t>(size + 1);
      return options_.pad % 8 == 0 or x == nullptr ? x : x + 1;
    };
    q = rows(q_size);
    k = rows(k_size);
    v = rows(k_size);
    dout = rows(q_size);
    if (options_.planned) {
      std::uint64_t bytes = 0;
      expect(mxattn_plan_bytes(problem_, &bytes));
      plan_bytes_ = bytes;
      plan_memory_ = carver.take<std::uint8_t>(static_cast<std::int64_t>(bytes));
    }
    const std::int64_t begin = carver.bytes();
    written_begin_ = carver.take<std::uint8_t>(1);
    out = rows(q_size);
    dq = rows(q_size);
    dk = rows(k_size);
    dv = rows(k_size);
    lse = carver.take<float>(device_.total_q * spec_.heads_q);
    buffers_.clear();
    std::int32_t count = 0;
    expect(mxattn_state_count(problem_, &count));
    for (std::int32_t i = 0; i < count; ++i) {
      mxattn_buffer_info info{};
      info.size = sizeof info;
      expect(mxattn_state_at(problem_, i, &info));
      void* data = carver.take<std::uint8_t>(static_cast<std::int64_t>(info.bytes));
      buffers_.push_back({data, info.bytes});
      state_[info.name] = data;
    }
    expect(mxattn_workspace_bytes(problem_, &workspace_bytes_));
    workspace = carver.take<std::uint8_t>(static_cast<std::int64_t>(workspace_bytes_));
    written_bytes_ = static_cast<std::size_t>(carver.bytes() - begin);
  }

  void make_plan(cudaStream_t stream) {
    mxattn_device_plan_args args;
    mxattn_device_plan_args_init(&args);
    const mxattn_call c = call(stream);
    args.cu_seqlens_q = c.cu_seqlens_q;
    args.cu_seqlens_k = c.cu_seqlens_k;
    args.memory = plan_memory_;
    args.memory_bytes = plan_bytes_;
    args.workspace = workspace;
    args.workspace_bytes = workspace_bytes_;
    args.stream = stream;
    expect(mxattn_plan_create_on_device(problem_, &args, &plan_));
  }

  mxattn_tensor lengths(std::int32_t* data) const {
    return {data, MXATTN_I32, 1, {std::int64_t{device_.num_documents} + 1}, {1}};
  }

  void upload(const Bf16Vector& x, std::uint16_t* to) const {
    const std::size_t row = dim() + static_cast<std::size_t>(options_.pad);
    const std::size_t rows = x.size() / dim();
    std::vector<std::uint16_t> padded(rows * row, 0xFFFF);
    for (std::size_t r = 0; r < rows; ++r) {
      std::memcpy(padded.data() + r * row, x.data() + r * dim(), 2 * dim());
    }
    copy(padded.data(), to, padded.size() * 2);
  }
  Bf16Vector download(const std::uint16_t* from, std::int64_t tokens, int heads) const {
    const std::size_t row = dim() + static_cast<std::size_t>(options_.pad);
    const auto rows = static_cast<std::size_t>(tokens * heads);
    const std::vector<std::uint16_t> padded = host(from, rows * row);
    Bf16Vector x(rows * dim());
    for (std::size_t r = 0; r < rows; ++r) {
      std::memcpy(x.data() + r * dim(), padded.data() + r * row, 2 * dim());
      for (std::size_t e = dim(); e < row; ++e) {
        if (padded[r * row + e] != 0xFFFF) ADD_FAILURE() << "written behind row " << r;
      }
    }
    return x;
  }

  CaseSpec spec_;
  DeviceOptions options_;
  kernels::DeviceProblem device_;
  mxattn_problem* problem_ = nullptr;
  mxattn_plan* plan_ = nullptr;
  void* block_ = nullptr;
  std::int64_t bytes_ = 0;
  std::vector<mxattn_buffer> buffers_;
  std::map<std::string, void*> state_;
  std::uint64_t workspace_bytes_ = 0, plan_bytes_ = 0;
  void *plan_memory_ = nullptr, *written_begin_ = nullptr;
  std::size_t written_bytes_ = 0;
};

}  // namespace mxattn::test
