// The model of the H200's FP8 accumulator as a C function, for the Python tests alone. No symbol of
// this is in the product library.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels/cpu/sm90_mma.h"
#include "kernels/cpu/tile_pack.h"

using namespace mxattn::kernels::cpu;

/// c (m, n) = a (m, k) b^T, b (n, k), E4M3 codes, all row-major; accumulate: starting from c.
/// n is a multiple of 16, k of 32.
extern "C" __attribute__((visibility("default"))) void mxattn_hook_sm90_mma(const std::uint8_t* a,
                                                                            const std::uint8_t* b,
                                                                            float* c, int m, int n,
                                                                            int k, int accumulate) {
  constexpr int kBlock = 128;
  std::vector<std::uint16_t> rows(kBlock * kBlock), pairs(kBlock * kBlock);
  for (int i = 0; i < m; i += kBlock) {
    for (int j = 0; j < n; j += kBlock) {
      for (int step = 0; step < k; step += kBlock) {
        const int height = std::min(kBlock, m - i), width = std::min(kBlock, n - j);
        const int depth = std::min(kBlock, k - step);
        const std::ptrdiff_t stride = k;
        pack_rows(RowSource::e4m3(a + i * stride + step, stride, height, depth), kBlock, depth,
                  rows.data(), depth);
        pack_column_pairs(RowSource::e4m3(b + j * stride + step, stride, width, depth), width,
                          depth, pairs.data());
        sm90_tile_gemm().run({height, width, depth, rows.data(), depth, pairs.data(), width,
                              c + static_cast<std::ptrdiff_t>(i) * n + j, n,
                              accumulate != 0 or step > 0});
      }
    }
  }
}
