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

}  // namespace mxattn::kernels::sm90
