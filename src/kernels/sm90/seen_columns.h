// Which columns of a masked tile the two rows of a thread see.
#pragma once

#include <cstdint>

#include "pack/pack.h"
#include "ptx/math.h"
#include "tile/fragment.h"

namespace mxattn::kernels::sm90 {

/// A bit for each of the thread's columns, ascending: two of every eight (tile/fragment.h).
struct SeenColumns {
  std::uint32_t row[2];

  /// visible: what the thread's rows see; first_column: of the tile.
  __device__ __forceinline__ SeenColumns(const Range& visible0, const Range& visible1,
                                         int first_column) {
    const int first = first_column + 2 * (threadIdx.x % 4);
    row[0] = before(visible0.end - first) & ~before(visible0.begin - first);
    row[1] = before(visible1.end - first) & ~before(visible1.begin - first);
  }

  /// i: of the accumulator's registers.
  __device__ __forceinline__ bool sees(int i) const {
    return (row[tile::fragment_half(i)] & (1u << (2 * (i >> 2) + (i & 1)))) != 0;
  }

  /// What clears the codes that are not seen in a word of operand k of the tile, 32 columns, as
  /// tile::pack_operand makes it: four columns of row word % 2.
  __device__ __forceinline__ std::uint32_t code_mask(int k, int word) const {
    const std::uint32_t four = row[word % 2] >> (8 * k + 4 * (word / 2)) & 15;
    // The product brings bit i to the sign of byte i, and the permutation repeats the signs.
    return ptx::permute_bytes(four * 0x10204080u, 0, 0xBA98u);
  }
  __device__ __forceinline__ void mask_codes(std::uint32_t (&codes)[4], int k) const {
#pragma unroll
    for (int word = 0; word < 4; ++word) codes[word] &= code_mask(k, word);
  }

 private:
  /// The columns before the position, counted from the thread's first.
  __device__ __forceinline__ static std::uint32_t before(int position) {
    const int count = 2 * (position >> 3) + min(position & 7, 2);
    return count < 32 ? (1u << max(count, 0)) - 1 : ~0u;
  }
};

}  // namespace mxattn::kernels::sm90
