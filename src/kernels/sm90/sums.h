// The FP32 sums to which the backward passes add their accumulators.
#pragma once

#include "base/numeric.h"
#include "kernels/sm90/backward.h"
#include "kernels/sm90/device_ops.h"
#include "ptx/copy.h"
#include "recipe/stages.h"

namespace mxattn::kernels::sm90 {

/// What Sums::finish() leaves to do of some values of a row.
template <int kCount>
__device__ __forceinline__ void settle(float (&x)[kCount], float rest, float scale) {
#pragma unroll
  for (float& value : x) value = stages::promote<DeviceOps>(rest, value, scale);
}

/// FP32 sums of one accumulator of a warpgroup. Each thread keeps those of its own registers, and
/// nobody waits for anybody: register piece p (four registers) of lane l of warp w at [w][p][l].
template <int kRegisters, SumPlace kPlace>
struct Sums {
  static constexpr int kPieces = kRegisters / 4;
  float4* sums;  // of the warp's lane 0

  /// sum += 2^e partial, or sum = 2^e partial the first time. scale: of both row halves.
  __device__ __forceinline__ void promote(const float (&partial)[kRegisters],
                                          const float (&scale)[2], bool started) const {
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      const float* const x = partial + 4 * p;
      if constexpr (kPlace == SumPlace::kGlobal) {
        if (started) {
          // The first half of stages::promote; L2 does the other.
          ptx::reduce_add_f32x4(&at(p), {mul_rn(x[0], scale[0]), mul_rn(x[1], scale[0]),
                                         mul_rn(x[2], scale[1]), mul_rn(x[3], scale[1])});
          continue;
        }
      }
      at(p) = added(started ? at(p) : float4{0, 0, 0, 0}, x, scale);
    }
  }

  /// The end of an item, where settle(partial, rest, scale) is left to do: if there is a
  /// sum, partial becomes sum + 2^e partial, scale 1 and the rest, which is returned, -0, to which
  /// any number may be added; else the rest is 0. Then the warp's memory is free.
  [[nodiscard]] __device__ __forceinline__ float finish(float (&partial)[kRegisters],
                                                        float (&scale)[2], bool started) const {
    if (started) {
      float4 held[kPieces];  // all loads first
#pragma unroll
      for (int p = 0; p < kPieces; ++p) {
        // NOTE: past L1, which does not see what L2 adds.
        held[p] = kPlace == SumPlace::kGlobal ? __ldcg(&at(p)) : at(p);
      }
#pragma unroll
      for (int p = 0; p < kPieces; ++p) {
        const float4 s = added(held[p], partial + 4 * p, scale);
        partial[4 * p] = s.x;
        partial[4 * p + 1] = s.y;
        partial[4 * p + 2] = s.z;
        partial[4 * p + 3] = s.w;
      }
      scale[0] = scale[1] = 1.0f;
    }
    if constexpr (kPlace == SumPlace::kShared) __syncwarp();
    return started ? -0.0f : 0.0f;
  }

 private:
  __device__ __forceinline__ float4& at(int piece) const {
    return sums[piece * 32 + threadIdx.x % 32];
  }
  __device__ __forceinline__ static float4 added(const float4& sum, const float* x,
                                                 const float (&scale)[2]) {
    return {stages::promote<DeviceOps>(sum.x, x[0], scale[0]),
            stages::promote<DeviceOps>(sum.y, x[1], scale[0]),
            stages::promote<DeviceOps>(sum.z, x[2], scale[1]),
            stages::promote<DeviceOps>(sum.w, x[3], scale[1])};
  }
};

}  // namespace mxattn::kernels::sm90
