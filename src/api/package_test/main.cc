// Attention of one token is its value: the installed header, library and package work together.
#include <cstdint>
#include <mxattn/mxattn.hpp>
#include <vector>

int main() {
  mxattn::Config config;
  config.total_q = config.total_k = config.num_documents = 1;
  config.heads_q = config.heads_k = 1;
  config.head_dim = 64;
  const mxattn::Problem problem(config);
  mxattn::StateBuffers state(problem);

  const std::vector<std::int32_t> cu_seqlens = {0, 1};
  const std::vector<std::uint16_t> ones(64, 0x3F80);  // 1 in BF16
  std::vector<std::uint16_t> out(64);
  float lse = 0;
  problem.forward({.call = {.cu_seqlens_q = mxattn::lengths(cu_seqlens), .state = state.buffers()},
                   .q = mxattn::bf16_rows(ones, 1, 1, 64),
                   .k = mxattn::bf16_rows(ones, 1, 1, 64),
                   .v = mxattn::bf16_rows(ones, 1, 1, 64),
                   .out = mxattn::bf16_rows(out, 1, 1, 64),
                   .lse = mxattn::lse_tensor(&lse, 1, 1)});
  return out == ones ? 0 : 1;
}
