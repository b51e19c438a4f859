// An item of work as a producer finds it and hands it on: what its document is and which tiles of
// the other axis it visits.
#pragma once

#include <cstdint>

#include "pack/pack.h"
#include "plan/cost.h"
#include "recipe/stages.h"
#include "tile/ring.h"

namespace mxattn::kernels::sm90 {

inline constexpr int kWorkSlots = 3;  // the item at hand, the next, and one that is placed ahead

struct alignas(16) Work {
  plan::WorkItem item;
  Document document;
  int key_head = 0;
  Range visits;       // key tiles (queries' items) or 64-query steps (keys' items)
  bool last = false;  // the list is at its end, and this is no item
};

/// A document from the offsets alone.
__device__ __forceinline__ Document load_document(const std::int32_t* cu_seqlens_q,
                                                  const std::int32_t* cu_seqlens_k, int document) {
  Document d;
  d.q_token = cu_seqlens_q[document];
  d.k_token = cu_seqlens_k[document];
  d.q_len = static_cast<int>(cu_seqlens_q[document + 1] - d.q_token);
  d.k_len = static_cast<int>(cu_seqlens_k[document + 1] - d.k_token);
  d.q_slot = document_slot(d.q_token, document);
  d.k_slot = document_slot(d.k_token, document);
  return d;
}

/// Takes the next item of the list; count -1 at its end. Params has items, num_items and next_item.
template <class Params>
__device__ __forceinline__ plan::WorkItem take_item(const Params& params) {
  const int index = atomicAdd(params.next_item, 1);
  if (index >= *params.num_items) return {.count = -1};
  const int4 raw = __ldg(reinterpret_cast<const int4*>(params.items) + index);
  return {raw.x, raw.y, raw.z, raw.w};
}

/// What an item is about. kKeys: the items are keys of key heads, not queries. Params has
/// cu_seqlens_q, cu_seqlens_k, mask and queries_per_key_head.
template <bool kKeys, class Params>
__device__ __forceinline__ void describe_work(const Params& params, const plan::WorkItem& item,
                                              Work& work) {
  work.item = item;
  work.last = item.count < 0;
  if (work.last) return;
  work.document = load_document(params.cu_seqlens_q, params.cu_seqlens_k, item.document);
  work.key_head = kKeys ? item.head : item.head / params.queries_per_key_head;
  // The mask is a band: its ends never decrease with the row.
  const Document d = work.document;
  const int first = item.first, end = first + item.count - 1;
  const auto seen = [&](int row) {
    return kKeys ? visible_queries(params.mask, d.q_len, d.k_len, row)
                 : visible_keys(params.mask, d.q_len, d.k_len, row);
  };
  const Range range{seen(first).begin, seen(end).end};
  constexpr int kStep = kKeys ? stages::kQueryStep : stages::kKeyTile;
  work.visits =
      range.empty() ? Range{0, 0} : Range{range.begin / kStep, (range.end - 1) / kStep + 1};
}

/// One thread: takes the next item and writes it to its slot of the ring as soon as consumers have
/// handed that back. The caller arrives on the slot's full barrier, with whatever else belongs to
/// the slot, and advances. Returns the slot: a loop with few registers reads the item back from it
/// where it needs it.
template <bool kKeys, int kSlots, class Params>
__device__ __forceinline__ const Work& place_work(const Params& params, Work (&slots)[kSlots],
                                                  const tile::RingBarriers<kSlots>& ring,
                                                  tile::RingPosition<kSlots> at) {
  const plan::WorkItem item = take_item(params);
  ring.wait_empty(at);
  describe_work<kKeys>(params, item, slots[at.stage]);
  return slots[at.stage];
}

}  // namespace mxattn::kernels::sm90
