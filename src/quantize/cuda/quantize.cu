// Q, K, V to codes, exponents, transposed codes and norms, reading each tensor once.
//
// An item is a tile of slots of one head (items.cuh). CTAs stay: while one works on a tile, the
// rows of its next one are on their way to shared memory.
//
// A running exponent needs the maximum of all earlier tokens of the document. Each tile publishes
// the maximum of what its last document holds in it, and looks back over the tiles before it until
// one knows the maximum from the document's start. A CTA takes its items in order and never waits
// before it publishes, so the first unfinished item never waits.
#include <algorithm>

#include "ptx/grid.h"
#include "quantize/cuda/items.cuh"
#include "quantize/cuda/launch.h"
#include "quantize/cuda/quantize.h"
#include "quantize/cuda/tile.cuh"

namespace mxattn::cuda {
namespace {

constexpr int kNothing = -128;    // the maximum of no token
constexpr int kStreamTiles = 16;  // at least that many on average
constexpr int kMinTickets = 6;    // of a CTA

/// How tiles of a scale group are worked on.
template <ScaleGroup kGroup>
struct Config {
  static constexpr bool kRunning = kGroup == ScaleGroup::kRunning;
  static constexpr bool kBlocks = kGroup == ScaleGroup::kBlock32;
  /// CTAs on a multiprocessor. The other half of a block takes registers.
  static constexpr int kCtas = kBlocks ? 3 : 4;
};

// ---- maxima of earlier tiles ------------------------------------------------------------------

// A published word: 0 = nothing yet, else kind and value + kBias.
constexpr std::uint32_t kPartial = 1u << 16;   // maximum of this tile only
constexpr std::uint32_t kComplete = 2u << 16;  // maximum from the document's start
constexpr int kBias = 128;

__device__ __forceinline__ void publish(std::uint32_t* word, std::uint32_t kind, int value) {
  if (threadIdx.x % 32 == 0) atomicExch(word, kind | static_cast<std::uint32_t>(value + kBias));
}

__device__ __forceinline__ int value_of(std::uint32_t word) {
  return static_cast<int>(word & 0xFFFFu) - kBias;
}

/// A tile's word; before the first tile there is nothing.
__device__ __forceinline__ std::uint32_t peek(const std::uint32_t* words, int tile) {
  if (tile < 0) return kComplete | (kNothing + kBias);
  return *static_cast<const volatile std::uint32_t*>(words + tile);
}

/// Maximum of the document's tokens in the tiles before `tile`, of which all but the one where it
/// begins hold nothing else. One warp; `word` is what peek() saw of the last of them some time ago.
__device__ __forceinline__ int look_back(const std::uint32_t* words, int tile, std::uint32_t word) {
  constexpr unsigned kAll = 0xFFFFFFFFu;
  if (__all_sync(kAll, word >= kComplete)) return value_of(word);
  const int lane = threadIdx.x % 32;
  int maximum = kNothing;
  for (int last = tile - 1;;) {
    word = peek(words, last - lane);
    const unsigned complete = __ballot_sync(kAll, word >= kComplete);
    const unsigned missing = __ballot_sync(kAll, word == 0);
    // Tiles behind the nearest complete one are part of it, or of other documents.
    const unsigned needed = complete ^ (complete - 1);
    if ((missing & needed) == 0) {
      const int value = (needed >> lane & 1u) != 0 ? value_of(word) : kNothing;
      maximum = max(maximum, __reduce_max_sync(kAll, value));
      if (complete != 0) return maximum;
      last -= 32;
    }
  }
}

// ---- maxima inside a tile ---------------------------------------------------------------------

template <class L>
struct Shared {
  RowBuffer<L> rows;
  CodeTile<L> codes;
  Queues queues;
  Items items;
  int maximum[2][kWarps];  // of the exponents of a warp's tokens
  int beyond[2][kWarps];   // of those that share a block with them and lie in another tile
};

/// A warp's part of a tile whose tokens have exponents.
template <class L>
struct Work {
  LaneRows<L> values;
  int exponents[L::kPasses];  // of tokens, or their running maxima inside the warp
  // Of running maxima:
  std::uint32_t word;  // what earlier tiles have published, asked for early
  int before;          // of the document's tokens in earlier warps
  bool joins;          // the warp's document began in an earlier tile
  bool passes;         // a document fills the tile and began in an earlier one
};

/// Exponents to running maxima of the warp's tokens, in place. Returns the last.
template <class L>
__device__ __forceinline__ int run_maxima(int (&exponents)[L::kPasses]) {
  const int lane = threadIdx.x % 32;
  int carried = kNothing;
#pragma unroll
  for (int pass = 0; pass < L::kPasses; ++pass) {
    int value = max(exponents[pass], carried);
#pragma unroll
    for (int lanes = kRowLanes; lanes < 32; lanes *= 2) {
      const int other = __shfl_up_sync(0xFFFFFFFFu, value, lanes);
      if (lane >= lanes) value = max(value, other);
    }
    exponents[pass] = value;
    carried = __shfl_sync(0xFFFFFFFFu, value, 31);
  }
  return carried;
}

/// Maximum over the warp's tokens.
template <class L>
__device__ __forceinline__ int warp_maximum(const int (&exponents)[L::kPasses]) {
  int maximum = exponents[0];
#pragma unroll
  for (int pass = 1; pass < L::kPasses; ++pass) maximum = max(maximum, exponents[pass]);
  return __reduce_max_sync(0xFFFFFFFFu, maximum);
}

/// Maximum over the tile's tokens. One warp.
__device__ __forceinline__ int tile_maximum(const int (&maxima)[kWarps]) {
  return __reduce_max_sync(0xFFFFFFFFu, maxima[threadIdx.x % kWarps]);
}

/// What the tile's other warps tell of running maxima; the first warp tells the other tiles.
template <class L>
__device__ __forceinline__ void meet(const Rows (&places)[kWarps], const int (&maxima)[kWarps],
                                     const Item& item, Work<L>& work) {
  constexpr unsigned kAll = 0xFFFFFFFFu;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int lane_document = lane < kWarps ? places[lane].document : -1;
  const int lane_maximum = lane < kWarps ? maxima[lane] : kNothing;
  const int document = places[warp].document;
  const int first_document = places[0].document;
  const bool earlier = lane < warp and lane_document == document;
  work.before = __reduce_max_sync(kAll, earlier ? lane_maximum : kNothing);
  const bool enters = first_document >= 0 and first_document < item.tile * L::kSlots;
  work.joins = enters and document == first_document;
  if (warp == 0) {
    const int last_document = places[kWarps - 1].document;
    work.passes = enters and document == last_document;
    if (last_document < 0) return;  // no tile of the stream follows
    const int last =
        __reduce_max_sync(kAll, lane_document == last_document ? lane_maximum : kNothing);
    publish(item.words + item.tile, work.passes ? kPartial : kComplete, last);
  }
}

/// Slots from the warp's to those of the same block of 32 tokens that its own 16 do not hold.
__device__ __forceinline__ int to_other_half(const Rows& rows) {
  static_assert(stages::kBlockTokens == 2 * kGroup);
  return rows.first / kGroup % 2 == 0 ? kGroup : -kGroup;
}

/// Whether those slots belong to another tile. Documents start at multiples of 16 slots, so blocks
/// may straddle two tiles.
template <class L>
__device__ __forceinline__ bool leaves_tile(const Rows& rows) {
  const int slot = static_cast<int>(threadIdx.x) / 32 * L::kWarpSlots + to_other_half(rows);
  return slot < 0 or slot >= L::kSlots;
}

/// Exponent of the warp's block of 32 tokens. `beyond` is for those that leave the tile.
template <class L>
__device__ __forceinline__ int block_maximum(const Rows (&places)[kWarps],
                                             const int (&maxima)[kWarps],
                                             const int (&beyond)[kWarps]) {
  constexpr int kGroupWarps = kGroup / L::kWarpSlots;
  const int warp = threadIdx.x / 32;
  const int own = warp / kGroupWarps * kGroupWarps;
  const Rows& place = places[warp];
  const bool leaves = leaves_tile<L>(place);
  const int other = own + to_other_half(place) / L::kWarpSlots;
  int maximum = kNothing;
#pragma unroll
  for (int w = 0; w < kGroupWarps; ++w) {
    maximum = max(maximum, maxima[own + w]);
    if (leaves) {
      maximum = max(maximum, beyond[own + w]);
    } else if (places[other + w].document == place.document) {
      maximum = max(maximum, maxima[other + w]);
    }
  }
  return maximum;
}

// ---- kernel -----------------------------------------------------------------------------------

template <class L, class C>
__global__ void __launch_bounds__(kThreads, C::kCtas)
    quantize_kernel(const __grid_constant__ Batch batch, ExponentRule rule) {
  __shared__ Shared<L> shared;
  ptx::launch_dependents();
  ptx::wait_on_dependencies();
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int slot = warp * L::kWarpSlots;  // of the tile

  // Tickets are drawn by the warps in turn.
  const unsigned ticket_items = 1u << batch.ticket_bits;
  const auto draws = [&](unsigned i) {
    return i % ticket_items == 0 and
           (i >> batch.ticket_bits) % kWarps == static_cast<unsigned>(warp);
  };
  const auto draw = [&] { return lane == 0 ? atomicAdd(batch.ticket, 1u) : 0; };
  const auto look_up_items = [&](unsigned i, std::uint32_t ticket) {
    look_up<L>(batch, shared.queues, static_cast<int>(__shfl_sync(0xFFFFFFFFu, ticket, 0)), i,
               shared.items);
  };
  const auto fetch = [&](unsigned i) {
    const Item& item = shared.items[i];
    if (item.present()) {
      shared.rows.fetch(item.rows(), item.aligned, 0, shared.items.places_of(i)[warp]);
    }
    ptx::copy_async_commit_group();
  };

  // Rows to exponents of tokens, and what of them other warps need.
  const auto survey = [&](unsigned i, Work<L>& work) {
    const Item& item = shared.items[i];
    const Rows& place = shared.items.places_of(i)[warp];
    const bool rotated = item.rotate;
    const auto find_exponents = [&](const Rows& rows) {
      token_exponents<L>(rule, work.values, rotated ? L::kRotationNorm : 1.0f, work.exponents);
#pragma unroll
      for (int pass = 0; pass < L::kPasses; ++pass) {
        if (lane_row(pass) >= rows.left) work.exponents[pass] = kNothing;
      }
    };
    if constexpr (C::kBlocks) {
      int maximum = kNothing;
      if (place.document >= 0 and leaves_tile<L>(place)) {
        const Rows rows = place.shifted(to_other_half(place));
        load_rows<L>(item.rows(), item.aligned, 0, rows, work.values);
        if (rotated) rotate<L>(work.values);
        find_exponents(rows);
        maximum = warp_maximum<L>(work.exponents);
      }
      if (lane == 0) shared.beyond[i % 2][warp] = maximum;
    }
    ptx::copy_async_wait_group<0>();
    __syncwarp();  // the lanes' parts of the rows are there
    if (rotated) {
      take_rotated_rows<L>(shared.rows, work.values);
    } else {
      take_rows<L>(shared.rows, work.values);
    }
    __syncwarp();  // and have been read
    fetch(i + 1);
    if constexpr (C::kRunning) work.word = peek(in_global(item.words), item.tile - 1);
    find_exponents(place);
    int maximum = kNothing;
    if constexpr (C::kRunning) maximum = run_maxima<L>(work.exponents);
    if constexpr (C::kBlocks) maximum = warp_maximum<L>(work.exponents);
    if (lane == 0) shared.maximum[i % 2][warp] = maximum;
  };

  // Exponents of operands, codes, norms. The exponents of the warp's tokens are at least `before`.
  const auto encode = [&](unsigned i, Work<L>& work, int before) {
    const Item& item = shared.items[i];
    const Rows& place = shared.items.places_of(i)[warp];
#pragma unroll
    for (int pass = 0; pass < L::kPasses; ++pass) {
      int exponent = work.exponents[pass];
      if constexpr (C::kRunning) exponent = stages::running_exponent(max(exponent, before));
      if constexpr (C::kBlocks) exponent = before;
      const bool token = lane_row(pass) < place.left;
      work.exponents[pass] = token ? exponent : stages::kTokenExponentMin;
    }
    if (place.document >= 0) {
      encode_rows<L>(work.values, work.exponents, item.rotate ? L::kRotationNorm : 1.0f, slot,
                     shared.codes);
      __syncwarp();
      store_rows<L>(shared.codes, slot, in_global(item.codes));
      if (lane % kRowLanes == 0) {
#pragma unroll
        for (int pass = 0; pass < L::kPasses; ++pass) {
          in_global(item.exponents)[slot + lane_row(pass)] =
              static_cast<std::int8_t>(work.exponents[pass]);
        }
      }
      if (item.norms != nullptr) {
#pragma unroll
        for (int pass = 0; pass < L::kPasses; ++pass) {
          const int at = slot + lane_row(pass);
          const int norm = code_norm<L>(shared.codes, at, work.exponents[pass]);
          if (lane % kRowLanes == 0) in_global(item.norms)[at] = static_cast<std::int8_t>(norm);
        }
      }
    }
    if (item.transposed != nullptr) {
      __syncthreads();
      store_transposed<L>(shared.codes, in_global(item.transposed), item.slots, item.begin,
                          item.end);
    }
  };

  if (warp < kMaxTensors) cut<L>(batch, warp, shared.queues);
  __syncthreads();
  order(batch, shared.queues);
  __syncthreads();
  if (warp == 0) {
    for (unsigned i = 0; i < 2; i += ticket_items) look_up_items(i, draw());
  }
  __syncthreads();
  fetch(0);
  std::uint32_t ticket = draws(2) ? draw() : 0;  // for the items from i + 2 on
  for (unsigned i = 0; shared.items[i].present(); ++i) {
    const Item& item = shared.items[i];
    const Rows(&places)[kWarps] = shared.items.places_of(i);
    if (draws(i + 2)) look_up_items(i + 2, ticket);
    Work<L> work;
    survey(i, work);
    // Behind it lie what the warps found, the item drawn, and codes that have been read.
    __syncthreads();
    ticket = draws(i + 3) ? draw() : 0;
    int before = kNothing;
    if constexpr (C::kRunning) {
      meet<L>(places, shared.maximum[i % 2], item, work);
      before = work.before;
      if (work.joins) {
        const int earlier = look_back(item.words, item.tile, work.word);
        before = max(before, earlier);
        if (warp == 0 and work.passes) {
          publish(item.words + item.tile, kComplete,
                  max(earlier, tile_maximum(shared.maximum[i % 2])));
        }
      }
    }
    if constexpr (C::kBlocks) {
      before = block_maximum<L>(places, shared.maximum[i % 2], shared.beyond[i % 2]);
    }
    encode(i, work, before);
  }
}

template <class L>
void launch(const Recipe& recipe, std::span<const QuantizeArgs> tensors, std::uint32_t* scratch,
            int multiprocessors, cudaStream_t stream) {
  Batch batch;
  batch.ticket = scratch++;
  int most_tiles = 0, all_heads = 0;
  std::int64_t items = 0;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const QuantizeArgs& tensor = tensors[i];
    batch.tensors[i] = tensor;
    batch.aligned[i] = tensor.x.has_aligned_rows();
    batch.tiles[i] = L::tiles(tensor.out.slots);
    batch.words[i] = scratch;
    const std::int64_t tiles = std::int64_t{tensor.out.heads} * batch.tiles[i];
    scratch += tiles;
    items += tiles;
    most_tiles = std::max(most_tiles, batch.tiles[i]);
    all_heads |= tensor.out.heads;
  }
  if (items == 0) return;
  const auto run = [&]<class C>(C) {
    const std::int64_t most = std::int64_t{C::kCtas} * multiprocessors;
    // Streams are of use where tiles look back.
    if (C::kRunning) batch.streams = std::clamp(most_tiles / kStreamTiles, 1, kMaxStreams);
    // Tickets of as many items as divide all heads and leave each CTA some.
    const auto fits = [&](int bits) {
      return all_heads % (1 << bits) == 0 and items >> bits >= kMinTickets * most;
    };
    while (batch.ticket_bits < kMaxTicketBits and fits(batch.ticket_bits + 1)) ++batch.ticket_bits;
    const auto ctas = static_cast<unsigned>(std::min(items >> batch.ticket_bits, most));
    launch_overlapping(quantize_kernel<L, C>, dim3(ctas), kThreads, 0, stream, batch,
                       recipe.exponent_rule);
  };
  switch (recipe.scale_group) {
    case ScaleGroup::kRunning:
      run(Config<ScaleGroup::kRunning>{});
      break;
    case ScaleGroup::kToken:
      run(Config<ScaleGroup::kToken>{});
      break;
    case ScaleGroup::kBlock32:
      run(Config<ScaleGroup::kBlock32>{});
      break;
    case ScaleGroup::kNone:
    case ScaleGroup::kTensor:
      MXATTN_CHECK(false, "no exponents for groups of tokens");
  }
}

}  // namespace

std::int64_t quantize_scratch_words(int heads, std::int64_t slots) {
  return 1 + std::int64_t{heads} * std::max(Layout<64>::tiles(slots), Layout<128>::tiles(slots));
}

void quantize(const Recipe& recipe, std::span<const QuantizeArgs> tensors, std::uint32_t* scratch,
              int multiprocessors, cudaStream_t stream) {
  if (tensors.empty()) return;
  const int dim = tensors.front().out.dim;
  MXATTN_CHECK(tensors.size() <= kMaxTensors, tensors.size(), " tensors");
  for (const QuantizeArgs& tensor : tensors) {
    MXATTN_CHECK(tensor.out.dim == dim, "tensors of dim ", dim, " and ", tensor.out.dim);
  }
  with_layout(dim,
              [&]<class L>(L) { launch<L>(recipe, tensors, scratch, multiprocessors, stream); });
}

}  // namespace mxattn::cuda
