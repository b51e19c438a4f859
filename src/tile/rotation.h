// Walsh-Hadamard rotation of rows that the lanes of a warp share. Strides ascend, 1, 2, 4, ...: the
// order in which the recipe adds.
#pragma once

#include "base/numeric.h"
#include "base/portability.h"

namespace mxattn::tile {

/// 1 / sqrt(kColumns), rounded once to FP32.
template <int kColumns>
MXATTN_HOST_DEVICE constexpr float rotation_norm() {
  static_assert(kColumns == 64 or kColumns == 128);
  return kColumns == 128 ? 0.08838834764831845f : 0.125f;
}

#if defined(__CUDACC__)
/// Between values `stride` apart in the lane.
template <int kCount>
__device__ __forceinline__ void butterflies_inside(float (&x)[kCount], int stride) {
#pragma unroll
  for (int c = 0; c < kCount; ++c) {
    if ((c & stride) != 0) continue;
    const float low = x[c], high = x[c + stride];
    x[c] = add_rn(low, high);
    x[c + stride] = add_rn(low, -high);
  }
}

/// Between the same values of lanes `lanes` apart.
template <int kCount>
__device__ __forceinline__ void butterflies_across(float (&x)[kCount], int lanes) {
  const float sign = (threadIdx.x & lanes) != 0 ? -1.0f : 1.0f;
#pragma unroll
  for (int c = 0; c < kCount; ++c) {
    // The product is exact: one rounding.
    x[c] = fma_rn(x[c], sign, __shfl_xor_sync(0xFFFFFFFFu, x[c], lanes));
  }
}
#endif

}  // namespace mxattn::tile
