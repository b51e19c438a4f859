// Q, K, V to codes, exponents, transposed codes and norms, reading each tensor once.
//
// An item is a tile of slots of one head. CTAs stay: while one waits for the maxima of earlier
// tiles, encodes and stores, the rows of its next item are on their way to shared memory.
//
// A running exponent needs the maximum of all earlier tokens of the document. CTAs take items in
// order; each publishes the maximum of what its last document holds in the tile, and looks back
// over the tiles before it until one knows the maximum from the document's start. A CTA works on
// its items in order, so the first unfinished one never waits.
#include <algorithm>

#include "quantize/cuda/launch.h"
#include "quantize/cuda/quantize.h"
#include "quantize/cuda/tile.cuh"

namespace mxattn::cuda {
namespace {

constexpr int kNothing = -128;  // the maximum of no token

/// CTAs on a multiprocessor. The other half of a block takes registers.
constexpr int ctas_of(ScaleGroup group) { return group == ScaleGroup::kBlock32 ? 3 : 4; }

/// The items of all tensors, one tensor after the other.
struct Batch {
  QuantizeArgs tensors[kMaxTensors];
  bool aligned[kMaxTensors] = {};
  int ends[kMaxTensors] = {};              // of each tensor's items
  std::uint32_t* words[kMaxTensors] = {};  // what tiles publish, (heads, tiles)
  int tiles[kMaxTensors] = {};             // of a head
  int items = 0;
  std::uint32_t* ticket = nullptr;  // the next item
};

/// Tiles of all heads advance together: a tile's predecessor is an earlier item.
struct alignas(16) Item {
  int tensor;  // -1: there are no more
  int head;
  int tile;
};

__device__ __forceinline__ Item item_of(const Batch& batch, std::uint32_t ticket) {
  const int index = static_cast<int>(ticket);
  if (index >= batch.items) return {-1, 0, 0};
  int tensor = 0, begin = 0;
  while (index >= batch.ends[tensor]) begin = batch.ends[tensor++];
  const int heads = batch.tensors[tensor].out.heads;
  return {tensor, (index - begin) % heads, (index - begin) / heads};
}

// ---- maxima of earlier tiles ------------------------------------------------------------------

// A published word: 0 = nothing yet, else kind and value + kBias.
constexpr std::uint32_t kPartial = 1u << 16;   // maximum of this tile only
constexpr std::uint32_t kComplete = 2u << 16;  // maximum from the document's start
constexpr int kBias = 128;

__device__ __forceinline__ void publish(std::uint32_t* word, std::uint32_t kind, int value) {
  if (threadIdx.x % 32 == 0) atomicExch(word, kind | static_cast<std::uint32_t>(value + kBias));
}

/// Maximum of the document's tokens in the tiles before `tile`, of which all but the one where it
/// begins hold nothing else. One warp.
__device__ __forceinline__ int look_back(const volatile std::uint32_t* words, int tile) {
  const int lane = threadIdx.x % 32;
  int maximum = kNothing;
  for (int last = tile - 1;; last -= 32) {
    const int at = last - lane;
    std::uint32_t word = kComplete | (kNothing + kBias);
    if (at >= 0) {
      do {
        word = words[at];
      } while (word == 0);
    }
    const unsigned complete = __ballot_sync(0xFFFFFFFFu, word >= kComplete);
    // Tiles behind the nearest complete one are part of it, or of other documents.
    const int nearest = complete == 0 ? 31 : __ffs(static_cast<int>(complete)) - 1;
    const int value = lane <= nearest ? static_cast<int>(word & 0xFFFFu) - kBias : kNothing;
    maximum = max(maximum, __reduce_max_sync(0xFFFFFFFFu, value));
    if (complete != 0) return maximum;
  }
}

// ---- maxima inside a tile ---------------------------------------------------------------------

template <class L>
struct Shared {
  RowBuffer<L> rows;
  CodeTile<L> codes;
  Item items[2];           // this one and the next, by turns
  Rows places[2][kWarps];  // of the warps' slots in these, each for its warp alone
  Span spans[kWarps];      // the documents of the last places
  int maximum[kWarps];     // of the exponents of a warp's tokens
  int beyond[kWarps];      // of those that share a block with them and lie in another tile
  int document[kWarps];    // Rows::document, -1 where there are no slots
  bool begins;             // a document begins with the tile
  int before;              // maximum of the first document's tokens in earlier tiles
};

/// Exponents to running maxima of the warp's tokens, in place.
template <class L>
__device__ __forceinline__ void run_maxima(int (&exponents)[L::kPasses]) {
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

/// Exponent of the warp's block of 32 tokens.
template <class L>
__device__ __forceinline__ int block_maximum(const Shared<L>& shared, const Rows& place) {
  constexpr int kGroupWarps = kGroup / L::kWarpSlots;
  const int warp = threadIdx.x / 32;
  const int own = warp / kGroupWarps * kGroupWarps;
  const bool leaves = leaves_tile<L>(place);
  const int other = own + to_other_half(place) / L::kWarpSlots;
  int maximum = kNothing;
#pragma unroll
  for (int w = 0; w < kGroupWarps; ++w) {
    maximum = max(maximum, shared.maximum[own + w]);
    if (leaves) {
      maximum = max(maximum, shared.beyond[own + w]);
    } else if (shared.document[other + w] == place.document) {
      maximum = max(maximum, shared.maximum[other + w]);
    }
  }
  return maximum;
}

// ---- kernel -----------------------------------------------------------------------------------

template <class L, ScaleGroup kScaleGroup>
__global__ void __launch_bounds__(kThreads, ctas_of(kScaleGroup))
    quantize_kernel(const __grid_constant__ Batch batch, ExponentRule rule) {
  constexpr bool kRunning = kScaleGroup == ScaleGroup::kRunning;
  constexpr bool kBlocks = kScaleGroup == ScaleGroup::kBlock32;
  __shared__ Shared<L> shared;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int slot = warp * L::kWarpSlots;  // of the tile
  // Where the warp stands in an item; `last` is the tensor that it stood in before.
  const auto find = [&](int turn, int last) {
    const Item item = shared.items[turn];
    const QuantizeArgs& args = batch.tensors[item.tensor];
    const int at = item.tile * L::kSlots + slot;
    if (item.tensor != last or not holds(shared.spans[warp], at)) {
      const Span span = find_span(args.cu_seqlens, args.num_documents, at);
      __syncwarp();
      if (lane == 0) shared.spans[warp] = span;
      __syncwarp();
    }
    Rows place = rows_of(shared.spans[warp], at);
    if (at >= args.out.slots) {  // slots are a multiple of 16
      place.left = 0;
      place.document = -1;
    }
    __syncwarp();  // the place before the last has been read
    if (lane == 0) shared.places[turn][warp] = place;
    __syncwarp();
  };
  const auto fetch = [&](int turn) {
    const Item item = shared.items[turn];
    shared.rows.fetch(batch.tensors[item.tensor].x, batch.aligned[item.tensor], item.head,
                      shared.places[turn][warp]);
  };
  // The last warp draws, the first one looks back.
  const bool draws = threadIdx.x == kThreads - 1;
  for (int turn = 0; turn < 2; ++turn) {
    if (draws) shared.items[turn] = item_of(batch, atomicAdd(batch.ticket, 1u));
    __syncthreads();
    if (turn == 0) {
      if (shared.items[0].tensor < 0) return;
      find(0, -1);
      fetch(0);
    }
  }

  for (int turn = 0;; turn ^= 1) {
    const Item item = shared.items[turn];
    const Rows& place = shared.places[turn][warp];
    const QuantizeArgs& args = batch.tensors[item.tensor];
    std::uint32_t ticket = 0;
    if (draws) ticket = atomicAdd(batch.ticket, 1u);
    const bool more = shared.items[turn ^ 1].tensor >= 0;
    if (more) find(turn ^ 1, item.tensor);

    // Exponents of tokens, and what of them other warps need.
    const float scale = args.rotate ? L::kRotationNorm : 1.0f;
    LaneRows<L> values;
    int exponents[L::kPasses];
    const auto mask_gaps = [&](const Rows& rows) {
#pragma unroll
      for (int pass = 0; pass < L::kPasses; ++pass) {
        if (lane_row(pass) >= rows.left) exponents[pass] = kNothing;
      }
    };
    const auto warp_maximum = [&] {
      int maximum = exponents[0];
#pragma unroll
      for (int pass = 1; pass < L::kPasses; ++pass) maximum = max(maximum, exponents[pass]);
      return __reduce_max_sync(0xFFFFFFFFu, maximum);
    };
    if constexpr (kBlocks) {
      int maximum = kNothing;
      if (place.document >= 0 and leaves_tile<L>(place)) {
        const Rows rows = place.shifted(to_other_half(place));
        load_rows<L>(args.x, batch.aligned[item.tensor], item.head, rows, values);
        if (args.rotate) rotate<L>(values);
        token_exponents<L>(rule, values, scale, exponents);
        mask_gaps(rows);
        maximum = warp_maximum();
      }
      if (lane == 0) shared.beyond[warp] = maximum;
    }
    take_rows<L>(shared.rows, values);
    if (args.rotate) rotate<L>(values);
    token_exponents<L>(rule, values, scale, exponents);
    mask_gaps(place);
    if constexpr (kRunning) run_maxima<L>(exponents);
    const int own_maximum = warp_maximum();
    const int document = place.document;
    if (lane == 0) {
      shared.maximum[warp] = own_maximum;
      shared.document[warp] = document;
    }
    if (threadIdx.x == 0) shared.begins = place.first == 0;
    __syncthreads();

    if (draws) shared.items[turn] = item_of(batch, ticket);  // read after the next barrier
    if (more) fetch(turn ^ 1);
    int before = kNothing;  // what the exponents of the warp's tokens are at least
    bool joins = false;     // the warp's document began in an earlier tile
    if constexpr (kRunning) {
      const int lane_document = lane < kWarps ? shared.document[lane] : -1;
      const int lane_maximum = lane < kWarps ? shared.maximum[lane] : kNothing;
      const bool same = lane_document == document;
      before = __reduce_max_sync(0xFFFFFFFFu, lane < warp and same ? lane_maximum : kNothing);
      const bool enters = item.tile > 0 and not shared.begins;
      joins = enters and document == shared.document[0];
      if (warp == 0) {
        std::uint32_t* const words =
            batch.words[item.tensor] + std::int64_t{item.head} * batch.tiles[item.tensor];
        const int last_document = shared.document[kWarps - 1];
        const bool passes = enters and document == last_document;
        const int last_maximum = __reduce_max_sync(
            0xFFFFFFFFu, lane_document == last_document ? lane_maximum : kNothing);
        publish(words + item.tile, passes ? kPartial : kComplete, last_maximum);
        if (enters) {
          const int earlier = look_back(words, item.tile);
          if (passes) publish(words + item.tile, kComplete, max(earlier, last_maximum));
          if (lane == 0) shared.before = earlier;
        }
      }
    }
    if constexpr (kBlocks) before = block_maximum<L>(shared, place);
    __syncthreads();
    if (joins) before = max(before, shared.before);

      // Exponents of operands, codes, norms.
#pragma unroll
    for (int pass = 0; pass < L::kPasses; ++pass) {
      int exponent = exponents[pass];
      if constexpr (kRunning) exponent = stages::running_exponent(max(exponent, before));
      if constexpr (kBlocks) exponent = before;
      const bool token = lane_row(pass) < place.left;
      exponents[pass] = token ? exponent : stages::kTokenExponentMin;
    }
    const std::int64_t head_slots = item.head * args.out.slots;
    const std::int64_t row = head_slots + item.tile * L::kSlots;
    if (place.document >= 0) {
      encode_rows<L>(values, exponents, scale, slot, args.out.codes + row * L::kDim,
                     args.out.norms != nullptr or args.transposed != nullptr, shared.codes);
      if (lane % kRowLanes == 0) {
#pragma unroll
        for (int pass = 0; pass < L::kPasses; ++pass) {
          args.out.exponents[row + slot + lane_row(pass)] =
              static_cast<std::int8_t>(exponents[pass]);
        }
      }
      if (args.out.norms != nullptr) {
        __syncwarp();
#pragma unroll
        for (int pass = 0; pass < L::kPasses; ++pass) {
          const int at = slot + lane_row(pass);
          const int norm = code_norm<L>(shared.codes, at, exponents[pass]);
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
    if (not more) return;
  }
}

template <class L>
void launch(const Recipe& recipe, std::span<const QuantizeArgs> tensors, std::uint32_t* scratch,
            cudaStream_t stream) {
  Batch batch;
  batch.ticket = scratch++;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    batch.tensors[i] = tensors[i];
    batch.aligned[i] = is_aligned(tensors[i].x);
    batch.tiles[i] = L::tiles(tensors[i].out.slots);
    batch.words[i] = scratch;
    scratch += std::int64_t{tensors[i].out.heads} * batch.tiles[i];
    batch.items += tensors[i].out.heads * batch.tiles[i];
    batch.ends[i] = batch.items;
  }
  if (batch.items == 0) return;
  const int ctas = std::min(batch.items, ctas_of(recipe.scale_group) * multiprocessors());
  const auto run = [&](auto* kernel) {
    kernel<<<ctas, kThreads, 0, stream>>>(batch, recipe.exponent_rule);
  };
  switch (recipe.scale_group) {
    case ScaleGroup::kRunning:
      run(quantize_kernel<L, ScaleGroup::kRunning>);
      break;
    case ScaleGroup::kToken:
      run(quantize_kernel<L, ScaleGroup::kToken>);
      break;
    case ScaleGroup::kBlock32:
      run(quantize_kernel<L, ScaleGroup::kBlock32>);
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
