// What instances with kWithDump write for tests: ForwardDump (config.h).
#pragma once

#include <cstdint>

#include "kernels/sm90/device_ops.h"
#include "kernels/sm90/forward/config.h"
#include "kernels/sm90/work.h"
#include "recipe/stages.h"
#include "tile/fragment.h"

namespace mxattn::kernels::sm90::forward {

/// The rows of a consumer's thread in the tensors of the dump.
struct DumpRows {
  const ForwardDump& dump;
  std::int64_t first;  // row of the tensors (heads, total_q) of the thread's half 0

  __device__ DumpRows(const ForwardParams& params, const Work& work, int block)
      : dump(params.dump),
        first(work.item.head * params.total_q + work.document.q_token + work.item.first +
              64 * block + tile::fragment_row(threadIdx.x % 128, 0)) {}

  /// Codes of 32 keys as tile::pack_operand packs them. `key`: the first of them.
  __device__ void codes(std::uint8_t* to, const std::uint32_t (&codes)[4], const Range& visible,
                        int half, int key) const {
    for (int i = 0; i < 16; ++i) {
      const int at = key + tile::fragment_column(threadIdx.x, i);
      if (tile::fragment_half(i) != half or not visible.contains(at)) continue;
      const std::uint32_t word = codes[2 * (i >> 3) + half];
      to[(first + 8 * half) * dump.key_tiles * stages::kKeyTile + at] =
          static_cast<std::uint8_t>(word >> (8 * ((i & 1) + 2 * ((i >> 2) & 1))));
    }
  }
  __device__ void tile(int half, int key_tile, float alpha, float maximum) const {
    if (threadIdx.x % 4 != 0) return;
    const std::int64_t at = (first + 8 * half) * dump.key_tiles + key_tile;
    dump.alpha[at] = alpha;
    dump.maximum[at] = maximum;
  }
};

}  // namespace mxattn::kernels::sm90::forward
