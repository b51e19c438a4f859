// Scales of the dK/dV pass (stages::ChunkScales) for every query tile, from bytes a token.
#include "quantize/cuda/launch.h"
#include "quantize/cuda/quantize.h"
#include "quantize/cuda/tile.cuh"

namespace mxattn::cuda {
namespace {

using stages::Exponent;

__device__ __forceinline__ std::int32_t value_of(Exponent e) { return e.nan ? kNanScale : e.value; }

/// Maximum over the lanes, NaN kept.
__device__ __forceinline__ std::int32_t reduce(std::int32_t value) {
  static_assert(kNanScale > 10000, "NaN is the largest value");
  return __reduce_max_sync(0xFFFFFFFFu, value);
}

/// Maxima over the tokens of each query tile. One warp for each 16 slots; those at the start of a
/// tile work.
__global__ void tile_maxima_kernel(const ScalesArgs args) {
  const int head = blockIdx.y;
  const int lane = threadIdx.x % 32;
  const int first_slot =
      static_cast<int>(blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32) * kGroup;
  if (first_slot >= args.slots) return;
  const Rows tile = rows_of(find_span(args.cu_seqlens, args.num_documents, first_slot), first_slot);
  if (tile.first % stages::kQueryTile != 0 or tile.left <= 0) return;
  const int rows = min(stages::kQueryTile, tile.left);
  const std::int64_t slot = head * args.slots + first_slot;

  std::int32_t a = kNoScale, b = kNoScale, c = kNoScale;
  bool live = false;
  for (int i = lane; i < rows; i += 32) {
    const Exponent eq = Exponent::stored(args.q_exponents[slot + i]);
    const Exponent eg = Exponent::stored(args.g_exponents[slot + i]);
    const Exponent ng = Exponent::stored(args.g_norms[slot + i]);
    const Exponent no = Exponent::stored(args.output_norms[slot + i]);
    b = max(b, value_of(ng + eq));
    c = max(c, value_of(eg));
    // Tokens with O = 0 have no bound from O.
    if (no.nan or no.value != stages::kNormExponentMin) a = max(a, value_of(ng + eq + no));
    live = live or args.live[slot + i] != 0 or eg.nan;
  }
  a = reduce(a);
  b = reduce(b);
  c = reduce(c);
  live = __any_sync(0xFFFFFFFFu, live);
  if (lane == 0) {
    args.scales[slot / kGroup] = {a, b, c, live ? 1 : 0};
  }
}

/// Spread of a maximum over the live tiles of a chunk.
__device__ __forceinline__ std::int32_t spread(std::int32_t value, bool live, std::int32_t most) {
  return most - __reduce_min_sync(0xFFFFFFFFu, live ? value : kNanScale);
}

/// Turns maxima of tiles into the scales in force there. One warp for a document and head; a chunk
/// has at most 16 tiles.
__global__ void tile_scales_kernel(const ScalesArgs args) {
  const int document = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (document >= args.num_documents) return;
  const int head = blockIdx.y;
  const int lane = threadIdx.x % 32;
  const int begin = args.cu_seqlens[document];
  const int length = args.cu_seqlens[document + 1] - begin;
  const std::int64_t first = (head * args.slots + document_slot(begin, document)) / kGroup;
  // The lane's tile of a chunk, or null.
  const auto entry_of = [&](int chunk) -> TileScales* {
    const int tile = stages::chunk_begin(chunk) / stages::kQueryTile + lane;
    const bool present = tile * stages::kQueryTile < min(length, stages::chunk_end(chunk));
    return present ? args.scales + first + std::int64_t{tile} * (stages::kQueryTile / kGroup)
                   : nullptr;
  };
  const auto maxima_of = [&](int chunk) {
    const TileScales* const entry = entry_of(chunk);
    return entry != nullptr ? *entry : TileScales{kNoScale, kNoScale, kNoScale, 0};
  };
  TileScales carried{0, 0, 0, 0};
  TileScales ahead = maxima_of(0);
  for (int chunk = 0; stages::chunk_begin(chunk) < length; ++chunk) {
    TileScales* const entry = entry_of(chunk);
    TileScales own = ahead;
    ahead = maxima_of(chunk + 1);
    const bool live = own.live != 0;
    const std::int32_t a = reduce(live ? own.a : kNoScale);
    const std::int32_t b = reduce(live ? own.b : kNoScale);
    const std::int32_t c = reduce(live ? own.c : kNoScale);
    const std::int32_t widest =
        max(max(spread(own.a, live, a), spread(own.b, live, b)), spread(own.c, live, c));
    if (live and widest <= stages::kChunkSpread) own = {a, b, c, 1};

    // A tile without gradients keeps the scales in force.
    const unsigned lives = __ballot_sync(0xFFFFFFFFu, live);
    const unsigned below = lives & (0xFFFFFFFFu >> (31 - lane));
    const int source = below == 0 ? 0 : 31 - __clz(static_cast<int>(below));
    TileScales force;
    force.a = __shfl_sync(0xFFFFFFFFu, own.a, source);
    force.b = __shfl_sync(0xFFFFFFFFu, own.b, source);
    force.c = __shfl_sync(0xFFFFFFFFu, own.c, source);
    if (below == 0) force = carried;
    if (entry != nullptr) *entry = {force.a, force.b, force.c, live ? 1 : 0};
    carried.a = __shfl_sync(0xFFFFFFFFu, force.a, 31);
    carried.b = __shfl_sync(0xFFFFFFFFu, force.b, 31);
    carried.c = __shfl_sync(0xFFFFFFFFu, force.c, 31);
  }
}

}  // namespace

void make_tile_scales(const ScalesArgs& args, cudaStream_t stream) {
  constexpr int kWarps = 8;
  const int groups = static_cast<int>(args.slots / kGroup);
  if (groups == 0) return;
  tile_maxima_kernel<<<dim3((groups + kWarps - 1) / kWarps, args.heads), 32 * kWarps, 0, stream>>>(
      args);
  MXATTN_CUDA_CHECK(cudaGetLastError());
  constexpr int kDocuments = 4;
  tile_scales_kernel<<<dim3((args.num_documents + kDocuments - 1) / kDocuments, args.heads),
                       32 * kDocuments, 0, stream>>>(args);
  MXATTN_CUDA_CHECK(cudaGetLastError());
}

}  // namespace mxattn::cuda
