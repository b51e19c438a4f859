// A small problem with all its buffers, for the tests of this room.
#pragma once

#include <cstdint>
#include <cstring>
#include <mxattn/mxattn.hpp>
#include <random>
#include <string>
#include <vector>

namespace mxattn::test {

/// Nearest-even BF16 bits.
inline std::uint16_t to_bf16(float value) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<std::uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

inline float from_bf16(std::uint16_t bits) {
  const std::uint32_t wide = std::uint32_t{bits} << 16;
  float value = 0;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

inline std::vector<std::uint16_t> normal_bf16(std::size_t count, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<std::uint16_t> values(count);
  for (auto& value : values) value = to_bf16(normal(generator));
  return values;
}

/// Outputs and state start as kUntouched bytes.
inline constexpr unsigned char kUntouched = 0xA5;

/// Three documents (one of them empty) in 40 query and 50 key rows, 4 heads on 2, 32 channels; the
/// rows from 37 and 45 on lie behind the last document. The arguments of the calls are C structs,
/// so that a test can spoil any field.
class Case {
 public:
  static constexpr std::int64_t kTotalQ = 40, kTotalK = 50;
  static constexpr int kHeadsQ = 4, kHeadsK = 2, kDim = 32;

  static Config default_config(const std::string& recipe = "fp8") {
    Config config;
    config.recipe = recipe;
    config.backend = "cpu_exact";
    config.total_q = kTotalQ;
    config.total_k = kTotalK;
    config.num_documents = 3;
    config.heads_q = kHeadsQ;
    config.heads_k = kHeadsK;
    config.head_dim = kDim;
    config.causal = true;
    return config;
  }

  explicit Case(const Config& config = default_config())
      : problem(config),
        state_memory(problem),
        state(state_memory.buffers().begin(), state_memory.buffers().end()) {
    for (auto* x : {&q, &dout}) *x = normal_bf16(kTotalQ * kHeadsQ * kDim, ++seed_);
    for (auto* x : {&k, &v}) *x = normal_bf16(kTotalK * kHeadsK * kDim, ++seed_);
    for (auto* x : {&out, &dq}) x->assign(q.size(), 0);
    for (auto* x : {&dk, &dv}) x->assign(k.size(), 0);
    lse.assign(kTotalQ * kHeadsQ, 0);
    restored.assign(k.size(), 0);
    wipe();

    mxattn_call call{};
    call.cu_seqlens_q = lengths(cu_q);
    call.cu_seqlens_k = lengths(cu_k);
    call.state = state.data();
    call.num_state = static_cast<std::int32_t>(state.size());

    mxattn_forward_args_init(&forward);
    forward.call = call;
    forward.q = queries(q);
    forward.k = keys(k);
    forward.v = keys(v);
    forward.out = queries(out);
    forward.lse = lse_tensor(lse.data(), kHeadsQ, kTotalQ);

    mxattn_backward_args_init(&backward);
    backward.call = call;
    backward.q = forward.q;
    backward.k = forward.k;
    backward.v = forward.v;
    backward.out = forward.out;
    backward.lse = forward.lse;
    backward.dout = queries(dout);
    backward.dq = queries(dq);
    backward.dk = keys(dk);
    backward.dv = keys(dv);

    mxattn_quantize_args_init(&quantize);
    quantize.call = call;
    quantize.operand = MXATTN_V;
    quantize.tensor = forward.v;

    dequantize = quantize;
    dequantize.tensor = rows(restored.data(), MXATTN_F32, kTotalK, kHeadsK, kDim);
  }

  static Tensor queries(const std::vector<std::uint16_t>& x) {
    return bf16_rows(x, kTotalQ, kHeadsQ, kDim);
  }
  static Tensor keys(const std::vector<std::uint16_t>& x) {
    return bf16_rows(x, kTotalK, kHeadsK, kDim);
  }

  /// Every byte that a call may write.
  std::vector<unsigned char> written() const {
    std::vector<unsigned char> bytes;
    const auto append = [&bytes](const void* data, std::size_t size) {
      const auto* begin = static_cast<const unsigned char*>(data);
      bytes.insert(bytes.end(), begin, begin + size);
    };
    for (const auto* x : {&out, &dq, &dk, &dv})
      append(x->data(), x->size() * sizeof(std::uint16_t));
    append(lse.data(), lse.size() * sizeof(float));
    append(restored.data(), restored.size() * sizeof(float));
    for (const mxattn_buffer& buffer : state_memory.buffers()) append(buffer.data, buffer.bytes);
    return bytes;
  }

  void wipe() {
    for (auto* x : {&out, &dq, &dk, &dv}) {
      std::memset(x->data(), kUntouched, x->size() * sizeof(std::uint16_t));
    }
    std::memset(lse.data(), kUntouched, lse.size() * sizeof(float));
    std::memset(restored.data(), kUntouched, restored.size() * sizeof(float));
    for (const mxattn_buffer& buffer : state_memory.buffers()) {
      std::memset(buffer.data, kUntouched, buffer.bytes);
    }
  }

  void run() const {
    detail::check(mxattn_forward(problem.handle(), &forward));
    detail::check(mxattn_backward(problem.handle(), &backward));
  }

  Problem problem;
  StateBuffers state_memory;
  std::vector<mxattn_buffer> state;  // what the calls are given
  std::vector<std::int32_t> cu_q = {0, 20, 20, 37};
  std::vector<std::int32_t> cu_k = {0, 25, 25, 45};
  std::vector<std::uint16_t> q, k, v, dout, out, dq, dk, dv;
  std::vector<float> lse, restored;
  mxattn_forward_args forward;
  mxattn_backward_args backward;
  mxattn_quantize_args quantize, dequantize;

 private:
  unsigned seed_ = 0;
};

}  // namespace mxattn::test
