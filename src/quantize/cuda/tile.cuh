// Steps that the quantiser of Q, K, V and the preparation of dO share.
//
// A CTA of 512 threads owns 128 slots of one head. Documents start at multiples of 16 slots and
// take at least 16, so the 8 slots of a warp belong to one document. Eight lanes share a row, 16
// channels each; a warp reads four rows at a time.
#pragma once

#include <cstdint>

#include "base/numeric.h"
#include "base/view.h"
#include "pack/pack.h"
#include "ptx/math.h"
#include "recipe/exponents.h"
#include "recipe/stages.h"
#include "tile/swizzle.h"

namespace mxattn::cuda {

inline constexpr int kDim = 128;
inline constexpr int kTileSlots = 128;
inline constexpr int kThreads = 512;
inline constexpr int kGroup = stages::kSlotAlignment;  // slots that share a document
inline constexpr int kWarpSlots = kTileSlots / (kThreads / 32);
inline constexpr int kLaneChannels = 16;
inline constexpr int kRowsAtOnce = 4;  // rows of a warp's load
inline constexpr int kPasses = kWarpSlots / kRowsAtOnce;
static_assert(kGroup % kWarpSlots == 0);

/// What the slots of a warp hold.
struct Group {
  int document = 0;
  std::int64_t token = 0;  // of the first slot
  int first = 0;           // its position in the document
  int rows = 0;            // slots that hold tokens
  bool begins = false;     // the document begins here
};

/// Finds the document of the slots from `slot`: the last one that starts at or before it.
__device__ __forceinline__ Group find_group(const std::int32_t* cu_seqlens, int num_documents,
                                            std::int64_t slot) {
  const int lane = threadIdx.x % 32;
  int low = 0, high = num_documents;  // the document lies in [low, high)
  while (high - low > 1) {
    const int stride = (high - low + 31) / 32;
    const int probe = low + lane * stride;
    const bool before = probe < high and document_slot(cu_seqlens[probe], probe) <= slot;
    const int count = __popc(__ballot_sync(0xFFFFFFFFu, before));  // lane 0 always counts
    low += (count - 1) * stride;
    high = min(high, low + stride);
  }
  Group group;
  group.document = low;
  const std::int32_t begin = cu_seqlens[low];
  const int length = cu_seqlens[low + 1] - begin;
  const std::int64_t start = document_slot(begin, low);
  group.first = static_cast<int>(slot - start);
  group.token = begin + group.first;
  group.rows = max(0, min(kWarpSlots, length - group.first));
  group.begins = group.first == 0;
  return group;
}

/// The channels of a lane in the rows of its four passes.
using LaneRows = float[kPasses][kLaneChannels];

/// Loads the group's rows; rows without a token are 0.
__device__ __forceinline__ void load_rows(const TensorView<const std::uint16_t>& x, int head,
                                          const Group& group, LaneRows& values) {
  const int lane = threadIdx.x % 32;
  const bool aligned = reinterpret_cast<std::uintptr_t>(x.data) % 16 == 0 and
                       x.token_stride % 8 == 0 and x.head_stride % 8 == 0;
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int row = pass * kRowsAtOnce + lane / 8;
    union {
      uint4 words[2];
      std::uint16_t elements[kLaneChannels];
    } raw;
    raw.words[0] = raw.words[1] = uint4{0, 0, 0, 0};
    if (row < group.rows) {
      const std::uint16_t* from = x.row(group.token + row, head) + (lane % 8) * kLaneChannels;
      if (aligned) {
        raw.words[0] = __ldg(reinterpret_cast<const uint4*>(from));
        raw.words[1] = __ldg(reinterpret_cast<const uint4*>(from) + 1);
      } else {
#pragma unroll
        for (int c = 0; c < kLaneChannels; ++c) raw.elements[c] = from[c];
      }
    }
    const std::uint32_t* pairs = reinterpret_cast<const std::uint32_t*>(raw.words);
#pragma unroll
    for (int c = 0; c < kLaneChannels / 2; ++c) {
      values[pass][2 * c] = __uint_as_float(pairs[c] << 16);
      values[pass][2 * c + 1] = __uint_as_float(pairs[c] & 0xFFFF0000u);
    }
  }
}

/// Walsh-Hadamard butterflies of strides 1, 2, ..., 64, then times 1 / sqrt(128).
__device__ __forceinline__ void rotate(LaneRows& values) {
  constexpr float kNorm = 0.08838834764831845f;
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    float(&x)[kLaneChannels] = values[pass];
#pragma unroll
    for (int stride = 1; stride < kLaneChannels; stride *= 2) {
#pragma unroll
      for (int c = 0; c < kLaneChannels; ++c) {
        if ((c & stride) == 0) {
          const float low = x[c], high = x[c + stride];
          x[c] = add_rn(low, high);
          x[c + stride] = add_rn(low, -high);
        }
      }
    }
#pragma unroll
    for (int lanes = 1; lanes < kDim / kLaneChannels; lanes *= 2) {
      const bool upper = (threadIdx.x & lanes) != 0;
#pragma unroll
      for (int c = 0; c < kLaneChannels; ++c) {
        const float other = __shfl_xor_sync(0xFFFFFFFFu, x[c], lanes);
        x[c] = add_rn(upper ? -x[c] : x[c], other);
      }
    }
#pragma unroll
    for (int c = 0; c < kLaneChannels; ++c) x[c] = mul_rn(x[c], kNorm);
  }
}

/// Exponent of the row of each pass; lanes of a row agree. As integers, magnitudes order like their
/// values, NaN and Inf last.
__device__ __forceinline__ void token_exponents(ExponentRule rule, const LaneRows& values,
                                                int (&exponents)[kPasses]) {
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    std::uint32_t largest = 0;
#pragma unroll
    for (int c = 0; c < kLaneChannels; ++c) {
      largest = max(largest, __float_as_uint(values[pass][c]) & 0x7FFFFFFFu);
    }
#pragma unroll
    for (int lanes = 1; lanes < 8; lanes *= 2) {
      largest = max(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, lanes));
    }
    exponents[pass] = stages::token_exponent(rule, __uint_as_float(largest));
  }
}

/// Codes of a tile in shared memory: (slot, channel), 16-byte units permuted so that reading a
/// channel down the slots and reading a row both spread over the banks.
struct CodeTile {
  alignas(16) std::uint8_t bytes[kTileSlots * kDim];

  __device__ __forceinline__ std::uint8_t* unit(int slot, int index) {
    return bytes + slot * kDim + ((index ^ slot ^ (slot / kGroup)) & 7) * 16;
  }
};

/// Codes of the group's rows, to global memory and to the tile.
__device__ __forceinline__ void encode_rows(const LaneRows& values, const int (&exponents)[kPasses],
                                            int group_slot,
                                            std::uint8_t* codes /* of the tile's first slot */,
                                            CodeTile& tile) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int slot = group_slot + pass * kRowsAtOnce + lane / 8;
    uint4 packed{0, 0, 0, 0};
    if (exponents[pass] != stages::kNanExponent) {
      const float factor = pow2(-exponents[pass]);
      std::uint32_t words[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float* x = values[pass] + 4 * w;
        words[w] = ptx::to_e4m3x4(mul_rn(x[0], factor), mul_rn(x[1], factor), mul_rn(x[2], factor),
                                  mul_rn(x[3], factor));
      }
      packed = {words[0], words[1], words[2], words[3]};
    }
    *reinterpret_cast<uint4*>(codes + slot * kDim + (lane % 8) * 16) = packed;
    *reinterpret_cast<uint4*>(tile.unit(slot, lane % 8)) = packed;
  }
}

/// Transposes the tile: (channel, slot), each 16 slots in the order pi of tile/swizzle.h.
/// `transposed` is the first channel's row at the tile's first slot. Slots from `slots` on are not
/// there.
__device__ __forceinline__ void store_transposed(CodeTile& tile, std::uint8_t* transposed,
                                                 std::int64_t stride, int slots) {
  const int lane = threadIdx.x % 32;
  const int group = lane / 4;
  if (group * kGroup >= slots) return;
  for (int quad = (threadIdx.x / 32) * 4 + lane % 4; quad < kDim / 4; quad += kThreads / 8) {
    std::uint32_t rows[4][4];  // [channel][four positions]
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      std::uint32_t w[4];
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        const int slot = group * kGroup + tile::pi_order(4 * q + b);
        w[b] = *reinterpret_cast<const std::uint32_t*>(tile.unit(slot, quad / 4) + quad % 4 * 4);
      }
      const std::uint32_t low01 = ptx::permute_bytes(w[0], w[1], 0x5140);
      const std::uint32_t low23 = ptx::permute_bytes(w[2], w[3], 0x5140);
      const std::uint32_t high01 = ptx::permute_bytes(w[0], w[1], 0x7362);
      const std::uint32_t high23 = ptx::permute_bytes(w[2], w[3], 0x7362);
      rows[0][q] = ptx::permute_bytes(low01, low23, 0x5410);
      rows[1][q] = ptx::permute_bytes(low01, low23, 0x7632);
      rows[2][q] = ptx::permute_bytes(high01, high23, 0x5410);
      rows[3][q] = ptx::permute_bytes(high01, high23, 0x7632);
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      *reinterpret_cast<uint4*>(transposed + (4 * quad + c) * stride + group * kGroup) = {
          rows[c][0], rows[c][1], rows[c][2], rows[c][3]};
    }
  }
}

/// Four FMA chains over channels q, q + 4, ..., then (0 + 1) + (2 + 3).
struct Chains {
  float sum[4] = {0, 0, 0, 0};

  __device__ __forceinline__ void add(int channel, float a, float b) {
    sum[channel % 4] = fma_rn(a, b, sum[channel % 4]);
  }
  __device__ __forceinline__ float total() const {
    return add_rn(add_rn(sum[0], sum[1]), add_rn(sum[2], sum[3]));
  }
};

/// body(channel, value) for the codes of a slot, channels ascending.
template <class Body>
__device__ __forceinline__ void for_each_code(CodeTile& tile, int slot, Body body) {
#pragma unroll
  for (int u = 0; u < kDim / 16; ++u) {
    const uint4 unit = *reinterpret_cast<const uint4*>(tile.unit(slot, u));
    const std::uint32_t words[4] = {unit.x, unit.y, unit.z, unit.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float low, high;
        ptx::from_e4m3x2(static_cast<std::uint16_t>(words[w] >> (16 * h)), low, high);
        body(16 * u + 4 * w + 2 * h, low);
        body(16 * u + 4 * w + 2 * h + 1, high);
      }
    }
  }
}

}  // namespace mxattn::cuda
