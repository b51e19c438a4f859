// r_i, the exponent of a row of dQ over a chunk of keys.
#pragma once

#include <cstdint>

#include "kernels/sm90/backward.h"
#include "kernels/sm90/backward_dq/phase.cuh"
#include "kernels/sm90/backward_dq/tiles.h"
#include "kernels/sm90/backward_steps.h"
#include "kernels/sm90/work.h"
#include "recipe/stages.h"

namespace mxattn::kernels::sm90::dq {

/// What r_i takes from the keys of a chunk that each of the thread's two rows sees, as stored: the
/// running maximum of nV and the largest EK. Nothing where a row sees none.
struct ChunkKeys {
  int nv[2], ek[2];
};

/// Where tables are monotone the last key has the largest EK. Else a warp looks at the keys that
/// its rows share, and each quad at the few that only some of them see. warp_row: the first of the
/// warp's 16 rows. `visible` of the thread's.
template <class Config>
__device__ __forceinline__ ChunkKeys keys_of_chunk(const BackwardParams& params, const Work& work,
                                                   const LastKeys<Config::kRows>& last,
                                                   int warp_row, const Range (&visible)[2],
                                                   int chunk) {
  const Document& d = work.document;
  const std::int8_t* const ek = params.k_exponents + work.key_head * params.k_slots + d.k_slot;
  Range shared{0, 0};  // keys that all of the warp's rows see
  int shared_ek = -128;
  if constexpr (not Config::kMonotone) {
    const auto seen = [&](int row) {
      return in_chunk(visible_keys(params.mask, d.q_len, d.k_len, row), chunk);
    };
    if (warp_row < d.q_len) {
      shared = {seen(min(warp_row + 15, d.q_len - 1)).begin, seen(warp_row).end};
    }
    for (int key = shared.begin + static_cast<int>(threadIdx.x % 32); key < shared.end; key += 32) {
      shared_ek = max(shared_ek, int{ek[key]});
    }
    shared_ek = __reduce_max_sync(0xFFFFFFFFu, shared_ek);
  }
  ChunkKeys keys{};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const Range seen = in_chunk(visible[h], chunk);
    if (seen.empty()) continue;
    keys.nv[h] = last.nv[seen.end - 1 - last.begin];
    if constexpr (Config::kMonotone) {
      keys.ek[h] = last.ek[seen.end - 1 - last.begin];
    } else {
      const Range inner = shared.empty() ? Range{seen.end, seen.end} : shared;
      keys.ek[h] = shared_ek;
      for (int j = seen.begin; j < inner.begin; ++j) keys.ek[h] = max(keys.ek[h], int{ek[j]});
      for (int j = inner.end; j < seen.end; ++j) keys.ek[h] = max(keys.ek[h], int{ek[j]});
    }
  }
  return keys;
}

/// r_i of the key chunk, for a row that sees a key of it; else r stays.
__device__ __forceinline__ std::int32_t scale_in_chunk(const RowFacts& row, int chunk, int nv,
                                                       int ek) {
  if (in_chunk(row.visible, chunk).empty()) return row.r;
  return value_of(stages::ds_exponent_dq(Exponent::stored(row.ng), Exponent::stored(row.no),
                                         Exponent::stored(static_cast<std::int8_t>(nv)),
                                         Exponent::stored(static_cast<std::int8_t>(ek))));
}

/// What a row's accumulator is multiplied by when its exponent changes.
__device__ __forceinline__ float change_of(std::int32_t before, std::int32_t after) {
  if (before == cuda::kNoScale or before == after) return before == cuda::kNanScale ? kNan : 1.0f;
  return stages::factor(exponent_of(before) - exponent_of(after));
}

}  // namespace mxattn::kernels::sm90::dq
