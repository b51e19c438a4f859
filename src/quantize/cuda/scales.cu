// Scales of the dK/dV pass (stages::ChunkScales) for every query tile, from bytes a token.
#include "ptx/grid.h"
#include "quantize/cuda/launch.h"
#include "quantize/cuda/quantize.h"
#include "quantize/cuda/tile.cuh"

namespace mxattn::cuda {
namespace {

using stages::Exponent;

constexpr int kChunkWarps = 8;

__device__ __forceinline__ std::int32_t value_of(Exponent e) { return e.nan ? kNanScale : e.value; }

/// Maximum over the lanes, NaN kept.
__device__ __forceinline__ std::int32_t reduce(std::int32_t value) {
  static_assert(kNanScale > 10000, "NaN is the largest value");
  return __reduce_max_sync(0xFFFFFFFFu, value);
}

/// Maxima over the tokens of a query tile. One warp.
__device__ __forceinline__ void find_maxima(const ScalesArgs& args, int head, int first_slot,
                                            int tokens) {
  const int lane = threadIdx.x % 32;
  const std::int64_t slot = head * args.slots + first_slot;
  // Four tokens a lane; documents start at multiples of 16 slots.
  constexpr int kLaneTokens = stages::kQueryTile / 32;
  static_assert(kLaneTokens == sizeof(std::uint32_t));
  const int rows = min(stages::kQueryTile, tokens) - kLaneTokens * lane;
  std::int32_t a = kNoScale, b = kNoScale, c = kNoScale;
  bool live = false;
  if (rows > 0) {
    const auto load = [&](const void* table) {
      return __ldg(reinterpret_cast<const std::uint32_t*>(static_cast<const char*>(table) + slot) +
                   lane);
    };
    const std::uint32_t eqs = load(args.q_exponents), egs = load(args.g_exponents);
    const std::uint32_t ngs = load(args.g_norms), nos = load(args.output_norms);
    const std::uint32_t lives = load(args.live);
#pragma unroll
    for (int i = 0; i < kLaneTokens; ++i) {
      if (i >= rows) continue;
      const auto byte = [&](std::uint32_t word) { return static_cast<std::int8_t>(word >> 8 * i); };
      const Exponent eq = Exponent::stored(byte(eqs));
      const Exponent eg = Exponent::stored(byte(egs));
      const Exponent ng = Exponent::stored(byte(ngs));
      const Exponent no = Exponent::stored(byte(nos));
      b = max(b, value_of(ng + eq));
      c = max(c, value_of(eg));
      // Tokens with O = 0 have no bound from O.
      if (no.nan or no.value != stages::kNormExponentMin) a = max(a, value_of(ng + eq + no));
      live = live or byte(lives) != 0 or eg.nan;
    }
  }
  a = reduce(a);
  b = reduce(b);
  c = reduce(c);
  live = __any_sync(0xFFFFFFFFu, live);
  if (lane == 0) {
    args.scales[slot / kGroup] = {a, b, c, live ? 1 : 0};
  }
}

/// Maxima over the tokens of each query tile. A warp for the tiles that start in as many slots as a
/// tile has: one, unless documents are short.
__global__ void tile_maxima_kernel(const ScalesArgs args) {
  ptx::launch_dependents();
  ptx::wait_on_dependencies();
  const int warp = static_cast<int>(blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32);
  const int end = min((warp + 1) * stages::kQueryTile, static_cast<int>(args.slots));
  Span span{};
  for (int slot = warp * stages::kQueryTile; slot < end;) {
    if (not holds(span, slot)) span = find_span(args.cu_seqlens, args.num_documents, slot);
    const int tiles = (slot - span.start + stages::kQueryTile - 1) / stages::kQueryTile;
    const int first = span.start + tiles * stages::kQueryTile;  // of the next tile
    const int tokens = rows_of(span, first).left;
    if (first < end and tokens > 0) find_maxima(args, blockIdx.y, first, tokens);
    slot = min(first + stages::kQueryTile, span.end);
  }
}

/// Spread of a maximum over the live tiles of a chunk.
__device__ __forceinline__ std::int32_t spread(std::int32_t value, bool live, std::int32_t most) {
  return most - __reduce_min_sync(0xFFFFFFFFu, live ? value : kNanScale);
}

/// Turns maxima of tiles into the scales in force there. One CTA for a document and head, a warp
/// for a chunk of those in turn, which has at most 16 tiles.
__global__ void __launch_bounds__(32 * kChunkWarps) tile_scales_kernel(const ScalesArgs args) {
  __shared__ TileScales last[kChunkWarps];  // those of the last tile with gradients, if `live`
  ptx::launch_dependents();
  ptx::wait_on_dependencies();
  const int document = blockIdx.x;
  const int warp = threadIdx.x / 32;
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
  TileScales carried{0, 0, 0, 0};  // into the first of the chunks in turn
  TileScales ahead = maxima_of(warp);
  for (int first_chunk = 0; stages::chunk_begin(first_chunk) < length; first_chunk += kChunkWarps) {
    const int chunk = first_chunk + warp;
    TileScales* const entry = entry_of(chunk);
    TileScales own = ahead;
    ahead = maxima_of(chunk + kChunkWarps);
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
    if (lane == 31) last[warp] = {force.a, force.b, force.c, lives != 0 ? 1 : 0};
    __syncthreads();
    TileScales before = carried;  // into this chunk
#pragma unroll
    for (int w = 0; w < kChunkWarps; ++w) {
      if (w == warp) before = carried;
      if (last[w].live != 0) carried = last[w];
    }
    if (below == 0) force = before;
    if (entry != nullptr) *entry = {force.a, force.b, force.c, live ? 1 : 0};
    __syncthreads();  // `last` has been read
  }
}

}  // namespace

void make_tile_scales(const ScalesArgs& args, cudaStream_t stream) {
  constexpr int kWarps = 4;
  const int tiles = static_cast<int>((args.slots + stages::kQueryTile - 1) / stages::kQueryTile);
  if (tiles == 0) return;
  launch_overlapping(tile_maxima_kernel, dim3((tiles + kWarps - 1) / kWarps, args.heads),
                     32 * kWarps, 0, stream, args);
  launch_overlapping(tile_scales_kernel, dim3(args.num_documents, args.heads), 32 * kChunkWarps, 0,
                     stream, args);
}

}  // namespace mxattn::cuda
