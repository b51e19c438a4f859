// Q, K, V to codes, exponents, transposed codes and norms, reading each tensor once.
//
// An item is a tile of slots of one head. CTAs stay: while one works on a tile, the rows of its
// next items are on their way to shared memory.
//
// A running exponent needs the maximum of all earlier tokens of the document. CTAs take items in
// order; each publishes the maximum of what its last document holds in the tile, and looks back
// over the tiles before it until one knows the maximum from the document's start. It encodes a tile
// only after it has published the next one: all work at different phases, and what a tile needs of
// twenty others was published a whole period before. A CTA publishes and encodes its items in order
// and never waits before it publishes, so the first unfinished item never waits.
#include <algorithm>

#include "quantize/cuda/launch.h"
#include "quantize/cuda/quantize.h"
#include "quantize/cuda/tile.cuh"

namespace mxattn::cuda {
namespace {

constexpr int kNothing = -128;  // the maximum of no token

/// How tiles of a scale group are worked on.
template <ScaleGroup kGroup>
struct Config {
  static constexpr bool kRunning = kGroup == ScaleGroup::kRunning;
  static constexpr bool kBlocks = kGroup == ScaleGroup::kBlock32;
  /// CTAs on a multiprocessor. A tile that waits and the other half of a block take registers.
  static constexpr int kCtas = kRunning ? 2 : kBlocks ? 3 : 4;
};

/// The items of all tensors. Tiles of all heads of all tensors advance together, so that a tile's
/// predecessors are earlier items, and few of them unfinished.
struct Batch {
  QuantizeArgs tensors[kMaxTensors];  // by descending numbers of tiles
  bool aligned[kMaxTensors] = {};
  std::uint32_t* words[kMaxTensors] = {};  // what tiles publish, (heads, tiles)
  int tiles[kMaxTensors] = {};             // of a head
  int heads[kMaxTensors] = {};             // of this tensor and those before it
  int begins[kMaxTensors] = {};  // the item at which only this tensor and those before go on
  int items = 0;
  std::uint32_t* ticket = nullptr;  // the next item
};

struct alignas(16) Item {
  int tensor;  // -1: there are no more
  int head;
  int tile;
};

__device__ __forceinline__ Item item_of(const Batch& batch, std::uint32_t ticket) {
  const int index = static_cast<int>(ticket);
  if (index >= batch.items) return {-1, 0, 0};
  // The tensors up to `last` go on here; those behind it have ended, at its first tile.
  int last = 0;
  while (index < batch.begins[last]) ++last;
  const int first_tile = last + 1 < kMaxTensors ? batch.tiles[last + 1] : 0;
  const int at = index - batch.begins[last];
  const int head = at % batch.heads[last];
  int tensor = 0;
  while (head >= batch.heads[tensor]) ++tensor;
  return {tensor, head - (tensor > 0 ? batch.heads[tensor - 1] : 0),
          first_tile + at / batch.heads[last]};
}

// ---- maxima of earlier tiles ------------------------------------------------------------------

// A published word: 0 = nothing yet, else kind and value + kBias.
constexpr std::uint32_t kPartial = 1u << 16;   // maximum of this tile only
constexpr std::uint32_t kComplete = 2u << 16;  // maximum from the document's start
constexpr int kBias = 128;

__device__ __forceinline__ void publish(std::uint32_t* word, std::uint32_t kind, int value) {
  if (threadIdx.x % 32 == 0) atomicExch(word, kind | static_cast<std::uint32_t>(value + kBias));
}

/// The lane's word of the 32 up to tile `last`; nothing before the first tile.
__device__ __forceinline__ std::uint32_t peek(const std::uint32_t* words, int last) {
  const int at = last - static_cast<int>(threadIdx.x) % 32;
  if (at < 0) return kComplete | (kNothing + kBias);
  return *static_cast<const volatile std::uint32_t*>(words + at);
}

/// Maximum of the document's tokens in the tiles before `tile`, of which all but the one where it
/// begins hold nothing else. One warp; `word` is what peek() saw of them some time ago.
__device__ __forceinline__ int look_back(const std::uint32_t* words, int tile, std::uint32_t word) {
  constexpr unsigned kAll = 0xFFFFFFFFu;
  const unsigned lane = threadIdx.x % 32;
  int maximum = kNothing;
  for (int last = tile - 1;;) {
    const unsigned complete = __ballot_sync(kAll, word >= kComplete);
    const unsigned missing = __ballot_sync(kAll, word == 0);
    // Tiles behind the nearest complete one are part of it, or of other documents.
    const unsigned needed = complete ^ (complete - 1);
    if ((missing & needed) == 0) {
      const int value =
          (needed >> lane & 1u) != 0 ? static_cast<int>(word & 0xFFFFu) - kBias : kNothing;
      maximum = max(maximum, __reduce_max_sync(kAll, value));
      if (complete != 0) return maximum;
      last -= 32;
    }
    word = peek(words, last);
  }
}

// ---- maxima inside a tile ---------------------------------------------------------------------

constexpr unsigned kBuffers = 2;  // tiles whose rows are on their way to a CTA
constexpr unsigned kItems = 8;    // a CTA's items that a warp may ask for at the same time
constexpr unsigned kPlaces = 4;   // those between their fetch and their codes

template <class L>
struct Shared {
  RowBuffer<L> rows[kBuffers];
  CodeTile<L> codes;
  Item items[kItems];               // item i of the CTA at i % kItems; so for the following
  Rows places[kPlaces][kWarps];     // of the warps' slots, each for its warp alone
  Span spans[kMaxTensors][kWarps];  // the documents of the last places in each tensor
  int maximum[2][kWarps];           // of the exponents of a warp's tokens
  int beyond[2][kWarps];            // of those that share a block with them and lie in another tile
  int document[2][kWarps];          // Rows::document, -1 where there are no slots
};

/// A warp's part of a tile whose tokens have exponents.
template <class L>
struct Work {
  LaneRows<L> values;
  int exponents[L::kPasses];  // of tokens, or their running maxima inside the warp
  // Of running maxima:
  int before;   // of the document's tokens in earlier warps
  int last;     // of the last document
  bool joins;   // the warp's document began in an earlier tile
  bool passes;  // a document fills the tile and began in an earlier one
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

/// What the tile's other warps tell of running maxima; the first warp tells the other tiles.
template <class L>
__device__ __forceinline__ void meet(const int (&documents)[kWarps], const int (&maxima)[kWarps],
                                     int tile, std::uint32_t* word, Work<L>& work) {
  constexpr unsigned kAll = 0xFFFFFFFFu;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int lane_document = lane < kWarps ? documents[lane] : -1;
  const int lane_maximum = lane < kWarps ? maxima[lane] : kNothing;
  const int document = documents[warp];
  const bool earlier = lane < warp and lane_document == document;
  work.before = __reduce_max_sync(kAll, earlier ? lane_maximum : kNothing);
  const bool enters = documents[0] < tile * L::kSlots;  // began in an earlier tile
  work.joins = enters and document == documents[0];
  if (warp == 0) {
    const int last_document = documents[kWarps - 1];
    work.passes = enters and document == last_document;
    work.last = __reduce_max_sync(kAll, lane_document == last_document ? lane_maximum : kNothing);
    publish(word, work.passes ? kPartial : kComplete, work.last);
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
__device__ __forceinline__ int block_maximum(const int (&documents)[kWarps],
                                             const int (&maxima)[kWarps],
                                             const int (&beyond)[kWarps], const Rows& place) {
  constexpr int kGroupWarps = kGroup / L::kWarpSlots;
  const int warp = threadIdx.x / 32;
  const int own = warp / kGroupWarps * kGroupWarps;
  const bool leaves = leaves_tile<L>(place);
  const int other = own + to_other_half(place) / L::kWarpSlots;
  int maximum = kNothing;
#pragma unroll
  for (int w = 0; w < kGroupWarps; ++w) {
    maximum = max(maximum, maxima[own + w]);
    if (leaves) {
      maximum = max(maximum, beyond[own + w]);
    } else if (documents[other + w] == place.document) {
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
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int slot = warp * L::kWarpSlots;  // of the tile

  // Where the warp stands in item i of the CTA.
  const auto find = [&](unsigned i) {
    const Item item = shared.items[i % kItems];
    const QuantizeArgs& args = batch.tensors[item.tensor];
    const int at = item.tile * L::kSlots + slot;
    Span& span = shared.spans[item.tensor][warp];
    if (not holds(span, at)) {
      const Span found = find_span(args.cu_seqlens, args.num_documents, at);
      __syncwarp();
      if (lane == 0) span = found;
      __syncwarp();
    }
    Rows place = rows_of(span, at);
    if (at >= args.out.slots) {  // slots are a multiple of 16
      place.left = 0;
      place.document = -1;
    }
    __syncwarp();  // what was there has been read
    if (lane == 0) shared.places[i % kPlaces][warp] = place;
    __syncwarp();
  };
  const auto fetch = [&](unsigned i) {
    const Item item = shared.items[i % kItems];
    if (item.tensor >= 0) {
      shared.rows[i % kBuffers].fetch(batch.tensors[item.tensor].x, batch.aligned[item.tensor],
                                      item.head, shared.places[i % kPlaces][warp]);
    }
    ptx::copy_async_commit_group();
  };
  const auto words_of = [&](const Item& item) {
    return batch.words[item.tensor] + std::int64_t{item.head} * batch.tiles[item.tensor];
  };

  // Rows to exponents of tokens, and what of them other warps need.
  const auto survey = [&](unsigned i, Work<L>& work) {
    const Item item = shared.items[i % kItems];
    const QuantizeArgs& args = batch.tensors[item.tensor];
    const Rows& place = shared.places[i % kPlaces][warp];
    const float scale = args.rotate ? L::kRotationNorm : 1.0f;
    const auto find_exponents = [&](const Rows& rows) {
      token_exponents<L>(rule, work.values, scale, work.exponents);
#pragma unroll
      for (int pass = 0; pass < L::kPasses; ++pass) {
        if (lane_row(pass) >= rows.left) work.exponents[pass] = kNothing;
      }
    };
    if constexpr (C::kBlocks) {
      int maximum = kNothing;
      if (place.document >= 0 and leaves_tile<L>(place)) {
        const Rows rows = place.shifted(to_other_half(place));
        load_rows<L>(args.x, batch.aligned[item.tensor], item.head, rows, work.values);
        if (args.rotate) rotate<L>(work.values);
        find_exponents(rows);
        maximum = warp_maximum<L>(work.exponents);
      }
      if (lane == 0) shared.beyond[i % 2][warp] = maximum;
    }
    RowBuffer<L>& rows = shared.rows[i % kBuffers];
    ptx::copy_async_wait_group<kBuffers - 1>();
    if (args.rotate) {
      take_rotated_rows<L>(rows, work.values);
    } else {
      take_rows<L>(rows, work.values);
    }
    fetch(i + kBuffers);
    find_exponents(place);
    int maximum = kNothing;
    if constexpr (C::kRunning) maximum = run_maxima<L>(work.exponents);
    if constexpr (C::kBlocks) maximum = warp_maximum<L>(work.exponents);
    if (lane == 0) {
      shared.maximum[i % 2][warp] = maximum;
      shared.document[i % 2][warp] = place.document;
    }
  };

  // Exponents of operands, codes, norms. The exponents of the warp's tokens are at least `before`.
  const auto encode = [&](unsigned i, Work<L>& work, int before) {
    const Item item = shared.items[i % kItems];
    const QuantizeArgs& args = batch.tensors[item.tensor];
    const Rows& place = shared.places[i % kPlaces][warp];
    const float scale = args.rotate ? L::kRotationNorm : 1.0f;
#pragma unroll
    for (int pass = 0; pass < L::kPasses; ++pass) {
      int exponent = work.exponents[pass];
      if constexpr (C::kRunning) exponent = stages::running_exponent(max(exponent, before));
      if constexpr (C::kBlocks) exponent = before;
      const bool token = lane_row(pass) < place.left;
      work.exponents[pass] = token ? exponent : stages::kTokenExponentMin;
    }
    const std::int64_t head_slots = item.head * args.out.slots;
    const std::int64_t row = head_slots + item.tile * L::kSlots;
    if (place.document >= 0) {
      encode_rows<L>(work.values, work.exponents, scale, slot, args.out.codes + row * L::kDim, true,
                     args.out.norms != nullptr or args.transposed != nullptr, shared.codes);
      if (lane % kRowLanes == 0) {
#pragma unroll
        for (int pass = 0; pass < L::kPasses; ++pass) {
          args.out.exponents[row + slot + lane_row(pass)] =
              static_cast<std::int8_t>(work.exponents[pass]);
        }
      }
      if (args.out.norms != nullptr) {
        __syncwarp();
#pragma unroll
        for (int pass = 0; pass < L::kPasses; ++pass) {
          const int at = slot + lane_row(pass);
          const int norm = code_norm<L>(shared.codes, at, work.exponents[pass]);
          if (lane % kRowLanes == 0) args.out.norms[row + at] = static_cast<std::int8_t>(norm);
        }
      }
    }
    if (args.transposed != nullptr) {
      __syncthreads();
      const int slots = static_cast<int>(args.out.slots) - item.tile * L::kSlots;
      store_transposed<L>(shared.codes,
                          args.transposed + head_slots * L::kDim + item.tile * L::kSlots,
                          args.out.slots, slots);
    }
  };

  // The last warp draws items, one more than the rows of which are asked for.
  const bool draws = threadIdx.x == kThreads - 1;
  if (draws) {
    for (unsigned i = 0; i <= kBuffers; ++i) {
      shared.items[i] = item_of(batch, atomicAdd(batch.ticket, 1u));
    }
  }
  if (lane < kMaxTensors) shared.spans[lane][warp] = {};
  __syncthreads();
  for (unsigned i = 0; i < kBuffers; ++i) {
    if (shared.items[i].tensor >= 0) find(i);
    fetch(i);
  }

  // Item i gets its exponents, and its codes unless it has to look back; else the one before it,
  // `waiting`, does. Returns whether there is more to do.
  const auto step = [&](unsigned i, Work<L>& work, Work<L>& waiting) {
    const Item item = shared.items[i % kItems];
    const Item previous = shared.items[(i - 1) % kItems];
    const bool present = item.tensor >= 0;
    const bool looks = C::kRunning and i > 0 and waiting.joins;
    std::uint32_t word = 0;  // what other CTAs have published, asked for early
    if (looks) word = peek(words_of(previous), previous.tile - 1);
    std::uint32_t ticket = 0;
    if (draws) ticket = atomicAdd(batch.ticket, 1u);
    if (present) {
      if (shared.items[(i + kBuffers) % kItems].tensor >= 0) find(i + kBuffers);
      survey(i, work);
    }
    if (draws) shared.items[(i + kBuffers + 1) % kItems] = item_of(batch, ticket);
    // Behind it lie what the warps found, the item drawn, and codes that have been read.
    __syncthreads();
    const int(&documents)[kWarps] = shared.document[i % 2];
    const int(&maxima)[kWarps] = shared.maximum[i % 2];
    if constexpr (C::kRunning) {
      if (present) meet<L>(documents, maxima, item.tile, words_of(item) + item.tile, work);
      if (i > 0) {
        int before = waiting.before;
        if (looks) {
          std::uint32_t* const words = words_of(previous);
          const int earlier = look_back(words, previous.tile, word);
          before = max(before, earlier);
          if (warp == 0 and waiting.passes) {
            publish(words + previous.tile, kComplete, max(earlier, waiting.last));
          }
        }
        encode(i - 1, waiting, before);
      }
    } else if (present) {
      int before = kNothing;
      if constexpr (C::kBlocks) {
        before = block_maximum<L>(documents, maxima, shared.beyond[i % 2],
                                  shared.places[i % kPlaces][warp]);
      }
      encode(i, work, before);
    }
    return present;
  };
  if constexpr (C::kRunning) {
    // Copied, 32 moves a lane: two places by turns would double the code and spill.
    Work<L> work, waiting;
    for (unsigned i = 0; step(i, work, waiting); ++i) waiting = work;
  } else {
    Work<L> work;
    for (unsigned i = 0; step(i, work, work); ++i) {
    }
  }
}

template <class L>
void launch(const Recipe& recipe, std::span<const QuantizeArgs> tensors, std::uint32_t* scratch,
            cudaStream_t stream) {
  Batch batch;
  batch.ticket = scratch++;
  const int count = static_cast<int>(tensors.size());
  std::copy(tensors.begin(), tensors.end(), batch.tensors);
  std::stable_sort(batch.tensors, batch.tensors + count,
                   [](const auto& a, const auto& b) { return a.out.slots > b.out.slots; });
  for (int i = 0; i < count; ++i) {
    const QuantizeArgs& tensor = batch.tensors[i];
    batch.aligned[i] = is_aligned(tensor.x);
    batch.tiles[i] = L::tiles(tensor.out.slots);
    batch.heads[i] = (i > 0 ? batch.heads[i - 1] : 0) + tensor.out.heads;
    batch.words[i] = scratch;
    scratch += std::int64_t{tensor.out.heads} * batch.tiles[i];
  }
  for (int i = count - 1; i >= 0; --i) {
    batch.begins[i] = batch.items;
    const int ended = i + 1 < count ? batch.tiles[i + 1] : 0;
    batch.items += batch.heads[i] * (batch.tiles[i] - ended);
  }
  if (batch.items == 0) return;
  const auto run = [&]<class C>(C) {
    const int ctas = std::min(batch.items, C::kCtas * multiprocessors());
    quantize_kernel<L, C><<<ctas, kThreads, 0, stream>>>(batch, recipe.exponent_rule);
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
  MXATTN_CUDA_CHECK(cudaGetLastError());
}

}  // namespace

std::int64_t quantize_scratch_words(int heads, std::int64_t slots) {
  return 1 + std::int64_t{heads} * std::max(Layout<64>::tiles(slots), Layout<128>::tiles(slots));
}

void quantize(const Recipe& recipe, std::span<const QuantizeArgs> tensors, std::uint32_t* scratch,
              cudaStream_t stream) {
  if (tensors.empty()) return;
  const int dim = tensors.front().out.dim;
  MXATTN_CHECK(tensors.size() <= kMaxTensors, tensors.size(), " tensors");
  for (const QuantizeArgs& tensor : tensors) {
    MXATTN_CHECK(tensor.out.dim == dim, "tensors of dim ", dim, " and ", tensor.out.dim);
  }
  with_layout(dim, [&]<class L>(L) { launch<L>(recipe, tensors, scratch, stream); });
}

}  // namespace mxattn::cuda
