// Q, K, V to codes, exponents, transposed codes and norms, reading the tensor once.
//
// A running exponent needs the maximum of all earlier tokens of the document. CTAs take tiles in
// order; each publishes the maximum of what its last document holds in the tile, and looks back
// over the tiles before it until one knows the maximum from the document's start.
#include "base/cuda_check.h"
#include "quantize/cuda/quantize.h"
#include "quantize/cuda/tile.cuh"

namespace mxattn::cuda {
namespace {

// A published word: 0 = nothing yet, else kind and value + kBias.
inline constexpr std::uint32_t kPartial = 1u << 16;   // maximum of this tile only
inline constexpr std::uint32_t kComplete = 2u << 16;  // maximum from the document's start
inline constexpr int kBias = 128;
inline constexpr int kNothing = -128;  // the maximum of no token

__device__ __forceinline__ std::uint32_t word_of(std::uint32_t kind, int value) {
  return kind | static_cast<std::uint32_t>(value + kBias);
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

struct Shared {
  CodeTile codes;
  std::int8_t exponents[kTileSlots];  // of tokens, then of operands; kNothing in gaps
  int document[kTileSlots / kGroup];
  bool begins[kTileSlots / kGroup];
  int ticket;
};

/// Running exponents of the tile's tokens in place. Warp 0; lane l owns slots 4 l .. 4 l + 3.
__device__ __forceinline__ void running_maxima(Shared& shared, std::uint32_t* words, int tile) {
  const int lane = threadIdx.x % 32;
  const int group = lane / 4;
  const int document = shared.document[group];
  int value[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    value[i] = shared.exponents[4 * lane + i];
    if (i > 0) value[i] = max(value[i], value[i - 1]);
  }
  int inclusive = value[3];
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int other = __shfl_up_sync(0xFFFFFFFFu, inclusive, offset);
    const int other_document = __shfl_up_sync(0xFFFFFFFFu, document, offset);
    if (lane >= offset and other_document == document) inclusive = max(inclusive, other);
  }
  int before = __shfl_up_sync(0xFFFFFFFFu, inclusive, 1);
  const int before_document = __shfl_up_sync(0xFFFFFFFFu, document, 1);
  if (lane == 0 or before_document != document) before = kNothing;

  const int first_document = __shfl_sync(0xFFFFFFFFu, document, 0);
  const int last_document = __shfl_sync(0xFFFFFFFFu, document, 31);
  const int last_value = __shfl_sync(0xFFFFFFFFu, inclusive, 31);
  const bool enters = tile > 0 and not shared.begins[0];  // the first document began earlier
  const bool passes = enters and first_document == last_document;
  if (lane == 0) {
    atomicExch(words + tile, word_of(passes ? kPartial : kComplete, last_value));
  }
  if (enters) {
    const int carried = look_back(words, tile);
    if (passes and lane == 0) {
      atomicExch(words + tile, word_of(kComplete, max(carried, last_value)));
    }
    if (document == first_document) before = max(before, carried);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const bool token = shared.exponents[4 * lane + i] != kNothing;
    const int maximum = max(value[i], before);
    if (token) {
      shared.exponents[4 * lane + i] = static_cast<std::int8_t>(stages::running_exponent(maximum));
    }
  }
}

template <bool kRunning>
__global__ void __launch_bounds__(kThreads, 2)
    quantize_kernel(const QuantizeArgs args, ExponentRule rule, int tiles) {
  __shared__ Shared shared;
  std::uint32_t* const ticket = args.scratch;
  if (threadIdx.x == 0) shared.ticket = static_cast<int>(atomicAdd(ticket, 1u));
  __syncthreads();
  // Tiles of all heads advance together: a tile's predecessor was taken earlier.
  const int tile = shared.ticket / args.out.heads;
  const int head = shared.ticket % args.out.heads;
  const std::int64_t first_slot = std::int64_t{tile} * kTileSlots;
  const int slots = static_cast<int>(min(std::int64_t{kTileSlots}, args.out.slots - first_slot));
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const bool present = warp * kWarpSlots < slots;  // slots are a multiple of 16

  LaneRows values;
  int exponents[kPasses];
  Group group;
  if (present) {
    group = find_group(args.cu_seqlens, args.num_documents, first_slot + warp * kWarpSlots);
    load_rows(args.x, head, group, values);
    if (args.rotate) rotate(values);
    token_exponents(rule, values, exponents);
  }
  constexpr int kWarpsPerGroup = kGroup / kWarpSlots;
  if (lane == 0 and warp % kWarpsPerGroup == 0) {
    shared.document[warp / kWarpsPerGroup] = present ? group.document : -1;
    shared.begins[warp / kWarpsPerGroup] = present and group.begins;
  }
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int row = pass * kRowsAtOnce + lane / 8;
    if (lane % 8 == 0) {
      shared.exponents[warp * kWarpSlots + row] =
          static_cast<std::int8_t>(present and row < group.rows ? exponents[pass] : kNothing);
    }
  }
  __syncthreads();
  if constexpr (kRunning) {
    if (warp == 0) running_maxima(shared, ticket + 1 + std::int64_t{head} * tiles, tile);
    __syncthreads();
  }

  const std::int64_t row = std::int64_t{head} * args.out.slots + first_slot;
  if (present) {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int e = shared.exponents[warp * kWarpSlots + pass * kRowsAtOnce + lane / 8];
      exponents[pass] = e == kNothing ? stages::kTokenExponentMin : e;
    }
    encode_rows(values, exponents, warp * kWarpSlots, args.out.codes + row * kDim, shared.codes);
  }
  __syncthreads();
  const int slot = threadIdx.x;
  if (slot < slots) {
    const int e = shared.exponents[slot];
    const int exponent = e == kNothing ? stages::kTokenExponentMin : e;
    args.out.exponents[row + slot] = static_cast<std::int8_t>(exponent);
    if (args.out.norms != nullptr) {
      Chains squares;
      for_each_code(shared.codes, slot, [&](int c, float v) { squares.add(c, v, v); });
      args.out.norms[row + slot] =
          static_cast<std::int8_t>(stages::norm_exponent(squares.total(), exponent));
    }
  }
  if (args.transposed != nullptr) {
    store_transposed(shared.codes,
                     args.transposed + std::int64_t{head} * kDim * args.out.slots + first_slot,
                     args.out.slots, slots);
  }
}

/// Maximum of the norms from the start of the token's chunk up to it. One warp a document and head.
__global__ void running_norms_kernel(const QuantizeArgs args) {
  const int document = blockIdx.x;
  const int head = blockIdx.y;
  const int lane = threadIdx.x % 32;
  const int begin = args.cu_seqlens[document];
  const int length = args.cu_seqlens[document + 1] - begin;
  const std::int64_t slot = head * args.out.slots + document_slot(begin, document);
  // Chunks are independent: warps of the CTA take them in turn.
  for (int chunk = threadIdx.x / 32; stages::chunk_begin(chunk) < length;
       chunk += blockDim.x / 32) {
    const int end = min(length, stages::chunk_end(chunk));
    int carried = -128;
    for (int t = stages::chunk_begin(chunk); t < end; t += 32) {
      int value = t + lane < end ? args.out.norms[slot + t + lane] : -128;
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const int other = __shfl_up_sync(0xFFFFFFFFu, value, offset);
        if (lane >= offset) value = max(value, other);
      }
      value = max(value, carried);
      if (t + lane < end) args.running_norms[slot + t + lane] = static_cast<std::int8_t>(value);
      carried = __shfl_sync(0xFFFFFFFFu, value, 31);
    }
  }
}

int tiles_of(std::int64_t slots) { return static_cast<int>((slots + kTileSlots - 1) / kTileSlots); }

}  // namespace

std::int64_t quantize_scratch_words(int heads, std::int64_t slots) {
  return 1 + std::int64_t{heads} * tiles_of(slots);
}

void quantize(const Recipe& recipe, const QuantizeArgs& args, cudaStream_t stream) {
  const int tiles = tiles_of(args.out.slots);
  MXATTN_CUDA_CHECK(cudaMemsetAsync(
      args.scratch, 0,
      static_cast<std::size_t>(quantize_scratch_words(args.out.heads, args.out.slots)) * 4,
      stream));
  const int ctas = tiles * args.out.heads;
  if (recipe.scale_group == ScaleGroup::kRunning) {
    quantize_kernel<true><<<ctas, kThreads, 0, stream>>>(args, recipe.exponent_rule, tiles);
  } else {
    quantize_kernel<false><<<ctas, kThreads, 0, stream>>>(args, recipe.exponent_rule, tiles);
  }
  MXATTN_CUDA_CHECK(cudaGetLastError());
  if (args.running_norms != nullptr) make_running_norms(args, stream);
}

void make_running_norms(const QuantizeArgs& args, cudaStream_t stream) {
  running_norms_kernel<<<dim3(args.num_documents, args.out.heads), 256, 0, stream>>>(args);
  MXATTN_CUDA_CHECK(cudaGetLastError());
}

}  // namespace mxattn::cuda
