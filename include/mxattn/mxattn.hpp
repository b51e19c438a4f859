// mxattn in C++20: mxattn.h with exceptions, owned handles and checked defaults. Header only, so
// that no C++ type crosses the border of the shared library.
//
//   mxattn::Config config;
//   config.total_q = config.total_k = tokens;
//   config.num_documents = documents;
//   config.heads_q = config.heads_k = heads;
//   config.head_dim = dim;
//   config.causal = true;
//   mxattn::Problem problem(config);
//   mxattn::StateBuffers state(problem);
//   problem.forward({.lengths = {mxattn::lengths(cu_seqlens)}, .state = state.buffers(), ...});
//   problem.backward({...});
#pragma once

#include <mxattn/mxattn.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace mxattn {
// An inline namespace: the library has types of these names inside, which are other types.
inline namespace public_api {

/// What every failed call throws: the status and a message that names argument, value, expectation.
class Error : public std::runtime_error {
 public:
  Error(mxattn_status status, const std::string& message)
      : std::runtime_error(message), status_(status) {}
  mxattn_status status() const { return status_; }

 private:
  mxattn_status status_;
};

namespace detail {
inline void check(mxattn_status status) {
  if (status != MXATTN_OK) throw Error(status, mxattn_last_error());
}
}  // namespace detail

// ---- tensors ---------------------------------------------------------------------------------

using Tensor = mxattn_tensor;

/// A (tokens, heads, dim) tensor of any strides; by default contiguous.
inline Tensor rows(void* data, int dtype, std::int64_t tokens, std::int64_t heads, std::int64_t dim,
                   std::int64_t token_stride = -1, std::int64_t head_stride = -1) {
  return {
      data,
      dtype,
      3,
      {tokens, heads, dim, 0},
      {token_stride < 0 ? heads * dim : token_stride, head_stride < 0 ? dim : head_stride, 1, 0}};
}

/// The same over a vector-like range of BF16 bits, contiguous.
inline Tensor bf16_rows(std::span<const std::uint16_t> data, std::int64_t tokens,
                        std::int64_t heads, std::int64_t dim) {
  if (static_cast<std::int64_t>(data.size()) < tokens * heads * dim) {
    throw Error(MXATTN_INVALID_ARGUMENT, "data.size() = " + std::to_string(data.size()) +
                                             ": expected " + std::to_string(tokens * heads * dim));
  }
  return rows(const_cast<std::uint16_t*>(data.data()), MXATTN_BF16, tokens, heads, dim);
}

/// LSE, (heads, total_q).
inline Tensor lse_tensor(float* data, std::int64_t heads, std::int64_t total_q) {
  return {data, MXATTN_F32, 2, {heads, total_q, 0, 0}, {total_q, 1, 0, 0}};
}

/// cu_seqlens of a pack.
inline Tensor lengths(std::span<const std::int32_t> cu_seqlens) {
  return {const_cast<std::int32_t*>(cu_seqlens.data()),
          MXATTN_I32,
          1,
          {static_cast<std::int64_t>(cu_seqlens.size()), 0, 0, 0},
          {1, 0, 0, 0}};
}

// ---- the problem -----------------------------------------------------------------------------

/// See mxattn_problem_config for the meaning of every field.
struct Config {
  std::string recipe = "fp8";
  std::string backend = "auto";
  int device_kind = MXATTN_DEVICE_CPU;
  int device_index = 0;
  std::int64_t total_q = 0;
  std::int64_t total_k = 0;
  int num_documents = 0;
  int heads_q = 0;
  int heads_k = 0;
  int head_dim = 0;
  bool causal = false;
  int window_left = -1;
  int window_right = -1;
  std::optional<float> softmax_scale;  // empty: 1 / sqrt(head_dim)
  std::optional<bool> rotate;          // empty: as the recipe says
  int threads = 0;

  /// The C struct; its strings point into this one.
  mxattn_problem_config c_config() const {
    mxattn_problem_config c;
    mxattn_problem_config_init(&c);
    c.recipe = recipe.c_str();
    c.backend = backend.c_str();
    c.device_kind = device_kind;
    c.device_index = device_index;
    c.total_q = total_q;
    c.total_k = total_k;
    c.num_documents = num_documents;
    c.heads_q = heads_q;
    c.heads_k = heads_k;
    c.head_dim = head_dim;
    c.causal = causal ? 1 : 0;
    c.window_left = window_left;
    c.window_right = window_right;
    c.has_softmax_scale = softmax_scale.has_value() ? 1 : 0;
    c.softmax_scale = softmax_scale.value_or(0.0f);
    c.rotate = rotate.has_value() ? (*rotate ? 1 : 0) : -1;
    c.threads = threads;
    return c;
  }
};

struct CanRun {
  bool yes = false;
  std::string reason;  // why not
  explicit operator bool() const { return yes; }
};

inline CanRun can_run(const Config& config) {
  const mxattn_problem_config c = config.c_config();
  std::int32_t yes = 0;
  const char* reason = "";
  detail::check(mxattn_can_run(&c, &yes, &reason));
  return {yes != 0, reason};
}

/// What every call takes.
struct Call {
  Tensor cu_seqlens_q{};
  Tensor cu_seqlens_k{};  // without data: that of the queries
  std::span<const mxattn_buffer> state;
  void* workspace = nullptr;
  std::uint64_t workspace_bytes = 0;
  void* stream = nullptr;
  const mxattn_plan* plan = nullptr;  // Plan::handle() of mxattn/plan.hpp

  mxattn_call c_call() const {
    return {cu_seqlens_q,
            cu_seqlens_k,
            state.data(),
            static_cast<std::int32_t>(state.size()),
            0,
            workspace,
            workspace_bytes,
            stream,
            plan};
  }
};

struct Forward {
  Call call;
  Tensor q{}, k{}, v{};
  Tensor out{}, lse{};
  int quantized = 0;  // operands that are in the state already: MXATTN_Q | ...
};

struct Backward {
  Call call;
  Tensor q{}, k{}, v{};  // may be without data if the recipe quantises
  Tensor out{}, lse{}, dout{};
  Tensor dq{}, dk{}, dv{};
};

class Problem {
 public:
  explicit Problem(const Config& config) {
    const mxattn_problem_config c = config.c_config();
    mxattn_problem* handle = nullptr;
    detail::check(mxattn_problem_create(&c, &handle));
    handle_.reset(handle);
  }

  std::string backend() const { return mxattn_problem_backend(handle_.get()); }
  std::string explain() const { return mxattn_problem_explain(handle_.get()); }

  std::vector<mxattn_buffer_info> state_layout() const {
    std::int32_t count = 0;
    detail::check(mxattn_state_count(handle_.get(), &count));
    std::vector<mxattn_buffer_info> layout(static_cast<std::size_t>(count));
    for (std::int32_t i = 0; i < count; ++i) {
      mxattn_buffer_info& info = layout[static_cast<std::size_t>(i)];
      info.size = sizeof info;
      detail::check(mxattn_state_at(handle_.get(), i, &info));
    }
    return layout;
  }

  std::uint64_t workspace_bytes() const {
    std::uint64_t bytes = 0;
    detail::check(mxattn_workspace_bytes(handle_.get(), &bytes));
    return bytes;
  }

  void forward(const Forward& f) const {
    const mxattn_forward_args args{sizeof args, f.call.c_call(), f.q,         f.k, f.v,
                                   f.out,       f.lse,           f.quantized, 0};
    detail::check(mxattn_forward(handle_.get(), &args));
  }

  void backward(const Backward& b) const {
    const mxattn_backward_args args{sizeof args, b.call.c_call(), b.q,  b.k,  b.v, b.out,
                                    b.lse,       b.dout,          b.dq, b.dk, b.dv};
    detail::check(mxattn_backward(handle_.get(), &args));
  }

  /// Quantises a BF16 tensor into the state as operand MXATTN_Q, MXATTN_K or MXATTN_V.
  void quantize(const Call& call, int operand, const Tensor& tensor) const {
    const mxattn_quantize_args args{sizeof args, call.c_call(), tensor, operand, 0};
    detail::check(mxattn_quantize(handle_.get(), &args));
  }

  /// Writes the restored values of an operand of the state into an F32 tensor.
  void dequantize(const Call& call, int operand, const Tensor& tensor,
                  bool rotate_back = false) const {
    const mxattn_quantize_args args{sizeof args, call.c_call(), tensor, operand, rotate_back};
    detail::check(mxattn_dequantize(handle_.get(), &args));
  }

  const mxattn_problem* handle() const { return handle_.get(); }

 private:
  struct Destroy {
    void operator()(mxattn_problem* problem) const { mxattn_problem_destroy(problem); }
  };
  std::unique_ptr<mxattn_problem, Destroy> handle_;
};

/// The state of a problem in CPU memory, for callers without an allocator of their own.
class StateBuffers {
 public:
  explicit StateBuffers(const Problem& problem) : layout_(problem.state_layout()) {
    // One block; every buffer at a multiple of kAlign, which any alignment asked for divides.
    std::size_t bytes = 0;
    for (const mxattn_buffer_info& info : layout_) bytes += padded(info.bytes);
    memory_.resize(bytes / sizeof(Line));
    auto* next = reinterpret_cast<std::byte*>(memory_.data());
    for (const mxattn_buffer_info& info : layout_) {
      buffers_.push_back({next, info.bytes});
      next += padded(info.bytes);
    }
  }

  // The buffers point into the memory: moving is fine, a copy would share it.
  StateBuffers(const StateBuffers&) = delete;
  StateBuffers& operator=(const StateBuffers&) = delete;
  StateBuffers(StateBuffers&&) = default;
  StateBuffers& operator=(StateBuffers&&) = default;

  std::span<const mxattn_buffer> buffers() const { return buffers_; }
  std::span<const mxattn_buffer_info> layout() const { return layout_; }

 private:
  static constexpr std::size_t kAlign = 64;
  struct alignas(kAlign) Line {
    std::byte bytes[kAlign];
  };
  static std::size_t padded(std::uint64_t bytes) {
    return (static_cast<std::size_t>(bytes) + kAlign - 1) / kAlign * kAlign;
  }

  std::vector<mxattn_buffer_info> layout_;
  std::vector<Line> memory_;
  std::vector<mxattn_buffer> buffers_;
};

// ---- what there is ---------------------------------------------------------------------------

inline std::string version() { return mxattn_version(); }

inline std::vector<mxattn_recipe_info> recipes() {
  std::vector<mxattn_recipe_info> list(static_cast<std::size_t>(mxattn_recipe_count()));
  for (std::size_t i = 0; i < list.size(); ++i) {
    list[i].size = sizeof list[i];
    detail::check(mxattn_recipe_at(static_cast<std::int32_t>(i), &list[i]));
  }
  return list;
}

inline std::vector<mxattn_backend_info> backends() {
  std::vector<mxattn_backend_info> list(static_cast<std::size_t>(mxattn_backend_count()));
  for (std::size_t i = 0; i < list.size(); ++i) {
    list[i].size = sizeof list[i];
    detail::check(mxattn_backend_at(static_cast<std::int32_t>(i), &list[i]));
  }
  return list;
}

}  // namespace public_api
}  // namespace mxattn
