// Where a warpgroup's accumulator lies, and reductions over its rows.
//
// Register i of thread t of a 64 x N accumulator holds row 16 (t/32) + (t%32)/4 + 8 ((i>>1)&1) and
// column 8 (i>>2) + 2 (t%4) + (i&1). A thread therefore owns two rows, eight apart ("half" 0 and
// 1), and the four threads of a quad share them.
#pragma once

#include <cstdint>

#include "base/portability.h"
#if defined(__CUDACC__)
#include "ptx/math.h"
#endif

namespace mxattn::tile {

MXATTN_HOST_DEVICE constexpr int fragment_row(int thread, int half) {
  return 16 * (thread / 32) + (thread % 32) / 4 + 8 * half;
}
MXATTN_HOST_DEVICE constexpr int fragment_column(int thread, int i) {
  return 8 * (i >> 2) + 2 * (thread % 4) + (i & 1);
}
MXATTN_HOST_DEVICE constexpr int fragment_half(int i) { return (i >> 1) & 1; }

#if defined(__CUDACC__)
/// Packs 16 consecutive registers of an accumulator, 32 columns, into an 8-bit A operand that
/// contracts over those columns in the order pi (tile/swizzle.h). No data moves between threads.
__device__ __forceinline__ void pack_operand(std::uint32_t (&codes)[4], const float* x) {
  codes[0] = ptx::to_e4m3x4(x[0], x[1], x[4], x[5]);
  codes[1] = ptx::to_e4m3x4(x[2], x[3], x[6], x[7]);
  codes[2] = ptx::to_e4m3x4(x[8], x[9], x[12], x[13]);
  codes[3] = ptx::to_e4m3x4(x[10], x[11], x[14], x[15]);
}

/// Maximum over the quad that shares a row; NaN is ignored.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 2));
}
#endif

}  // namespace mxattn::tile
