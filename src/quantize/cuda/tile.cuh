// Steps that the quantisers share: which thread holds what, rotation, codes, sums, transposition.
//
// A CTA of 8 warps owns a tile of slots of one head. Documents start at multiples of 16 slots and
// take at least 16, so the slots of a warp belong to one document. Four lanes share a row: lane q
// holds the 16-byte units q, q + 4, ... of its BF16 values, and sums chain q of a row afterwards. A
// warp takes eight rows at a time. Rows and codes pass through shared memory on their way from and
// to global memory, where consecutive lanes move consecutive units of whole lines.
#pragma once

#include <cstdint>
#include <limits>

#include "base/numeric.h"
#include "base/view.h"
#include "pack/pack.h"
#include "ptx/barrier.h"
#include "ptx/copy.h"
#include "ptx/math.h"
#include "recipe/exponents.h"
#include "recipe/stages.h"
#include "tile/rotation.h"
#include "tile/swizzle.h"

namespace mxattn::cuda {

inline constexpr int kThreads = 256;
inline constexpr int kWarps = kThreads / 32;
inline constexpr int kGroup = stages::kSlotAlignment;  // slots that share a document
inline constexpr int kRowLanes = 4;
inline constexpr int kRowsAtOnce = 32 / kRowLanes;

/// What follows from the head dimension. A thread holds 32 elements whatever it is.
template <int kDimension>
struct Layout {
  static constexpr int kDim = kDimension;
  static_assert(kDim == 64 or kDim == 128);
  static constexpr int kPasses = 128 / kDim;  // a warp's rows over kRowsAtOnce
  static constexpr int kWarpSlots = kRowsAtOnce * kPasses;
  static constexpr int kSlots = kWarps * kWarpSlots;
  static constexpr int kLaneChannels = kDim / kRowLanes;
  static constexpr int kUnits = kLaneChannels / 8;  // 16-byte units of a lane's part of a row
  static_assert(kGroup % kWarpSlots == 0);
  static constexpr float kRotationNorm = tile::rotation_norm<kDim>();

  static int tiles(std::int64_t slots) { return static_cast<int>((slots + kSlots - 1) / kSlots); }
};

/// First channel of a lane's unit.
template <class L>
__device__ __forceinline__ int first_channel(int unit) {
  return 8 * (kRowLanes * unit + static_cast<int>(threadIdx.x) % kRowLanes);
}

/// Row of the warp that the lane holds a part of in a pass.
__device__ __forceinline__ int lane_row(int pass) {
  return pass * kRowsAtOnce + static_cast<int>(threadIdx.x) % 32 / kRowLanes;
}

// ---- documents --------------------------------------------------------------------------------

/// A document and the slots from its first up to the next document's.
struct alignas(16) Span {
  int start;  // first slot: no other document's
  int end;
  int begin;   // first token
  int length;  // tokens
};

__device__ __forceinline__ bool holds(const Span& span, int slot) {
  return span.start <= slot and slot < span.end;
}

__device__ __forceinline__ Span span_of(const std::int32_t* cu_seqlens, int num_documents,
                                        int document) {
  const int begin = __ldg(cu_seqlens + document);
  const int next = __ldg(cu_seqlens + document + 1);
  return {.start = static_cast<int>(document_slot(begin, document)),
          .end = document + 1 < num_documents ? static_cast<int>(document_slot(next, document + 1))
                                              : std::numeric_limits<int>::max(),
          .begin = begin,
          .length = next - begin};
}

/// The document of a slot among those in [low, high): the last one that starts at or before it.
__device__ __forceinline__ int document_of(const std::int32_t* cu_seqlens, int low, int high,
                                           int slot) {
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (document_slot(__ldg(cu_seqlens + middle), middle) <= slot) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

/// The same among all documents. The whole warp searches.
__device__ __forceinline__ int find_document(const std::int32_t* cu_seqlens, int num_documents,
                                             int slot) {
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
  return low;
}
__device__ __forceinline__ Span find_span(const std::int32_t* cu_seqlens, int num_documents,
                                          int slot) {
  return span_of(cu_seqlens, num_documents, find_document(cu_seqlens, num_documents, slot));
}

/// Consecutive slots of a document. Slot i holds a token if i < left.
struct alignas(16) Rows {
  int first;     // position of the first one in the document
  int token;     // of the first one
  int left;      // tokens from there to the document's end; may be negative
  int document;  // Span::start

  __device__ __forceinline__ Rows shifted(int slots) const {
    return {first + slots, token + slots, left - slots, document};
  }
};

__device__ __forceinline__ Rows rows_of(const Span& span, int slot) {
  const int first = slot - span.start;
  return {first, span.begin + first, span.length - first, span.start};
}

// ---- rows of BF16 -----------------------------------------------------------------------------

using Bf16View = TensorView<const std::uint16_t>;

/// Eight elements from anywhere.
__device__ __forceinline__ uint4 gather(const std::uint16_t* from) {
  union {
    uint4 unit;
    std::uint16_t elements[8];
  } raw;
#pragma unroll
  for (int c = 0; c < 8; ++c) raw.elements[c] = from[c];
  return raw.unit;
}

/// Begins to copy the warp's rows to shared memory, 16-byte units of whole lines by consecutive
/// lanes; rows without a token become 0. `place(row, unit)` is where those of the first rows go,
/// the others follow `stride` bytes a row.
template <class L, class Place>
__device__ __forceinline__ void fetch_rows(const Bf16View& x, bool aligned, int head,
                                           const Rows& rows, unsigned stride, Place place) {
  constexpr int kRowUnits = L::kDim / 8;
  constexpr int kRows = 32 / kRowUnits;  // at once
  const int lane = threadIdx.x % 32;
  const int first = lane / kRowUnits, unit = lane % kRowUnits;
  const std::uint16_t* from = x.row(rows.token + first, head) + 8 * unit;
  std::uint8_t* const to = place(first, unit);
  if (aligned) {
#pragma unroll
    for (int row = 0; row < L::kWarpSlots; row += kRows, from += kRows * x.token_stride) {
      ptx::copy_async_16(ptx::shared_address(to + row * stride), from,
                         row + first < rows.left ? 16 : 0);
    }
  } else {
#pragma unroll 1
    for (int row = 0; row < L::kWarpSlots; row += kRows, from += kRows * x.token_stride) {
      *reinterpret_cast<uint4*>(to + row * stride) =
          row + first < rows.left ? gather(from) : uint4{0, 0, 0, 0};
    }
  }
}

/// Rows that a warp waits for, in shared memory. 16-byte units are permuted inside lines of 128
/// bytes so that neither fetching consecutive units nor reading those that a lane holds makes banks
/// collide: units q, q + 4, ... (q the lane's place in its row), or as many consecutive ones.
template <class L>
struct RowBuffer {
  static constexpr unsigned kRowBytes = L::kDim * 2;
  alignas(128) std::uint8_t bytes[L::kSlots * kRowBytes];

  __device__ __forceinline__ void fetch(const Bf16View& x, bool aligned, int head,
                                        const Rows& rows) {
    fetch_rows<L>(x, aligned, head, rows, kRowBytes,
                  [&](int row, int unit) { return bytes + (warp_base() ^ offset(row, unit)); });
  }
  /// Unit q + 4 u.
  __device__ __forceinline__ uint4* strided(int pass, int u) {
    return at(warp_base() ^ offset(lane_row(0), threadIdx.x % kRowLanes) ^
              offset(pass * kRowsAtOnce, kRowLanes * u));
  }
  /// Unit u of those from the lane's first on if each has consecutive ones.
  __device__ __forceinline__ uint4* consecutive(int pass, int u) {
    return at(warp_base() ^ offset(lane_row(0), threadIdx.x % kRowLanes * L::kUnits) ^
              offset(pass * kRowsAtOnce, u));
  }

 private:
  /// Offsets of parts without a common bit combine by exclusive or.
  __device__ __forceinline__ static constexpr unsigned offset(unsigned row, unsigned unit) {
    const unsigned permutation = L::kDim == 128 ? unit / 8 ^ row % 2 * 6 : row % 2 * 5;
    return row * kRowBytes ^ (unit ^ permutation) * 16;
  }
  __device__ __forceinline__ static unsigned warp_base() {
    return threadIdx.x / 32 * (L::kWarpSlots * kRowBytes);
  }
  __device__ __forceinline__ uint4* at(unsigned offset) {
    return reinterpret_cast<uint4*>(bytes + offset);
  }
};

/// A lane's values in the rows of its passes: value 8 u + i is channel first_channel(u) + i.
template <class L>
using LaneRows = float[L::kPasses][L::kLaneChannels];

__device__ __forceinline__ void unpack_pair(std::uint32_t pair, float& low, float& high) {
  low = __uint_as_float(pair << 16);
  high = __uint_as_float(pair & 0xFFFF0000u);
}

__device__ __forceinline__ void unpack(const uint4& unit, float* values) {
  const std::uint32_t pairs[4] = {unit.x, unit.y, unit.z, unit.w};
#pragma unroll
  for (int p = 0; p < 4; ++p) unpack_pair(pairs[p], values[2 * p], values[2 * p + 1]);
}

/// What RowBuffer::fetch() brought. The warp has met since it waited for it, and must meet before
/// it fetches more.
template <class L>
__device__ __forceinline__ void take_rows(RowBuffer<L>& buffer, LaneRows<L>& values) {
#pragma unroll
  for (int pass = 0; pass < L::kPasses; ++pass) {
#pragma unroll
    for (int u = 0; u < L::kUnits; ++u) unpack(*buffer.strided(pass, u), values[pass] + 8 * u);
  }
}

/// Rows straight from global memory.
template <class L>
__device__ __forceinline__ void load_rows(const Bf16View& x, bool aligned, int head,
                                          const Rows& rows, LaneRows<L>& values) {
#pragma unroll
  for (int pass = 0; pass < L::kPasses; ++pass) {
    const int row = lane_row(pass);
#pragma unroll
    for (int u = 0; u < L::kUnits; ++u) {
      uint4 unit{0, 0, 0, 0};
      if (row < rows.left) {
        const std::uint16_t* from = x.row(rows.token + row, head) + first_channel<L>(u);
        unit = aligned ? __ldg(reinterpret_cast<const uint4*>(from)) : gather(from);
      }
      unpack(unit, values[pass] + 8 * u);
    }
  }
}

// ---- rotation ---------------------------------------------------------------------------------
//
// Butterflies of strides 1, 2, ..., d / 2 (tile/rotation.h), without the factor 1 / sqrt(d).

/// Rotates what a warp holds. Channel bits 0 to 2 count inside a unit, 3 and 4 lanes, the others a
/// lane's units.
template <class L>
__device__ __forceinline__ void rotate(LaneRows<L>& values) {
#pragma unroll
  for (float(&x)[L::kLaneChannels] : values) {
#pragma unroll
    for (int stride = 1; stride < 8; stride *= 2) tile::butterflies_inside(x, stride);
#pragma unroll
    for (int lanes = 1; lanes < kRowLanes; lanes *= 2) tile::butterflies_across(x, lanes);
#pragma unroll
    for (int stride = 8; stride < L::kLaneChannels; stride *= 2)
      tile::butterflies_inside(x, stride);
  }
}

/// What RowBuffer::fetch() brought, rotated: the same values with fewer instructions. A lane takes
/// consecutive units, so that more strides lie inside it, and the place of the rows serves to give
/// it those which take_rows() would, half of each unit at a time.
template <class L>
__device__ __forceinline__ void take_rotated_rows(RowBuffer<L>& buffer, LaneRows<L>& values) {
#pragma unroll
  for (int pass = 0; pass < L::kPasses; ++pass) {
#pragma unroll
    for (int u = 0; u < L::kUnits; ++u) unpack(*buffer.consecutive(pass, u), values[pass] + 8 * u);
#pragma unroll
    for (int stride = 1; stride < L::kLaneChannels; stride *= 2) {
      tile::butterflies_inside(values[pass], stride);
    }
  }
#pragma unroll
  for (int half = 0; half < 8; half += 4) {
    __syncwarp();  // what was there has been read
#pragma unroll
    for (int pass = 0; pass < L::kPasses; ++pass) {
#pragma unroll
      for (int u = 0; u < L::kUnits; ++u) {
        const float* const x = values[pass] + 8 * u + half;
        *buffer.consecutive(pass, u) = {__float_as_uint(x[0]), __float_as_uint(x[1]),
                                        __float_as_uint(x[2]), __float_as_uint(x[3])};
      }
    }
    __syncwarp();
#pragma unroll
    for (int pass = 0; pass < L::kPasses; ++pass) {
#pragma unroll
      for (int u = 0; u < L::kUnits; ++u) {
        const uint4 unit = *buffer.strided(pass, u);
        float* const x = values[pass] + 8 * u + half;
        x[0] = __uint_as_float(unit.x);
        x[1] = __uint_as_float(unit.y);
        x[2] = __uint_as_float(unit.z);
        x[3] = __uint_as_float(unit.w);
      }
    }
  }
#pragma unroll
  for (float(&x)[L::kLaneChannels] : values) {
#pragma unroll
    for (int lanes = L::kUnits; lanes < kRowLanes; lanes *= 2) tile::butterflies_across(x, lanes);
#pragma unroll
    for (int stride = 8; stride < L::kLaneChannels; stride *= 2)
      tile::butterflies_inside(x, stride);
  }
}

// ---- exponents --------------------------------------------------------------------------------

/// Largest magnitude of a row; NaN if any value is. Lanes of a row agree.
template <int kCount>
__device__ __forceinline__ float row_maximum(const float (&x)[kCount]) {
  float even = 0, odd = 0;  // two chains
#pragma unroll
  for (int c = 0; c < kCount; c += 2) {
    even = ptx::max_magnitude(even, x[c]);
    odd = ptx::max_magnitude(odd, x[c + 1]);
  }
  float largest = ptx::max_magnitude(even, odd);
#pragma unroll
  for (int lanes = 1; lanes < kRowLanes; lanes *= 2) {
    largest = ptx::max_magnitude(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, lanes));
  }
  return largest;
}

/// Exponents of the rows of values times `scale`; lanes of a row agree. Rounding is monotone, so
/// the largest magnitude alone is multiplied.
template <class L>
__device__ __forceinline__ void token_exponents(ExponentRule rule, const LaneRows<L>& values,
                                                float scale, int (&exponents)[L::kPasses]) {
#pragma unroll
  for (int pass = 0; pass < L::kPasses; ++pass) {
    exponents[pass] = stages::token_exponent(rule, mul_rn(row_maximum(values[pass]), scale));
  }
}

// ---- codes ------------------------------------------------------------------------------------

/// Codes of consecutive tiles in shared memory: (slot, channel), 16-byte units permuted inside 128
/// bytes so that lanes writing rows, reading rows and reading channels down the slots spread over
/// the banks.
template <class L, int kTiles = 1>
struct CodeTile {
  static_assert(kTiles <= 2);
  alignas(128) std::uint8_t bytes[kTiles * L::kSlots * L::kDim];

  /// Every bit of it is a sum, modulo 2, of bits of slot and channel: offsets of parts without a
  /// common bit combine by exclusive or.
  __device__ __forceinline__ static constexpr unsigned offset(unsigned slot, unsigned channel) {
    constexpr unsigned kLineRows = 128 / L::kDim;
    const unsigned permutation =
        (slot % 4 / kLineRows ^ slot / kGroup % 4) << 1 | (slot / 4 ^ slot / (4 * kGroup)) % 2;
    return slot * L::kDim ^ channel ^ permutation * 16;
  }
  template <class T>
  __device__ __forceinline__ T& at(unsigned offset) {
    return *reinterpret_cast<T*>(bytes + offset);
  }
};

/// Codes of values times scale 2^-exponent to the tile, for the rows from `slot` on. Codes of a NaN
/// exponent are 0. `scale` is applied together with the power of two: a product that differs from
/// that of two roundings lies below 2^-30, where every code is 0.
template <class L>
__device__ __forceinline__ void encode_rows(const LaneRows<L>& values,
                                            const int (&exponents)[L::kPasses], float scale,
                                            int slot, CodeTile<L>& tile) {
#pragma unroll
  for (int pass = 0; pass < L::kPasses; ++pass) {
    const bool nan = exponents[pass] == stages::kNanExponent;
    const float factor = mul_rn(scale, pow2(-exponents[pass]));
    const unsigned first = tile.offset(slot + lane_row(pass), first_channel<L>(0));
#pragma unroll
    for (int u = 0; u < L::kUnits; ++u) {
      std::uint32_t words[2];
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        const float* x = values[pass] + 8 * u + 4 * w;
        words[w] = ptx::to_e4m3x4(mul_rn(x[0], factor), mul_rn(x[1], factor), mul_rn(x[2], factor),
                                  mul_rn(x[3], factor));
        if (nan) words[w] = 0;
      }
      tile.template at<uint2>(first ^ tile.offset(0, 8 * kRowLanes * u)) = {words[0], words[1]};
    }
  }
}

/// Copies the codes of the warp's rows, those from `slot` on, to global memory, whole lines at a
/// time; `codes` is the tile's first row there. The warp has met since it encoded them.
template <class L>
__device__ __forceinline__ void store_rows(CodeTile<L>& tile, int slot, std::uint8_t* codes) {
  constexpr unsigned kRowUnits = L::kDim / 16;
  const unsigned lane = threadIdx.x % 32;
  const unsigned first = tile.offset(slot + lane / kRowUnits, lane % kRowUnits * 16);
  uint4* const to = reinterpret_cast<uint4*>(codes + slot * L::kDim) + lane;
#pragma unroll
  for (unsigned row = 0; row < L::kWarpSlots; row += 32 / kRowUnits) {
    to[row * kRowUnits] = tile.template at<uint4>(first ^ tile.offset(row, 0));
  }
}

/// Transposes tiles: (channel, slot), each 16 slots in the order pi of tile/swizzle.h.
/// `transposed` is the first channel's row at the first slot. Slots before `begin` and from `end`
/// on are left alone. A thread moves 4 channels of 8 positions a tile.
template <class L, int kTiles>
__device__ __forceinline__ void store_transposed(CodeTile<L, kTiles>& tile,
                                                 std::uint8_t* transposed, std::int64_t stride,
                                                 int begin, int end) {
  constexpr int kPositions = 8 * kTiles;
  constexpr int kBlocks = L::kSlots / 64;  // of 8 lanes, side by side in a channel
  static_assert(kThreads == L::kSlots / 8 * L::kDim / 4);
  const unsigned warp = threadIdx.x / 32;
  const unsigned lane = threadIdx.x % 32;
  const unsigned first = kPositions * (lane % 8 + 8 * (warp % kBlocks));
  const unsigned channel = 4 * (lane / 8 + 4 * (warp / kBlocks));
  if (static_cast<int>(first) < begin or static_cast<int>(first) >= end) return;
  // pi(8 + p) = pi(p) + 4
  const unsigned from = tile.offset(first / kGroup * kGroup | first % kGroup / 2, channel);
  std::uint32_t rows[4][kPositions / 4];  // [channel][four positions]
#pragma unroll
  for (int q = 0; q < kPositions / 4; ++q) {
    std::uint32_t w[4];
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const auto slot = static_cast<unsigned>(tile::pi_order(4 * q + b));
      w[b] = tile.template at<std::uint32_t>(from ^ tile.offset(slot, 0));
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
  std::uint8_t* to = transposed + (channel * stride + first);
#pragma unroll
  for (int c = 0; c < 4; ++c, to += stride) {
    if constexpr (kTiles == 1) {
      *reinterpret_cast<uint2*>(to) = {rows[c][0], rows[c][1]};
    } else {
      *reinterpret_cast<uint4*>(to) = {rows[c][0], rows[c][1], rows[c][2], rows[c][3]};
    }
  }
}

// ---- sums over channels -----------------------------------------------------------------------

/// One of the four FMA chains of a row: lane q of the row adds channels q, q + 4, ..., ascending.
struct Chain {
  float sum = 0;

  __device__ __forceinline__ void add(float a, float b) { sum = fma_rn(a, b, sum); }
  /// (0 + 1) + (2 + 3): the same in all lanes of the row.
  __device__ __forceinline__ float total() const {
    const float pair = add_rn(sum, __shfl_xor_sync(0xFFFFFFFFu, sum, 1));
    return add_rn(pair, __shfl_xor_sync(0xFFFFFFFFu, pair, 2));
  }
};

/// Of sixteen codes, those of channels q, q + 4, q + 8 and q + 12, q the lane's place in its row.
__device__ __forceinline__ void chain_codes(const uint4& codes, float (&values)[4]) {
  const std::uint32_t q = threadIdx.x % kRowLanes;
  const std::uint32_t selector = q | (q + 4) << 4;
  ptx::from_e4m3x2(static_cast<std::uint16_t>(ptx::permute_bytes(codes.x, codes.y, selector)),
                   values[0], values[1]);
  ptx::from_e4m3x2(static_cast<std::uint16_t>(ptx::permute_bytes(codes.z, codes.w, selector)),
                   values[2], values[3]);
}

/// Norm exponent of the codes of a slot times 2^exponent; lanes of a row agree.
template <class L>
__device__ __forceinline__ int code_norm(CodeTile<L>& tile, int slot, int exponent) {
  Chain squares;
  const unsigned first = tile.offset(slot, 0);
#pragma unroll
  for (int c = 0; c < L::kDim; c += 16) {
    float values[4];
    chain_codes(tile.template at<uint4>(first ^ tile.offset(0, c)), values);
#pragma unroll
    for (const float v : values) squares.add(v, v);
  }
  const float sum = squares.total();
  return exponent == stages::kNanExponent ? stages::kNanExponent
                                          : stages::norm_exponent(sum, exponent);
}

}  // namespace mxattn::cuda
