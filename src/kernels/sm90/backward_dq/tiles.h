// What the producers of dQ tell its consumers about an item's rows and a key tile.
#pragma once

#include <cstdint>

#include "kernels/sm90/backward.h"
#include "kernels/sm90/backward_steps.h"
#include "kernels/sm90/tile_facts.h"
#include "kernels/sm90/work.h"
#include "pack/pack.h"
#include "recipe/stages.h"

namespace mxattn::kernels::sm90::dq {

using stages::kKeyTile;

/// What tables hold of the item's rows.
template <int kRows>
struct alignas(16) RowTables {
  float delta[kRows];
  std::int8_t eq[kRows], eg[kRows], ng[kRows], no[kRows];
};

/// What tables hold of the last keys that the item's rows see of a chunk: running maxima of nV and,
/// where tables are monotone, EK. A mask is a band, whose ends move by at most one a row.
template <int kRows>
struct alignas(16) LastKeys {
  static constexpr int kKeys = kRows + stages::kSlotAlignment;
  std::int8_t nv[kKeys], ek[kKeys];
  int begin;  // the first one, counted from the document's start
};

/// EK and EV of a key tile's first key, whether something rare is due before its phase, how that
/// goes in each warpgroup, and where the tile's exponents lie.
struct TileFacts : TileFactsBase {
  // Behind an item's first tile: a chunk begins, a promotion may be due, or EK and EV are others
  // than in the tile before.
  static constexpr std::uint32_t kRare = 1u << 16;

  __device__ __forceinline__ static std::uint32_t pack(std::int8_t ek, std::int8_t ev, Phase phase0,
                                                       Phase phase1, int slot) {
    return exponents(ek, ev) | static_cast<std::uint32_t>(phase0) << 17 |
           static_cast<std::uint32_t>(phase1) << 19 | static_cast<std::uint32_t>(slot) << 21;
  }
  __device__ __forceinline__ static Phase phase(std::uint32_t facts, int consumer) {
    return static_cast<Phase>((facts >> (17 + 2 * consumer)) & 3u);
  }
  /// Of the arrays of exponents.
  __device__ __forceinline__ static int slot(std::uint32_t facts) { return facts >> 21; }
};

/// Keys of a chunk among those that a row sees.
__device__ __forceinline__ Range in_chunk(Range visible, int chunk) {
  return {max(visible.begin, stages::chunk_begin(chunk)),
          min(visible.end, stages::chunk_end(chunk))};
}

/// Whether the first `count` of a tile's stored exponents agree.
template <class Config>
__device__ __forceinline__ bool is_uniform(const std::int8_t* exponents, int count) {
  if constexpr (Config::kMonotone) return exponents[0] == exponents[count - 1];
  // A warp, four keys a lane. NOTE: tiles start at multiples of 16 slots.
  const int first = 4 * static_cast<int>(threadIdx.x % 32);
  bool same = true;
  if (first < count) {
    const char4 own = *reinterpret_cast<const char4*>(exponents + first);
    const int e = exponents[0];
    same = own.x == e and (first + 1 >= count or own.y == e) and
           (first + 2 >= count or own.z == e) and (first + 3 >= count or own.w == e);
  }
  return __all_sync(0xFFFFFFFFu, same);
}

/// Where a key of the item's document stands in tables of keys.
__device__ __forceinline__ std::int64_t key_offset(const BackwardParams& params, const Work& work,
                                                   int key) {
  return work.key_head * params.k_slots + work.document.k_slot + key;
}

/// Whether what r_i takes from a chunk's keys is due with the rows of a tile of the item.
__device__ __forceinline__ bool begins_chunk(const Work& work, int tile) {
  const int key = tile * kKeyTile;
  return tile == work.visits.begin or key == stages::chunk_begin(stages::chunk_of(key));
}

/// TileFacts of a tile, but for what is rare. Where tables are not monotone a whole warp asks.
template <class Config>
__device__ __forceinline__ std::uint32_t facts_of_tile(const BackwardParams& params,
                                                       const Work& work, const Range (&whole)[2],
                                                       int tile, int exponents_slot) {
  const std::int64_t offset = key_offset(params, work, tile * kKeyTile);
  const int keys = min(kKeyTile, work.document.k_len - tile * kKeyTile);
  const bool uniform_k = is_uniform<Config>(params.k_exponents + offset, keys);
  const bool uniform_v = is_uniform<Config>(params.v_exponents + offset, keys);
  const bool uniform = uniform_k and uniform_v;
  const auto phase = [&](Range seen) {
    return not uniform ? Phase::kGeneral : seen.contains(tile) ? Phase::kPlain : Phase::kMasked;
  };
  return TileFacts::pack(params.k_exponents[offset], params.v_exponents[offset], phase(whole[0]),
                         phase(whole[1]), exponents_slot);
}

}  // namespace mxattn::kernels::sm90::dq
