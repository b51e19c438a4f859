// What the kernels do with a finished accumulator of 64 rows: rotate it back and write it as BF16.
#pragma once

#include <cstdint>

#include "base/numeric.h"
#include "base/view.h"
#include "kernels/sm90/device_ops.h"
#include "ptx/barrier.h"
#include "ptx/copy.h"
#include "ptx/math.h"
#include "ptx/wgmma.h"
#include "recipe/stages.h"
#include "tile/fragment.h"

namespace mxattn::kernels::sm90 {

/// 1 / sqrt(columns), rounded to FP32.
template <int kColumns>
inline constexpr float kRotationNorm = 0;
template <>
inline constexpr float kRotationNorm<64> = 0.125f;
template <>
inline constexpr float kRotationNorm<128> = 0.08838834764831845f;

/// x H without its norm: Walsh-Hadamard butterflies over the columns of each row, twice as many as
/// registers, strides 1, 2, 4, ..., the order of the quantiser. Columns 0, 1 of an 8-column block
/// lie in a thread, bits 1 and 2 of the column are the lane of the quad, the rest is the register.
template <int kRegisters>
__device__ __forceinline__ void rotate_rows(float (&x)[kRegisters]) {
#pragma unroll
  for (int i = 0; i < kRegisters; i += 2) {
    const float low = x[i], high = x[i + 1];
    x[i] = add_rn(low, high);
    x[i + 1] = add_rn(low, -high);
  }
#pragma unroll
  for (int lane_bit = 1; lane_bit <= 2; lane_bit *= 2) {
    const float sign = (threadIdx.x & lane_bit) != 0 ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < kRegisters; ++i) {
      const float other = __shfl_xor_sync(0xFFFFFFFFu, x[i], lane_bit);
      x[i] = fma_rn(x[i], sign, other);  // the product is exact
    }
  }
#pragma unroll
  for (int stride = 4; stride < kRegisters; stride *= 2) {
#pragma unroll
    for (int i = 0; i < kRegisters; ++i) {
      if ((i & stride) == 0) {
        const float low = x[i], high = x[i + stride];
        x[i] = add_rn(low, high);
        x[i + stride] = add_rn(low, -high);
      }
    }
  }
}

/// The end of dQ and dK: times softmax_scale, rotated back.
template <int kRegisters>
__device__ __forceinline__ void finish_rotated(float (&x)[kRegisters], float softmax_scale,
                                               bool rotate) {
  constexpr float kNorm = kRotationNorm<2 * kRegisters>;
  static_assert(kNorm != 0);
#pragma unroll
  for (int i = 0; i < kRegisters; ++i) x[i] = mul_rn(x[i], softmax_scale);
  if (not rotate) return;
  rotate_rows(x);
#pragma unroll
  for (int i = 0; i < kRegisters; ++i) x[i] = mul_rn(x[i], kNorm);
}

/// Writes the rows of a warp's accumulator: rows [first, first + 16) of the tokens from `token`,
/// those below `end` only. `staging` is 16 x kDim elements of shared memory of this warp; 16 lanes
/// write a row in 16-byte pieces where the tensor allows it.
template <int kDim>
__device__ __forceinline__ void store_warp_rows(const float (&x)[kDim / 2], std::uint16_t* staging,
                                                const TensorView<std::uint16_t>& out, int head,
                                                std::int64_t token, int first, int end) {
  constexpr int kRowBytes = 2 * kDim;
  constexpr int kPieces = kRowBytes / 16;
  const int lane = threadIdx.x % 32;
  const std::uint32_t base = ptx::shared_address(staging);
  const auto offset_of = [](int row, int piece) {
    return static_cast<std::uint32_t>(row * kRowBytes + ((piece ^ (row & 7)) << 4));
  };
#pragma unroll
  for (int b = 0; b < kDim / 8; b += 2) {
    const int row = lane % 8 + 8 * ((lane / 8) & 1);
    ptx::store_matrix_x4(
        base + offset_of(row, b + lane / 16), ptx::to_bf16x2(x[4 * b], x[4 * b + 1]),
        ptx::to_bf16x2(x[4 * b + 2], x[4 * b + 3]), ptx::to_bf16x2(x[4 * b + 4], x[4 * b + 5]),
        ptx::to_bf16x2(x[4 * b + 6], x[4 * b + 7]));
  }
  __syncwarp();
  const bool aligned = reinterpret_cast<std::uintptr_t>(out.data) % 16 == 0 and
                       out.token_stride % 8 == 0 and out.head_stride % 8 == 0;
  // A lane has one piece of every kRowsAtOnce-th row.
  constexpr int kRowsAtOnce = 32 / kPieces;
  const int piece = lane % kPieces;
  const int first_row = lane / kPieces;
  const int rows = end - first - first_row;  // of the lane's own and those behind it
  const std::int64_t step = kRowsAtOnce * out.token_stride;
  std::uint16_t* to = out.row(token + first + first_row, head) + 8 * piece;
  const auto piece_of = [&](int row) {
    return reinterpret_cast<const char*>(staging) + offset_of(first_row + row, piece);
  };
  if (aligned) {
#pragma unroll
    for (int row = 0; row < 16; row += kRowsAtOnce, to += step) {
      // The load is not under the condition, so that no load waits for the store before it.
      const uint4 whole = *reinterpret_cast<const uint4*>(piece_of(row));
      if (row < rows) *reinterpret_cast<uint4*>(to) = whole;
    }
  } else {
#pragma unroll 1
    for (int row = 0; row < min(rows, 16); row += kRowsAtOnce, to += step) {
      const auto* const from = reinterpret_cast<const std::uint16_t*>(piece_of(row));
      for (int e = 0; e < 8; ++e) to[e] = from[e];
    }
  }
  __syncwarp();
}

/// FP32 sums of one accumulator of a warpgroup, in global memory that stays in L2: register piece p
/// (four registers) of thread t at [p][t]. Only this warpgroup touches them, and its promotions
/// wait for one another, so the sums are the same on every run.
template <int kRegisters>
struct Sums {
  static constexpr int kPieces = kRegisters / 4;
  static constexpr std::uint32_t kBytes = kPieces * 128 * sizeof(float4);
  float4* global;   // of thread 0
  float4* staging;  // shared, kBytes, of the warpgroup
  int barrier;      // a named barrier of the warpgroup

  /// sum += 2^e partial, or sum = 2^e partial the first time. scale: of both row halves.
  __device__ __forceinline__ void promote(const float (&partial)[kRegisters],
                                          const float (&scale)[2], bool started) const {
    const int thread = threadIdx.x % 128;
    if (thread == 0) ptx::bulk_wait_group<0>();
    ptx::named_barrier_sync(barrier, 128);
#pragma unroll
    for (int i = 0; i < kRegisters; i += 4) {
      // The first half of stages::promote; the copy engine adds, to 0 too: that has a sign.
      const auto part = [&](int n) {
        const float x = mul_rn(partial[i + n], scale[n / 2]);
        return started ? x : DeviceOps::add(0.0f, x);
      };
      staging[(i / 4) * 128 + thread] = {part(0), part(1), part(2), part(3)};
    }
    ptx::fence_proxy_async_shared();
    ptx::named_barrier_sync(barrier, 128);
    if (thread == 0) {
      const std::uint32_t from = ptx::shared_address(staging);
      if (started) {
        ptx::add_bulk_f32(global, from, kBytes);
      } else {
        ptx::store_bulk(global, from, kBytes);
      }
      ptx::bulk_commit_group();
    }
  }

  /// Makes earlier promotions readable by the whole warpgroup, and the staging memory free. Where
  /// there were none (`started` is false, for all of the warpgroup's sums) both are so already.
  __device__ __forceinline__ void settle(bool started) const {
    if (not started) return;
    if (threadIdx.x % 128 == 0) ptx::bulk_wait_group<0>();
    ptx::fence_proxy_async_all();
    ptx::named_barrier_sync(barrier, 128);
  }

  /// partial = (sum or 0) + 2^e partial: the end of an item, after settle().
  __device__ __forceinline__ void finish(float (&partial)[kRegisters], const float (&scale)[2],
                                         bool started) const {
    // Opaque: the address would be formed again for every load.
    const float4* const sums = global + ptx::opaque(threadIdx.x % 128);
#pragma unroll
    for (int i = 0; i < kRegisters; i += 4) {
      // NOTE: past L1, which does not see what the copy engine wrote.
      const float4 s = started ? __ldcg(sums + (i / 4) * 128) : float4{0, 0, 0, 0};
      partial[i] = stages::promote<DeviceOps>(s.x, partial[i], scale[0]);
      partial[i + 1] = stages::promote<DeviceOps>(s.y, partial[i + 1], scale[0]);
      partial[i + 2] = stages::promote<DeviceOps>(s.z, partial[i + 2], scale[1]);
      partial[i + 3] = stages::promote<DeviceOps>(s.w, partial[i + 3], scale[1]);
    }
  }
};

/// The same sums where each thread reads, adds and writes its own: register piece p of lane l of
/// warp w at [w][p][l], in shared or global memory. Nobody waits for anybody.
template <int kRegisters>
struct OwnSums {
  static constexpr int kPieces = kRegisters / 4;
  float4* sums;  // of the warp's lane 0

  /// sum += 2^e partial, or sum = 2^e partial the first time.
  __device__ __forceinline__ void promote(const float (&partial)[kRegisters],
                                          const float (&scale)[2], bool started) const {
#pragma unroll
    for (int p = 0; p < kPieces; ++p) at(p) = added(partial, p, scale, started);
  }

  __device__ __forceinline__ void settle(bool) const {}

  /// partial = (sum or 0) + 2^e partial. Then the warp's memory is free.
  __device__ __forceinline__ void finish(float (&partial)[kRegisters], const float (&scale)[2],
                                         bool started) const {
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      const float4 s = added(partial, p, scale, started);
      partial[4 * p] = s.x;
      partial[4 * p + 1] = s.y;
      partial[4 * p + 2] = s.z;
      partial[4 * p + 3] = s.w;
    }
    __syncwarp();
  }

 private:
  __device__ __forceinline__ float4& at(int piece) const {
    return sums[piece * 32 + threadIdx.x % 32];
  }
  __device__ __forceinline__ float4 added(const float (&partial)[kRegisters], int piece,
                                          const float (&scale)[2], bool started) const {
    const float* x = partial + 4 * piece;
    const float4 s = started ? at(piece) : float4{0, 0, 0, 0};
    return {stages::promote<DeviceOps>(s.x, x[0], scale[0]),
            stages::promote<DeviceOps>(s.y, x[1], scale[0]),
            stages::promote<DeviceOps>(s.z, x[2], scale[1]),
            stages::promote<DeviceOps>(s.w, x[3], scale[1])};
  }
};

}  // namespace mxattn::kernels::sm90
