#include "attention.h"

#include <bit>
#include <chrono>
#include <cmath>

namespace cli {

float bf16_to_float(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

std::uint16_t float_to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  return static_cast<std::uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

mxattn::Config Attention::config(const Capture& capture, const Layer& layer,
                                 const std::string& recipe, const std::string& backend,
                                 int threads) {
  mxattn::Config config;
  config.recipe = recipe;
  config.backend = backend;
  config.total_q = config.total_k = capture.tokens;
  config.num_documents = capture.documents();
  config.heads_q = layer.heads_q;
  config.heads_k = layer.heads_k;
  config.head_dim = layer.dim;
  config.causal = true;
  config.threads = threads;
  return config;
}

Attention::Attention(const Capture& capture, const Layer& layer, const std::string& recipe,
                     const std::string& backend, int threads)
    : capture_(capture),
      problem_(config(capture, layer, recipe, backend, threads)),
      state_(problem_) {
  outputs_.out.resize(layer.q.size());
  outputs_.dq.resize(layer.q.size());
  outputs_.dk.resize(layer.k.size());
  outputs_.dv.resize(layer.v.size());
  outputs_.lse.resize(static_cast<std::size_t>(capture.tokens * layer.heads_q));
}

double Attention::run(const Layer& layer) {
  const std::int64_t n = capture_.tokens;
  const auto queries = [&](const std::vector<std::uint16_t>& x) {
    return mxattn::bf16_rows(x, n, layer.heads_q, layer.dim);
  };
  const auto keys = [&](const std::vector<std::uint16_t>& x) {
    return mxattn::bf16_rows(x, n, layer.heads_k, layer.dim);
  };
  const mxattn::Call call{.cu_seqlens_q = mxattn::lengths(capture_.cu_seqlens),
                          .state = state_.buffers()};
  const mxattn::Tensor lse = mxattn::lse_tensor(outputs_.lse.data(), layer.heads_q, n);

  const auto start = std::chrono::steady_clock::now();
  problem_.forward({.call = call,
                    .q = queries(layer.q),
                    .k = keys(layer.k),
                    .v = keys(layer.v),
                    .out = queries(outputs_.out),
                    .lse = lse});
  problem_.backward({.call = call,
                     .q = queries(layer.q),
                     .k = keys(layer.k),
                     .v = keys(layer.v),
                     .out = queries(outputs_.out),
                     .lse = lse,
                     .dout = queries(layer.dout),
                     .dq = queries(outputs_.dq),
                     .dk = keys(outputs_.dk),
                     .dv = keys(outputs_.dv)});
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

Accuracy accuracy(const Layer& shape, const Outputs& result, const Outputs& exact, int head) {
  Accuracy accuracy;
  const int key_head = head / (shape.heads_q / shape.heads_k);
  const auto compare = [&](std::size_t which, const std::vector<std::uint16_t>& x,
                           const std::vector<std::uint16_t>& y, int heads, int h) {
    double xx = 0, yy = 0, xy = 0, difference = 0;
    const auto row = static_cast<std::size_t>(heads) * static_cast<std::size_t>(shape.dim);
    for (std::size_t i = static_cast<std::size_t>(h) * static_cast<std::size_t>(shape.dim);
         i < x.size(); i += row) {
      for (std::size_t c = i; c < i + static_cast<std::size_t>(shape.dim); ++c) {
        const double a = bf16_to_float(x[c]), b = bf16_to_float(y[c]);
        xx += a * a;
        yy += b * b;
        xy += a * b;
        difference += (a - b) * (a - b);
      }
    }
    accuracy.cosine[which] = xy / std::sqrt(xx * yy);
    accuracy.error[which] = std::sqrt(difference / yy);
  };
  compare(0, result.out, exact.out, shape.heads_q, head);
  compare(1, result.dq, exact.dq, shape.heads_q, head);
  compare(2, result.dk, exact.dk, shape.heads_k, key_head);
  compare(3, result.dv, exact.dv, shape.heads_k, key_head);
  return accuracy;
}

}  // namespace cli
