// Maxima over parts of chunks, of bytes a token: norms of V, and exponents of K that may fall.
//
// A CTA owns kRegion slots of a head and reads as many before them (or behind, for maxima up to the
// chunk's end): no chunk is longer. Chunks begin at multiples of 16 slots, so a part consists of
// the end of a group of 16 slots, whole groups, and the beginning of a group: maxima up to and from
// each token inside its group, and over 1, 2, 4, ... groups, two of which cover any number of them.
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
constexpr int kGroups = kEntries / kGroup;
constexpr int kMaximaThreads = kGroups;
constexpr int kLevels = 7;  // fewer than 128 whole groups lie in a chunk of which others are a part
constexpr int kThreadEntries = kRegion / kMaximaThreads;  // of the output
constexpr int kNothing = -128;                            // the maximum of no token

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

/// Bytes of a group, or half of one.
template <int kCount>
union Bytes {
  std::uint32_t words[kCount / 4];
  std::int8_t bytes[kCount];

  __device__ __forceinline__ Bytes reversed() const {
    Bytes result;
#pragma unroll
    for (int w = 0; w < kCount / 4; ++w) {
      result.words[w] = ptx::permute_bytes(words[kCount / 4 - 1 - w], 0, 0x0123);
    }
    return result;
  }
};

struct Shared {
  alignas(16) std::int8_t values[kEntries];
  alignas(16) std::int8_t up_to[kEntries];   // maxima from the group's first entry
  alignas(16) std::int8_t onward[kEntries];  // maxima to the group's last entry
  std::int8_t levels[kLevels][kGroups];      // of the last 2^level groups
  std::int16_t bounds[kGroups];  // the first group of the chunk's part, kGroups: no tokens
};

/// Entries count slots in the direction of the part: from the region's first slot upward for kUpTo,
/// from its last slot downward for kFrom. Entry kRegion is the first of the region's own.
__global__ void __launch_bounds__(kMaximaThreads)
    chunk_maxima_kernel(const __grid_constant__ Tables tables) {
  __shared__ Shared shared;
  const ChunkMaximaArgs& args = tables.tables[blockIdx.z];
  const int head = blockIdx.y;
  const int region = static_cast<int>(blockIdx.x) * kRegion;
  const int slots = static_cast<int>(args.slots);
  if (head >= args.heads or region >= slots) return;
  const bool up = args.part == Part::kUpTo;
  // The lowest slot of a group of entries.
  const auto slot_of = [&](int group) {
    return up ? region - kRegion + kGroup * group : region + 2 * kRegion - kGroup * (group + 1);
  };
  const int thread = threadIdx.x;

  // A group a thread.
  const int slot = slot_of(thread);
  Bytes<kGroup> own;
  int tokens = 0;  // of the group
  int bound = kGroups;
  if (slot >= 0 and slot < slots) {
    const uint4 loaded =
        __ldg(reinterpret_cast<const uint4*>(args.values + std::int64_t{head} * slots + slot));
    own.words[0] = loaded.x;
    own.words[1] = loaded.y;
    own.words[2] = loaded.z;
    own.words[3] = loaded.w;
    const int document = document_of(args.cu_seqlens, args.num_documents, slot);
    const int begin = __ldg(args.cu_seqlens + document);
    const int length = __ldg(args.cu_seqlens + document + 1) - begin;
    const int start = static_cast<int>(document_slot(begin, document));
    const int first = slot - start;
    tokens = length - first;
    if (tokens > 0) {
      const int chunk = stages::chunk_of(first);
      const int edge = up ? stages::chunk_begin(chunk)
                          : min(length, stages::chunk_end(chunk)) - 1;  // part of that group
      const int distance = (edge / kGroup * kGroup - first) / kGroup;
      bound = max(thread - (up ? -distance : distance), 0);
    }
  }
#pragma unroll
  for (int i = 0; i < kGroup; ++i) {
    if (i >= tokens) own.bytes[i] = kNothing;
  }
  if (not up) own = own.reversed();
  const auto keep = [&](std::int8_t* to, const Bytes<kGroup>& group) {
    *reinterpret_cast<uint4*>(to + kGroup * thread) = {group.words[0], group.words[1],
                                                       group.words[2], group.words[3]};
  };
  keep(shared.values, own);
  Bytes<kGroup> running;
  int maximum = kNothing;
#pragma unroll
  for (int i = 0; i < kGroup; ++i) {
    maximum = max(maximum, static_cast<int>(own.bytes[i]));
    running.bytes[i] = static_cast<std::int8_t>(maximum);
  }
  keep(shared.up_to, running);
  shared.levels[0][thread] = static_cast<std::int8_t>(maximum);
  shared.bounds[thread] = static_cast<std::int16_t>(bound);
  maximum = kNothing;
#pragma unroll
  for (int i = kGroup - 1; i >= 0; --i) {
    maximum = max(maximum, static_cast<int>(own.bytes[i]));
    running.bytes[i] = static_cast<std::int8_t>(maximum);
  }
  keep(shared.onward, running);
  __syncthreads();
#pragma unroll
  for (int level = 1; level < kLevels; ++level) {
    // Parts that are asked for reach behind no bound.
    const int other = max(thread - (1 << (level - 1)), 0);
    shared.levels[level][thread] =
        max(shared.levels[level - 1][thread], shared.levels[level - 1][other]);
    __syncthreads();
  }

  // Half a group a thread.
  static_assert(kThreadEntries == kGroup / 2);
  const int entry = kRegion + kThreadEntries * thread;
  const int group = entry / kGroup;
  const int to_slot = slot_of(group);
  if (to_slot >= slots or shared.bounds[group] == kGroups) return;
  const int lowest = shared.bounds[group] * kGroup;
  const int window = min(args.window, kRegion);
  Bytes<kThreadEntries> result;
#pragma unroll
  for (int i = 0; i < kThreadEntries; ++i) {
    const int last = entry + i;
    const int first = max(last - window + 1, lowest);
    const int first_group = first / kGroup;
    int value = shared.up_to[last];
    if (first_group < group) {
      value = max(value, static_cast<int>(shared.onward[first]));
      const int between = group - first_group - 1;
      if (between > 0) {
        const int level = 31 - __clz(between);
        value = max(value, static_cast<int>(shared.levels[level][group - 1]));
        value = max(value, static_cast<int>(shared.levels[level][first_group + (1 << level)]));
      }
    } else if (first % kGroup != 0) {
      value = kNothing;
      for (int at = first; at <= last; ++at)
        value = max(value, static_cast<int>(shared.values[at]));
    }
    result.bytes[i] = static_cast<std::int8_t>(value);
  }
  if (not up) result = result.reversed();
  const bool upper = (thread % 2 != 0) == up;  // half of the group's slots
  std::int8_t* const to = args.maxima + std::int64_t{head} * slots + to_slot;
  *reinterpret_cast<uint2*>(to + (upper ? kThreadEntries : 0)) = {result.words[0], result.words[1]};
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
