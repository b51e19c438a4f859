// Maxima over chunks of a document up to each token, of bytes a token: norms of V.
//
// A CTA owns kRegion slots of a head and reads as many before them: no chunk is longer. Chunks
// begin at multiples of 16 slots, so what is asked for consists of whole groups of 16 slots and the
// beginning of a group: maxima up to each token inside its group, and over the last 1, 2, 4, ...
// groups, two of which cover any number of them.
#include "ptx/grid.h"
#include "quantize/cuda/launch.h"
#include "quantize/cuda/quantize.h"
#include "quantize/cuda/tile.cuh"

namespace mxattn::cuda {
namespace {

constexpr int kRegion = 2048;
static_assert(stages::chunk_end(2) - stages::chunk_begin(2) <= kRegion and
              stages::chunk_end(3) - stages::chunk_begin(3) == kRegion);
constexpr int kGroups = 2 * kRegion / kGroup;  // a thread each
constexpr int kLevels = 7;      // fewer than 128 groups of a chunk lie before another one of it
constexpr int kNothing = -128;  // the maximum of no token

/// Bytes of a group.
union Bytes {
  uint4 unit;
  std::int8_t bytes[kGroup];
};

__global__ void __launch_bounds__(kGroups)
    chunk_maxima_kernel(const __grid_constant__ ChunkMaximaArgs args) {
  __shared__ std::int8_t levels[kLevels][kGroups];  // maxima of the last 2^level groups
  ptx::launch_dependents();
  ptx::wait_on_dependencies();
  const int group = threadIdx.x;
  const int slots = static_cast<int>(args.slots);
  const int slot = (static_cast<int>(blockIdx.x) - 1) * kRegion + group * kGroup;
  const std::int64_t at = std::int64_t{blockIdx.y} * args.slots + slot;

  Bytes maxima;    // up to each token of the group
  int tokens = 0;  // from the group's first slot to the document's end
  int before = 0;  // groups of the chunk before this one
  if (slot >= 0 and slot < slots) {
    maxima.unit = __ldg(reinterpret_cast<const uint4*>(args.values + at));
    const Span span = span_of(args.cu_seqlens, args.num_documents,
                              document_of(args.cu_seqlens, 0, args.num_documents, slot));
    const Rows rows = rows_of(span, slot);
    tokens = rows.left;
    if (tokens > 0) {
      before = (rows.first - stages::chunk_begin(stages::chunk_of(rows.first))) / kGroup;
    }
  }
  int maximum = kNothing;
#pragma unroll
  for (int i = 0; i < kGroup; ++i) {
    if (i < tokens) maximum = max(maximum, static_cast<int>(maxima.bytes[i]));
    maxima.bytes[i] = static_cast<std::int8_t>(maximum);
  }
  levels[0][group] = static_cast<std::int8_t>(maximum);
  __syncthreads();
#pragma unroll
  for (int level = 1; level < kLevels; ++level) {
    // What is asked for reaches behind no first group.
    const int other = max(group - (1 << (level - 1)), 0);
    levels[level][group] = max(levels[level - 1][group], levels[level - 1][other]);
    __syncthreads();
  }

  if (group < kGroups / 2 or tokens <= 0) return;
  if (before > 0) {
    const int level = 31 - __clz(before);
    const int earlier =
        max(levels[level][group - 1], levels[level][group - before - 1 + (1 << level)]);
#pragma unroll
    for (std::int8_t& value : maxima.bytes) {
      value = static_cast<std::int8_t>(max(static_cast<int>(value), earlier));
    }
  }
  *reinterpret_cast<uint4*>(args.maxima + at) = maxima.unit;
}

}  // namespace

void make_chunk_maxima(const ChunkMaximaArgs& args, cudaStream_t stream) {
  if (args.slots == 0) return;
  const dim3 grid(static_cast<unsigned>((args.slots + kRegion - 1) / kRegion),
                  static_cast<unsigned>(args.heads));
  launch_overlapping(chunk_maxima_kernel, grid, kGroups, 0, stream, args);
}

}  // namespace mxattn::cuda
