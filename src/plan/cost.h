// What a work item costs, and in which order items stand: shared by the host and the device, so
// that both build the same list bit for bit. Integers only.
//
// A tile is 128 rows of the item's own axis against 128 positions of the other axis (64 rows where
// the item's size is no multiple of 128). A tile is visited when any pair of its positions is
// visible; a partial tile costs as much as a full one, which is what it costs on hardware.
#pragma once

#include <cstdint>

#include "base/portability.h"
#include "pack/pack.h"
#include "recipe/stages.h"

namespace mxattn::plan {

/// What an item works on. Items of the forward and of dQ are queries of a query head and visit key
/// tiles; items of dK and dV are keys of a key head and visit query tiles of the whole group.
enum class Pass : std::uint8_t { kForward, kDq, kDkv };

/// `count` consecutive positions, from `first`, of one document and head. Positions count from the
/// document's start: queries and a query head, or keys and a key head (kDkv).
struct WorkItem {
  std::int32_t document = 0;
  std::int32_t head = 0;
  std::int32_t first = 0;
  std::int32_t count = 0;

  constexpr bool operator==(const WorkItem&) const = default;
};
static_assert(sizeof(WorkItem) == 16, "a device loads an item as one 16-byte word");

/// Cost = per_tile * visited tiles + per_item. The unit is free; the constants are measured on the
/// machine that runs the list. With the defaults a cost is a number of tiles.
struct CostModel {
  std::uint32_t per_tile = 1;
  std::uint32_t per_item = 0;

  constexpr bool operator==(const CostModel&) const = default;
};

/// Rows of one cost tile: what an item of `tile` rows is made of.
MXATTN_HOST_DEVICE constexpr int cost_rows(int tile) {
  return tile % stages::kQueryTile == 0 ? stages::kQueryTile : stages::kQueryTile / 2;
}

/// Tiles that rows [first, first + rows) visit. The mask is a band: both ends of the visible range
/// never decrease with the row, the ranges of neighbouring rows touch, and rows before the first
/// seeing one have a range that begins at 0. So the union runs from the first row's begin to the
/// last row's end.
MXATTN_HOST_DEVICE constexpr std::int64_t tiles_of_rows(const Mask& mask, int q_len, int k_len,
                                                        Pass pass, int first, int rows) {
  const int last = first + rows - 1;
  Range seen;
  if (pass == Pass::kDkv) {
    seen = {visible_queries(mask, q_len, k_len, first).begin,
            visible_queries(mask, q_len, k_len, last).end};
  } else {
    seen = {visible_keys(mask, q_len, k_len, first).begin,
            visible_keys(mask, q_len, k_len, last).end};
  }
  if (seen.empty()) return 0;
  const int step = pass == Pass::kDkv ? stages::kQueryTile : stages::kKeyTile;
  return std::int64_t{(seen.end - 1) / step} - seen.begin / step + 1;
}

/// Tiles that an item of `count` positions from `first` visits, for one query head.
MXATTN_HOST_DEVICE constexpr std::int64_t visited_tiles(const Mask& mask, int q_len, int k_len,
                                                        Pass pass, int tile, int first, int count) {
  const int rows = cost_rows(tile);
  std::int64_t tiles = 0;
  for (int r = 0; r < count; r += rows) {
    const int left = count - r;
    tiles += tiles_of_rows(mask, q_len, k_len, pass, first + r, left < rows ? left : rows);
  }
  return tiles;
}

/// Cost of an item whose tiles are visited once for each of `group` query heads. Saturates at
/// 2^32 - 1, since a device has nobody to tell about an overflow.
MXATTN_HOST_DEVICE constexpr std::uint32_t item_cost(const CostModel& model, std::int64_t tiles,
                                                     int group) {
  constexpr std::uint64_t kMost = 0xffffffffu;
  const std::uint64_t visits = static_cast<std::uint64_t>(tiles) * static_cast<unsigned>(group);
  if (model.per_tile != 0 and visits > kMost / model.per_tile) return kMost;
  const std::uint64_t cost = visits * model.per_tile + model.per_item;
  return static_cast<std::uint32_t>(cost < kMost ? cost : kMost);
}

/// Heads that are worked on together: groups of `share` heads, one after the other. The last group
/// has a whole share more and what is left over: the long items of its second share would else
/// start when nothing is left to fill the other workers.
struct HeadGroups {
  int heads;
  int share;
  int count;

  /// heads_per_group = 0: one group of all.
  MXATTN_HOST_DEVICE constexpr HeadGroups(int num_heads, int heads_per_group)
      : heads(num_heads),
        share(heads_per_group > 0 and heads_per_group < num_heads ? heads_per_group : num_heads),
        count(num_heads / share > 2 ? num_heads / share - 1 : 1) {}

  MXATTN_HOST_DEVICE constexpr int of(int head) const {
    const int group = head / share;
    return group < count ? group : count - 1;
  }
  MXATTN_HOST_DEVICE constexpr int first(int group) const { return group * share; }
  MXATTN_HOST_DEVICE constexpr int size(int group) const {
    return group == count - 1 ? heads - first(group) : share;
  }
};

/// Whether `a` stands before `b` in a sorted list. A total order, since no two items share
/// document, head and first:
///   1. group of heads ascending,
///   2. cost descending, 3. document ascending, 4. head ascending, 5. first ascending.
MXATTN_HOST_DEVICE constexpr bool sorted_before(const WorkItem& a, std::uint32_t cost_a,
                                                const WorkItem& b, std::uint32_t cost_b,
                                                const HeadGroups& groups) {
  if (groups.of(a.head) != groups.of(b.head)) return a.head < b.head;
  if (cost_a != cost_b) return cost_a > cost_b;
  if (a.document != b.document) return a.document < b.document;
  if (a.head != b.head) return a.head < b.head;
  return a.first < b.first;
}

}  // namespace mxattn::plan
