// The order in which CTAs of quantize.cu take tiles of slots.
//
// A running maximum needs the tiles before in the same document. So that those were finished long
// ago, rather than are under way on other CTAs, the slots of a tensor are cut into streams, which
// begin with a document, and all streams of all heads of all tensors advance together, tile by
// tile. Only where a document is longer than a stream are its tiles taken shortly after each other.
//
// A ticket is a tile of a few consecutive heads: so many items, for which one warp of the CTA finds
// out together where they are.
//
// Tiles begin at multiples of their slots. Where streams meet inside one, each has an item there,
// without the slots of the others.
#pragma once

#include "quantize/cuda/quantize.h"
#include "quantize/cuda/tile.cuh"

namespace mxattn::cuda {

constexpr int kMaxStreams = 32;    // of a tensor: a lane each
constexpr int kMaxTicketBits = 2;  // 2^so many items are the most of a ticket
constexpr unsigned kItems = 8;     // a CTA's items between look-up and codes, or more
constexpr int kMaxQueues = kMaxTensors * kMaxStreams;
static_assert(kMaxQueues < kThreads);

/// The tensors of a call.
struct Batch {
  QuantizeArgs tensors[kMaxTensors];
  bool aligned[kMaxTensors] = {};
  std::uint32_t* words[kMaxTensors] = {};  // what tiles publish, (heads, tiles)
  int tiles[kMaxTensors] = {};             // of a head; 0 where there is no tensor
  int streams = 1;                         // of each tensor
  int ticket_bits = 0;                     // 2^ticket_bits items make a ticket
  std::uint32_t* ticket = nullptr;         // the next one
};

/// A tile of a stream in a head. Pointers are to the head, from `codes` on to the tile's first
/// slot.
struct alignas(16) Item {
  const std::uint16_t* x;
  std::uint32_t* words;
  std::uint8_t* codes;
  std::int8_t* exponents;
  std::int8_t* norms;         // may be null
  std::uint8_t* transposed;   // may be null
  std::int64_t token_stride;  // of x
  std::int64_t slots;         // of the head
  int tile;                   // -1: there are no more items
  int begin, end;             // slots of the tile that are in the stream
  bool rotate, aligned;

  __device__ __forceinline__ bool present() const { return tile >= 0; }
  __device__ __forceinline__ Bf16View rows() const {
    Bf16View view;
    view.data = x;
    view.token_stride = token_stride;
    return view;
  }
};

/// Tells the compiler what a pointer that lay in shared memory points to.
template <class T>
__device__ __forceinline__ T* in_global(T* pointer) {
  __builtin_assume(__isGlobal(pointer));
  return pointer;
}

/// A queue is a stream of a tensor in all its heads. Heads are counted in tickets.
struct Queues {
  int begins[kMaxTensors][kMaxStreams + 1];     // first slots of streams
  int documents[kMaxTensors][kMaxStreams + 1];  // first documents of streams
  int tiles[kMaxTensors][kMaxStreams];          // of a head
  // By falling numbers of tiles, the last of no tile:
  int streams[kMaxQueues];      // kMaxTensors times the stream, plus the tensor
  int lengths[kMaxQueues + 1];  // tiles of a head
  int heads[kMaxQueues];        // of this queue and those before it
  int tickets[kMaxQueues + 1];  // of the first lengths[] tiles of all queues
};

/// Cuts a tensor into streams of at least its share of the slots. One warp.
template <class L>
__device__ __forceinline__ void cut(const Batch& batch, int tensor, Queues& queues) {
  const QuantizeArgs& args = batch.tensors[tensor];
  const int lane = threadIdx.x % 32;
  const int slots = static_cast<int>(args.out.slots);
  const int share = (batch.tiles[tensor] + batch.streams - 1) / batch.streams * L::kSlots;
  int document = 0, begin = 0;
  if (lane > 0) {
    document = args.num_documents;
    begin = slots;
    if (lane < batch.streams and lane * share < slots) {
      // The first document that begins in the lane's share or behind it.
      const int first = document_of(args.cu_seqlens, 0, document, lane * share - 1) + 1;
      if (first < document) {
        document = first;
        begin = static_cast<int>(document_slot(__ldg(args.cu_seqlens + first), first));
      }
    }
  }
  int end = __shfl_down_sync(0xFFFFFFFFu, begin, 1);
  if (lane == 31) end = slots;
  queues.begins[tensor][lane] = begin;
  queues.documents[tensor][lane] = document;
  queues.tiles[tensor][lane] =
      begin == end ? 0 : (end + L::kSlots - 1) / L::kSlots - begin / L::kSlots;
  if (lane == 31) {
    queues.begins[tensor][kMaxStreams] = slots;
    queues.documents[tensor][kMaxStreams] = args.num_documents;
  }
}

/// Orders the queues, one a thread, when all tensors have been cut.
__device__ __forceinline__ void order(const Batch& batch, Queues& queues) {
  const int queue = threadIdx.x;
  const int count = kMaxTensors * batch.streams;
  if (queue > kMaxQueues) return;
  int rank = queue, length = 0, heads = 0, tickets = 0;
  if (queue < count) {
    rank = 0;
    length = queues.tiles[queue % kMaxTensors][queue / kMaxTensors];
    for (int stream = 0; stream < batch.streams; ++stream) {
#pragma unroll
      for (int tensor = 0; tensor < kMaxTensors; ++tensor) {
        const int other = kMaxTensors * stream + tensor;
        const int tiles = queues.tiles[tensor][stream];
        const int other_heads = batch.tensors[tensor].out.heads >> batch.ticket_bits;
        const bool before = tiles > length or (tiles == length and other < queue);
        rank += before;
        heads += before or other == queue ? other_heads : 0;
        tickets += other_heads * min(tiles, length);
      }
    }
  }
  queues.lengths[rank] = length;
  queues.tickets[rank] = tickets;
  if (rank == kMaxQueues) return;
  queues.streams[rank] = queue;
  queues.heads[rank] = queue < count ? heads : std::numeric_limits<int>::max();
}

/// How many queues have a value above `bound`. One warp.
__device__ __forceinline__ int count_above(const int* values, int bound) {
  int count = 0;
#pragma unroll
  for (int q = 0; q < kMaxQueues; q += 32) {
    count += __popc(__ballot_sync(0xFFFFFFFFu, values[q + threadIdx.x % 32] > bound));
  }
  return count;
}

/// The items of a CTA: item i at i % kItems.
struct Items {
  Item items[kItems];
  Rows places[kItems][kWarps];  // of the warps' slots; document -1: none are the item's

  __device__ __forceinline__ const Item& operator[](unsigned i) const { return items[i % kItems]; }
  __device__ __forceinline__ const Rows (&places_of(unsigned i) const)[kWarps] {
    return places[i % kItems];
  }
};

/// Makes a ticket the CTA's items from `i` on. One warp.
template <class L>
__device__ __forceinline__ void look_up(const Batch& batch, const Queues& queues, int ticket,
                                        unsigned i, Items& items) {
  const int lane = threadIdx.x % 32;
  const int count = 1 << batch.ticket_bits;
  Item& item = items.items[(i + lane) % kItems];  // for the first lanes, one each
  // The first `active` queues go on here; the others have ended.
  const int active = count_above(queues.tickets, ticket);
  if (active == 0) {
    if (lane < count) item.tile = -1;
    return;
  }
  const int heads = queues.heads[active - 1];
  const int at = ticket - queues.tickets[active];
  const int column = at % heads;
  const int rank = kMaxQueues - count_above(queues.heads, column);
  const int tensor = queues.streams[rank] % kMaxTensors;
  const int stream = queues.streams[rank] / kMaxTensors;
  const QuantizeArgs& args = batch.tensors[tensor];
  const int begin = queues.begins[tensor][stream];
  const int end = queues.begins[tensor][stream + 1];
  const int tile = begin / L::kSlots + queues.lengths[active] + at / heads;
  const int first = tile * L::kSlots;
  // A place a lane: kWarps times the item, plus the warp.
  static_assert(kWarps << kMaxTicketBits <= 32);
  if (lane < kWarps * count) {
    const int slot = first + lane % kWarps * L::kWarpSlots;
    Rows place{0, 0, 0, -1};
    if (begin <= slot and slot < end) {
      const int document = document_of(args.cu_seqlens, queues.documents[tensor][stream],
                                       queues.documents[tensor][stream + 1], slot);
      place = rows_of(span_of(args.cu_seqlens, args.num_documents, document), slot);
    }
    items.places[(i + lane / kWarps) % kItems][lane % kWarps] = place;
  }
  if (lane < count) {
    const int head =
        ((column - (rank > 0 ? queues.heads[rank - 1] : 0)) << batch.ticket_bits) + lane;
    const std::int64_t row = head * args.out.slots + first;
    item.x = args.x.row(0, head);
    item.words = batch.words[tensor] + std::int64_t{head} * batch.tiles[tensor];
    item.codes = args.out.codes + row * L::kDim;
    item.exponents = args.out.exponents + row;
    item.norms = args.out.norms != nullptr ? args.out.norms + row : nullptr;
    item.transposed = args.transposed != nullptr
                          ? args.transposed + (head * args.out.slots * L::kDim + first)
                          : nullptr;
    item.token_stride = args.x.token_stride;
    item.slots = args.out.slots;
    item.tile = tile;
    item.begin = max(begin - first, 0);
    item.end = min(end - first, L::kSlots);
    item.rotate = args.rotate;
    item.aligned = batch.aligned[tensor];
  }
}

}  // namespace mxattn::cuda
