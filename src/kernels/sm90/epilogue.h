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
#include "tile/rotation.h"

namespace mxattn::kernels::sm90 {

/// Sixteen rows of a finished accumulator in shared memory of their warp, on their way from
/// fragments to whole rows. Code that runs once an item waits for its instructions; rows are
/// therefore finished four at a time in a loop, and nothing here is unrolled over all registers but
/// the way into shared memory. Eight or sixteen at a time hide more latency and cost more than
/// that.
///
/// Eight lanes share a row: lane j has columns 8 j .. 8 j + 7, and at 128 columns those 64 further
/// on. Blocks of eight columns are permuted by exclusive or with the row, the halves of a block
/// with bit 2 of its number, so that neither way in nor way out collides in a bank.
template <int kDim>
class WarpRows {
 public:
  static constexpr int kFloat4s = 16 * kDim / 4;

  /// `memory`: kFloat4s, aligned to as many bytes.
  __device__ __forceinline__ explicit WarpRows(float4* memory)
      : floats_(reinterpret_cast<float*>(memory)) {}

  /// What the accumulator holds of them, when the rows before have been stored.
  __device__ __forceinline__ void put(const float (&x)[kDim / 2]) const {
    const int lane = opaque_lane();
    const int row = lane / 4, column = 2 * (lane % 4);
    __syncwarp();
#pragma unroll
    for (int block = 0; block < kDim / 8; ++block) {
      float* const to = floats_ + (row * kDim + column ^ (block ^ row % 4) * 8 ^ block / 4 % 2 * 4);
      *reinterpret_cast<float2*>(to) = {x[4 * block], x[4 * block + 1]};
      *reinterpret_cast<float2*>(to + 8 * kDim) = {x[4 * block + 2], x[4 * block + 3]};
    }
    __syncwarp();
  }

  /// Writes them as BF16: rows [first, first + 16) of the tokens from `token`, those below `end`
  /// only, each finished by body(values, row), which all lanes call together.
  template <class Body>
  __device__ __forceinline__ void store(const TensorView<std::uint16_t>& out, int head,
                                        std::int64_t token, int first, int end,
                                        const Body& body) const {
    const int lane = opaque_lane();
    const int row = lane / kLanes, block = lane % kLanes;
    const float* from = floats_ + (row * kDim + (block ^ row) * 8);
    const int half = block / 4 * 4;  // where the first half of a block lies
    const bool aligned = out.has_aligned_rows();
    std::uint16_t* to = out.row(token + first + row, head) + 8 * block;
    const int rows = end - first;
#pragma unroll 1
    for (int r = 0; r < 16; r += kRowsAtOnce) {
      Values x;
#pragma unroll
      for (int k = 0; k < kBlocks; ++k) {
#pragma unroll
        for (int n = 0; n < 8; n += 4) {
          const float4 part = *reinterpret_cast<const float4*>(from + (64 * k + (half ^ n)));
          x[8 * k + n] = part.x;
          x[8 * k + n + 1] = part.y;
          x[8 * k + n + 2] = part.z;
          x[8 * k + n + 3] = part.w;
        }
      }
      body(x, r + row);
      if (r + row < rows) {
#pragma unroll
        for (int k = 0; k < kBlocks; ++k) put_block(x + 8 * k, to + 64 * k, aligned);
      }
      from += kRowsAtOnce * kDim;
      to += kRowsAtOnce * out.token_stride;
    }
  }

  static constexpr int kBlocks = kDim / 64;  // of eight columns, of a lane
  using Values = float[8 * kBlocks];

  /// The end of dQ and dK: times softmax_scale, rotated back by Walsh-Hadamard butterflies of
  /// strides 1, 2, 4, ..., the order of the quantiser.
  __device__ __forceinline__ static void finish_rotated(Values& x, float softmax_scale,
                                                        bool rotate) {
#pragma unroll
    for (float& value : x) value = mul_rn(value, softmax_scale);
    if (not rotate) return;
#pragma unroll
    for (int stride = 1; stride < 8; stride *= 2) tile::butterflies_inside(x, stride);
#pragma unroll
    for (int lanes = 1; lanes < kLanes; lanes *= 2) tile::butterflies_across(x, lanes);
#pragma unroll
    for (int stride = 8; stride < 8 * kBlocks; stride *= 2) tile::butterflies_inside(x, stride);
#pragma unroll
    for (float& value : x) value = mul_rn(value, tile::rotation_norm<kDim>());
  }

 private:
  /// Opaque: addresses formed from it would be kept in registers over all of an item.
  __device__ __forceinline__ static int opaque_lane() {
    return static_cast<int>(ptx::opaque(threadIdx.x % 32));
  }

  static constexpr int kLanes = 8;  // of a row
  static constexpr int kRowsAtOnce = 32 / kLanes;

  __device__ __forceinline__ static void put_block(const float* x, std::uint16_t* to,
                                                   bool aligned) {
    const uint4 unit = {ptx::to_bf16x2(x[0], x[1]), ptx::to_bf16x2(x[2], x[3]),
                        ptx::to_bf16x2(x[4], x[5]), ptx::to_bf16x2(x[6], x[7])};
    if (aligned) {
      *reinterpret_cast<uint4*>(to) = unit;
    } else {
      const std::uint32_t pairs[4] = {unit.x, unit.y, unit.z, unit.w};
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        to[c] = static_cast<std::uint16_t>(pairs[c / 2] >> (16 * (c % 2)));
      }
    }
  }

  float* floats_;
};

/// Sixteen rows of a finished accumulator as BF16 in shared memory of their warp, on their way to
/// global memory. 16-byte pieces of a row are permuted by exclusive or with the row modulo 8, so
/// that neither way collides in a bank. Where a row, or a piece, is a sum of bits that a lane has
/// and of others, its address is the lane's with those bits flipped.
template <int kDim>
class StagedRows {
 public:
  /// `staging`: 16 x kDim elements, aligned to 128 bytes.
  __device__ __forceinline__ StagedRows(std::uint16_t* staging, int lane)
      : staging_(reinterpret_cast<const char*>(staging)),
        lane_(lane),
        to_(ptx::shared_address(staging) + offset_of(lane % 16, lane / 16)) {}

  /// Columns 16 i .. 16 i + 15: four registers of pairs.
  __device__ __forceinline__ void put(int i, const std::uint32_t (&pairs)[4]) const {
    const int piece = 2 * i;
    ptx::store_matrix_x4((to_ ^ (piece % 8) << 4) + (piece / 8 * 8 << 4), pairs[0], pairs[1],
                         pairs[2], pairs[3]);
  }

  /// Writes them: rows [first, first + 16) of the tokens from `token`, those below `end` only. All
  /// lanes of a row write it in 16-byte pieces where the tensor allows it.
  __device__ __forceinline__ void store(const TensorView<std::uint16_t>& out, int head,
                                        std::int64_t token, int first, int end) const {
    __syncwarp();
    // A lane has one piece of every kRowsAtOnce-th row.
    constexpr int kRowsAtOnce = 32 / kPieces;
    const int piece = lane_ % kPieces;
    const int first_row = lane_ / kPieces;
    const int rows = end - first - first_row;  // of the lane's own and those behind it
    const std::int64_t step = kRowsAtOnce * out.token_stride;
    std::uint16_t* to = out.row(token + first + first_row, head) + 8 * piece;
    const std::uint32_t from = offset_of(first_row, piece);
    const auto piece_of = [&](int row) {
      return staging_ + ((from ^ (row & 7) << 4) + row * kRowBytes);
    };
    if (out.has_aligned_rows()) {
#pragma unroll
      for (int row = 0; row < 16; row += kRowsAtOnce, to += step) {
        // The load is not under the condition, so that no load waits for the store before it.
        const uint4 whole = *reinterpret_cast<const uint4*>(piece_of(row));
        if (row < rows) *reinterpret_cast<uint4*>(to) = whole;
      }
    } else {
#pragma unroll 1
      for (int row = 0; row < min(rows, 16); row += kRowsAtOnce, to += step) {
        const auto* const elements = reinterpret_cast<const std::uint16_t*>(piece_of(row));
        for (int e = 0; e < 8; ++e) to[e] = elements[e];
      }
    }
    __syncwarp();
  }

 private:
  static constexpr int kRowBytes = 2 * kDim;
  static constexpr int kPieces = kRowBytes / 16;

  __device__ __forceinline__ static std::uint32_t offset_of(int row, int piece) {
    return static_cast<std::uint32_t>(row * kRowBytes + ((piece ^ (row & 7)) << 4));
  }

  const char* staging_;
  int lane_;
  std::uint32_t to_;
};

}  // namespace mxattn::kernels::sm90
