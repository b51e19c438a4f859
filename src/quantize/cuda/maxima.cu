// Maxima over parts of chunks, of bytes a token: norms of V, and exponents of K that may fall.
//
// A CTA owns kRegion slots of a head and reads as many before them (or behind, for maxima up to the
// chunk's end): no chunk is longer. Maxima over 1, 2, 4, ... tokens follow from each other; two of
// the longest that fit cover a window.
#include <algorithm>

#include "quantize/cuda/launch.h"
#include "quantize/cuda/quantize.h"
#include "quantize/cuda/tile.cuh"

namespace mxattn::cuda {
namespace {

using Part = ChunkMaximaArgs::Part;

constexpr int kRegion = 2048;
static_assert(stages::chunk_end(2) - stages::chunk_begin(2) <= kRegion and
              stages::chunk_end(3) - stages::chunk_begin(3) == kRegion);
constexpr int kEntries = 2 * kRegion;
constexpr int kMaximaThreads = 512;
constexpr int kNothing = -128;  // the maximum of no token

struct Tables {
  ChunkMaximaArgs tables[kMaxTensors];
};

/// The document of a slot, by one thread.
__device__ __forceinline__ int document_of(const std::int32_t* cu_seqlens, int num_documents,
                                           int slot) {
  int low = 0, high = num_documents;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (document_slot(__ldg(cu_seqlens + middle), middle) <= slot) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

/// Entries count slots in the direction of the part: from the region's first slot upward for kUpTo,
/// from its last slot downward for kFrom. Entry kRegion is the first of the region's own.
__global__ void __launch_bounds__(kMaximaThreads)
    chunk_maxima_kernel(const __grid_constant__ Tables tables) {
  __shared__ std::int8_t values[2][kEntries];
  __shared__ std::int16_t bounds[kEntries / kGroup];  // the first entry of the chunk's part
  const ChunkMaximaArgs& args = tables.tables[blockIdx.z];
  const int head = blockIdx.y;
  const int region = static_cast<int>(blockIdx.x) * kRegion;
  const int slots = static_cast<int>(args.slots);
  if (head >= args.heads or region >= slots) return;
  const bool up = args.part == Part::kUpTo;
  const auto slot_of = [&](int entry) {
    return up ? region - kRegion + entry : region + 2 * kRegion - 1 - entry;
  };
  const std::int8_t* const from = args.values + std::int64_t{head} * slots;

  for (int group = threadIdx.x; group < kEntries / kGroup; group += kMaximaThreads) {
    const int entry = group * kGroup;
    const int slot = up ? slot_of(entry) : slot_of(entry + kGroup - 1);  // the group's lowest
    int bound = kEntries;                                                // no tokens
    if (slot >= 0 and slot < slots) {
      const int document = document_of(args.cu_seqlens, args.num_documents, slot);
      const int begin = __ldg(args.cu_seqlens + document);
      const int length = __ldg(args.cu_seqlens + document + 1) - begin;
      const int start = static_cast<int>(document_slot(begin, document));
      const int first = slot - start;
      if (first < length) {
        const int chunk = stages::chunk_of(first);
        const int edge = up ? start + stages::chunk_begin(chunk)
                            : start + min(length, stages::chunk_end(chunk)) - 1;
        bound = up ? edge - region + kRegion : region + 2 * kRegion - 1 - edge;
      }
    }
    bounds[group] = static_cast<std::int16_t>(max(bound, -1));
  }
  for (int entry = threadIdx.x; entry < kEntries; entry += kMaximaThreads) {
    const int slot = slot_of(entry);
    values[0][entry] = slot >= 0 and slot < slots ? from[slot] : std::int8_t{kNothing};
  }
  __syncthreads();

  // After a level, an entry holds the maximum of the last `length` of its part.
  const int window = min(args.window, kRegion);
  int now = 0;
  int length = 1;
  for (; 2 * length <= window; length *= 2) {
    for (int entry = threadIdx.x; entry < kEntries; entry += kMaximaThreads) {
      int value = values[now][entry];
      const int other = entry - length;
      if (other >= 0 and other >= bounds[entry / kGroup]) {
        value = max(value, static_cast<int>(values[now][other]));
      }
      values[now ^ 1][entry] = static_cast<std::int8_t>(value);
    }
    now ^= 1;
    __syncthreads();
  }
  std::int8_t* const to = args.maxima + std::int64_t{head} * slots;
  for (int entry = kRegion + threadIdx.x; entry < kEntries; entry += kMaximaThreads) {
    const int bound = bounds[entry / kGroup];
    const int slot = slot_of(entry);
    if (bound > entry or slot >= slots) continue;  // a gap
    int value = values[now][entry];
    const int other = entry - (window - length);
    if (other >= bound) value = max(value, static_cast<int>(values[now][other]));
    to[slot] = static_cast<std::int8_t>(value);
  }
}

}  // namespace

void make_chunk_maxima(std::span<const ChunkMaximaArgs> tables, cudaStream_t stream) {
  MXATTN_CHECK(tables.size() <= kMaxTensors, tables.size(), " tables");
  Tables all;
  std::int64_t slots = 0;
  int heads = 0;
  for (std::size_t i = 0; i < tables.size(); ++i) {
    MXATTN_CHECK(tables[i].window >= 1, "a window of ", tables[i].window);
    all.tables[i] = tables[i];
    slots = std::max(slots, tables[i].slots);
    heads = std::max(heads, tables[i].heads);
  }
  if (slots == 0) return;
  const dim3 grid(static_cast<unsigned>((slots + kRegion - 1) / kRegion),
                  static_cast<unsigned>(heads), static_cast<unsigned>(tables.size()));
  chunk_maxima_kernel<<<grid, kMaximaThreads, 0, stream>>>(all);
  MXATTN_CUDA_CHECK(cudaGetLastError());
}

}  // namespace mxattn::cuda
