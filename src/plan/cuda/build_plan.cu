// cu_seqlens to the sorted work list, in up to three kernels:
//   list    documents -> tiles of one head in input order, each with its sort key; a CTA for 1024
//           documents, which sums the tiles of all documents before them by itself
//   sort    tiles by key, stable: one CTA, radix 256, as many passes as the keys' spread needs;
//           with up to 1024 documents it lists the tiles too, and the first kernel is not launched
//   expand  tiles -> items of all heads; a thread an item
//
// A cost does not depend on the head, so tiles of one head are sorted and then repeated. Items of
// equal cost stand by document, head, first: a run of r tiles of one document and cost becomes, for
// n heads, r tiles of the first head, r of the second and so on, in the n r places that n copies of
// each tile would take. So the item at a place is found from the place alone.
#include <algorithm>
#include <limits>
#include <utility>

#include "base/cuda_check.h"
#include "plan/cuda/build_plan.h"

namespace mxattn::plan::cuda {
namespace {

constexpr int kThreads = 1024;  // of the list and sort kernels; also the documents of a batch
constexpr int kWarps = kThreads / 32;
constexpr int kExpandThreads = 256;
constexpr int kDigitBits = 8;
constexpr int kDigits = 1 << kDigitBits;
constexpr int kPile = kDigits;  // counter of lanes without a tile; nobody reads it
// Odd, so that a warp that adds up the counters of one digit over warps meets all banks.
constexpr int kCounterStride = kDigits + 1;
constexpr int kCountersPerThread = kWarps * kDigits / kThreads;
constexpr unsigned kAllLanes = 0xFFFFFFFFu;

static_assert(kWarps == 32, "one warp adds up the sums of all warps");
static_assert(kWarps % kCountersPerThread == 0, "a thread's counters belong to one digit");

/// Positions of one document that become one item for each head.
struct alignas(16) Tile {
  std::int32_t document;
  std::int32_t first;
  std::int32_t count;
  std::uint32_t key;  // orders as the cost does
};
static_assert(sizeof(Tile) == 16, "moved as one word");

/// What one kernel leaves for the next.
struct alignas(16) Header {
  std::int32_t tiles;
  std::int32_t in_second;  // the sorted tiles lie in the second buffer
};

struct Params {
  PlanSpec spec;
  Mask mask;
  int num_documents;
  HeadGroups groups{1, 0};
  std::uint32_t most_key;  // visits from which on all costs are the same
  int max_tiles;
  const std::int32_t* cu_seqlens_q;
  const std::int32_t* cu_seqlens_k;
  Header* header;
  Tile* first_buffer;  // max_tiles each
  Tile* second_buffer;
  WorkItem* items;
  std::int32_t* num_items;
};

struct Shared {
  int warp_sums[kWarps];
  unsigned warp_lows[kWarps], warp_highs[kWarps];
  int starts[kThreads];                   // list: tiles of the batch before each document
  int counters[kWarps * kCounterStride];  // sort: [warp][digit], counts and then places
};

__device__ __forceinline__ int length_of(const std::int32_t* cu_seqlens, int document) {
  return max(0, cu_seqlens[document + 1] - cu_seqlens[document]);
}

__device__ __forceinline__ int tiles_of(int length, int tile) {
  return length / tile + (length % tile != 0 ? 1 : 0);
}

__device__ __forceinline__ int inclusive_warp_scan(int value) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int other = __shfl_up_sync(kAllLanes, value, offset);
    if (lane >= offset) value += other;
  }
  return value;
}

/// Sum of the values of the threads before this one; `total` becomes the sum of all.
__device__ __forceinline__ int exclusive_scan(int value, int& total, int* warp_sums) {
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int inclusive = inclusive_warp_scan(value);
  if (lane == 31) warp_sums[warp] = inclusive;
  __syncthreads();
  const int warps_up_to = inclusive_warp_scan(warp_sums[lane]);
  total = __shfl_sync(kAllLanes, warps_up_to, 31);
  const int warps_before = warp == 0 ? 0 : __shfl_sync(kAllLanes, warps_up_to, warp - 1);
  __syncthreads();  // the next scan writes the same sums
  return warps_before + inclusive - value;
}

// List ---------------------------------------------------------------------------------------

/// Writes the tiles of a batch of documents behind those of the batches before it.
__device__ void list_tiles(const Params& params, int batch, Shared& shared) {
  const PlanSpec& spec = params.spec;
  const std::int32_t* cu_seqlens =
      spec.pass == Pass::kDkv ? params.cu_seqlens_k : params.cu_seqlens_q;
  const int thread = threadIdx.x;

  // Where the batch begins in the list.
  int tiles_before = 0;
  if (batch > 0) {
    int sum = 0;
#pragma unroll 4
    for (int b = 0; b < batch; ++b) {
      sum += tiles_of(length_of(cu_seqlens, b * kThreads + thread), spec.tile);
    }
    exclusive_scan(sum, tiles_before, shared.warp_sums);
  }

  // Where each document begins in the batch.
  const int own = batch * kThreads + thread;
  const int own_tiles =
      own < params.num_documents ? tiles_of(length_of(cu_seqlens, own), spec.tile) : 0;
  int batch_tiles;
  shared.starts[thread] = exclusive_scan(own_tiles, batch_tiles, shared.warp_sums);
  __syncthreads();

  for (int i = thread; i < batch_tiles; i += kThreads) {
    // The last document that begins at or before tile i: those without tiles begin where the next
    // one does.
    int at = 0;
#pragma unroll
    for (int step = kThreads / 2; step > 0; step /= 2) {
      if (shared.starts[at + step] <= i) at += step;
    }
    const int document = batch * kThreads + at;
    const int q_len = length_of(params.cu_seqlens_q, document);
    const int k_len = length_of(params.cu_seqlens_k, document);
    const int first = (i - shared.starts[at]) * spec.tile;
    const int count = min(spec.tile, (spec.pass == Pass::kDkv ? k_len : q_len) - first);
    const std::int64_t visits =
        visited_tiles(params.mask, q_len, k_len, spec.pass, spec.tile, first, count);
    const auto key = static_cast<std::uint32_t>(min(visits, std::int64_t{params.most_key}));
    const int place = tiles_before + i;
    if (place < params.max_tiles) params.first_buffer[place] = {document, first, count, key};
  }

  const bool last = (batch + 1) * std::int64_t{kThreads} >= params.num_documents;
  if (last and thread == 0) {
    const int tiles = min(tiles_before + batch_tiles, params.max_tiles);
    params.header->tiles = tiles;
    *params.num_items = tiles * params.groups.heads;
  }
}

// Sort ---------------------------------------------------------------------------------------

/// Calls use(value, present) for positions [begin, end), 32 at a time and in order, all lanes
/// together; the next values are loaded meanwhile. One warp.
template <class Load, class Use>
__device__ __forceinline__ void for_each_in_order(int begin, int end, Load load, Use use) {
  const int lane = threadIdx.x % 32;
  decltype(load(0)) next{};
  if (begin + lane < end) next = load(begin + lane);
  for (int at = begin; at < end; at += 32) {
    const auto value = next;
    if (at + 32 + lane < end) next = load(at + 32 + lane);
    use(value, at + lane < end);
  }
}

/// Adds one to the digit's counter for each lane, lower lanes first, and returns what the counter
/// was before this lane. The counters are the warp's own.
__device__ __forceinline__ int count_up(int* counters, int digit) {
  const int lane = threadIdx.x % 32;
  const unsigned peers = __match_any_sync(kAllLanes, digit);
  const int rank = __popc(peers & ((1u << lane) - 1));
  const int before = counters[digit];
  __syncwarp();
  if (rank == 0) counters[digit] = before + __popc(peers);
  __syncwarp();
  return before + rank;
}

/// One stable pass: to[] = from[] by digit (high - key) >> shift. Each warp has its own stretch of
/// the list, and its own places for every digit.
__device__ void sort_by_digit(const Tile* from, Tile* to, int tiles, unsigned high, int shift,
                              Shared& shared) {
  const int thread = threadIdx.x;
  const int warp = thread / 32;
  for (int i = thread; i < kWarps * kCounterStride; i += kThreads) shared.counters[i] = 0;
  __syncthreads();

  const int rows = (tiles + kThreads - 1) / kThreads;  // of 32 tiles, for each warp
  const int begin = min(tiles, warp * rows * 32);
  const int end = min(tiles, begin + rows * 32);
  int* const counters = shared.counters + warp * kCounterStride;
  const auto digit_of = [&](std::uint32_t key, bool present) {
    return present ? static_cast<int>(((high - key) >> shift) % kDigits) : kPile;
  };
  for_each_in_order(
      begin, end, [&](int i) { return from[i].key; },
      [&](std::uint32_t key, bool present) { count_up(counters, digit_of(key, present)); });
  __syncthreads();

  // Counts to places: all warps of digit 0, then of digit 1 and so on.
  const int digit = thread * kCountersPerThread / kWarps;
  const int first_warp = thread * kCountersPerThread % kWarps;
  int counts[kCountersPerThread];
  int sum = 0;
#pragma unroll
  for (int i = 0; i < kCountersPerThread; ++i) {
    counts[i] = shared.counters[(first_warp + i) * kCounterStride + digit];
    sum += counts[i];
  }
  int total;
  int place = exclusive_scan(sum, total, shared.warp_sums);
#pragma unroll
  for (int i = 0; i < kCountersPerThread; ++i) {
    shared.counters[(first_warp + i) * kCounterStride + digit] = place;
    place += counts[i];
  }
  __syncthreads();

  for_each_in_order(
      begin, end, [&](int i) { return from[i]; },
      [&](const Tile& tile, bool present) {
        const int to_place = count_up(counters, digit_of(tile.key, present));
        if (present) to[to_place] = tile;
      });
  __syncthreads();
}

/// Sorts the listed tiles by key, descending.
__device__ void sort_tiles(const Params& params, Shared& shared) {
  const int tiles = params.header->tiles;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;

  // Only digits in which keys differ are sorted by.
  unsigned low = std::numeric_limits<unsigned>::max(), high = 0;
  for (int i = threadIdx.x; i < tiles; i += kThreads) {
    const std::uint32_t key = params.first_buffer[i].key;
    low = min(low, key);
    high = max(high, key);
  }
  low = __reduce_min_sync(kAllLanes, low);
  high = __reduce_max_sync(kAllLanes, high);
  if (lane == 0) {
    shared.warp_lows[warp] = low;
    shared.warp_highs[warp] = high;
  }
  __syncthreads();
  low = __reduce_min_sync(kAllLanes, shared.warp_lows[lane]);
  high = __reduce_max_sync(kAllLanes, shared.warp_highs[lane]);
  const unsigned spread = tiles > 0 ? high - low : 0;

  Tile* from = params.first_buffer;
  Tile* to = params.second_buffer;
  for (int shift = 0; shift < 32 and spread >> shift != 0; shift += kDigitBits) {
    sort_by_digit(from, to, tiles, high, shift, shared);
    std::swap(from, to);
  }
  if (threadIdx.x == 0) params.header->in_second = from == params.second_buffer ? 1 : 0;
}

// Expand -------------------------------------------------------------------------------------

/// Positions before `at`, next to each other, for which `same` holds; it holds nowhere behind the
/// first for which it does not. `limit`: positions there are.
template <class Same>
__device__ __forceinline__ int count_same(int limit, Same same) {
  int found = 0;
  int step = 1;
  while (step <= limit - found and same(found + step)) {
    found += step;
    step *= 2;
  }
  for (step /= 2; step > 0; step /= 2) {
    if (step <= limit - found and same(found + step)) found += step;
  }
  return found;
}

__device__ WorkItem item_at(const Params& params, int tiles, const Tile* sorted, int index) {
  const HeadGroups& groups = params.groups;
  const int group = groups.of(index / tiles);
  const int first_head = groups.first(group);
  const int heads = groups.size(group);
  const int in_group = index - tiles * first_head;

  // The run around the tile that stands here when each is repeated for its heads in place.
  const int middle = in_group / heads;
  const int document = sorted[middle].document;
  const std::uint32_t key = sorted[middle].key;
  const auto same = [&](int at) {
    return sorted[at].document == document and sorted[at].key == key;
  };
  const int before = count_same(middle, [&](int distance) { return same(middle - distance); });
  const int after =
      count_same(tiles - 1 - middle, [&](int distance) { return same(middle + distance); });
  const int begin = middle - before;
  const int length = before + 1 + after;

  // The run is walked once for each head.
  const int in_run = in_group - begin * heads;
  const Tile tile = sorted[begin + in_run % length];
  return {tile.document, first_head + in_run / length, tile.first, tile.count};
}

// Kernels ------------------------------------------------------------------------------------

__global__ void __launch_bounds__(kThreads, 1) list_kernel(const Params params) {
  __shared__ Shared shared;
  list_tiles(params, blockIdx.x, shared);
}

__global__ void __launch_bounds__(kThreads, 1) sort_kernel(const Params params) {
  __shared__ Shared shared;
  if (params.num_documents <= kThreads) {
    list_tiles(params, 0, shared);
    __syncthreads();
  }
  sort_tiles(params, shared);
}

__global__ void __launch_bounds__(kExpandThreads) expand_kernel(const Params params) {
  const int tiles = params.header->tiles;
  const std::int64_t index = std::int64_t{blockIdx.x} * kExpandThreads + threadIdx.x;
  if (index >= tiles * params.groups.heads) return;
  const Tile* sorted = params.header->in_second != 0 ? params.second_buffer : params.first_buffer;
  const WorkItem item = item_at(params, tiles, sorted, static_cast<int>(index));
  reinterpret_cast<int4*>(params.items)[index] =
      make_int4(item.document, item.head, item.first, item.count);
}

// Host ---------------------------------------------------------------------------------------

void check(const BuildSpec& build) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  check_spec(build.spec);
  require(build.spec.order != Order::kInput and build.spec.order != Order::kLongFirst, "order",
          name_of(build.spec.order), "a sorted order");
  require(build.num_documents > 0, "num_documents", build.num_documents, "at least 1");
  require(build.total_q >= 0 and build.total_q <= kMost, "total_q", build.total_q,
          "0 or more, and less than 2^31");
  require(build.total_k >= 0 and build.total_k <= kMost, "total_k", build.total_k,
          "0 or more, and less than 2^31");
}

/// Most tiles of one head: as many documents as can have a token have one, and what is left makes
/// whole tiles.
std::int64_t max_tiles(const BuildSpec& build) {
  const std::int64_t total = build.spec.pass == Pass::kDkv ? build.total_k : build.total_q;
  const std::int64_t begun = std::min<std::int64_t>(build.num_documents, total);
  return begun == 0 ? 0 : begun + (total - begun) / build.spec.tile;
}

/// Fewest visits whose cost is the largest there is: more of them cost the same. With it as a bound
/// visits order as costs do.
std::uint32_t most_key(const PlanSpec& spec) {
  constexpr std::uint32_t kMost = std::numeric_limits<std::uint32_t>::max();
  const int group = spec.pass == Pass::kDkv ? spec.heads_q / spec.heads_k : 1;
  const std::uint64_t per_visit = std::uint64_t{spec.cost.per_tile} * static_cast<unsigned>(group);
  if (per_visit == 0) return 0;
  return static_cast<std::uint32_t>((kMost - spec.cost.per_item + per_visit - 1) / per_visit);
}

}  // namespace

std::int64_t max_items(const BuildSpec& build) {
  check(build);
  const std::int64_t items = max_tiles(build) * heads_of(build.spec);
  require(items <= std::numeric_limits<std::int32_t>::max(), "max_items", items,
          "at most 2^31 - 1 work items");
  return items;
}

std::int64_t scratch_bytes(const BuildSpec& build) {
  max_items(build);
  return static_cast<std::int64_t>(sizeof(Header) + 2 * max_tiles(build) * sizeof(Tile));
}

void build_plan(const BuildSpec& build, const std::int32_t* cu_seqlens_q,
                const std::int32_t* cu_seqlens_k, WorkItem* items, std::int32_t* num_items,
                void* scratch, cudaStream_t stream) {
  const std::int64_t most_items = max_items(build);
  Params params;
  params.groups = HeadGroups(heads_of(build.spec), build.spec.heads_per_group);
  params.spec = build.spec;
  params.mask = build.mask;
  params.num_documents = build.num_documents;
  params.most_key = most_key(build.spec);
  params.max_tiles = static_cast<int>(max_tiles(build));
  params.cu_seqlens_q = cu_seqlens_q;
  params.cu_seqlens_k = cu_seqlens_k;
  params.header = static_cast<Header*>(scratch);
  params.first_buffer = reinterpret_cast<Tile*>(params.header + 1);
  params.second_buffer = params.first_buffer + params.max_tiles;
  params.items = items;
  params.num_items = num_items;

  if (build.num_documents > kThreads) {
    const int batches = (build.num_documents - 1) / kThreads + 1;
    list_kernel<<<batches, kThreads, 0, stream>>>(params);
    MXATTN_CUDA_CHECK(cudaGetLastError());
  }
  sort_kernel<<<1, kThreads, 0, stream>>>(params);
  MXATTN_CUDA_CHECK(cudaGetLastError());
  if (most_items > 0) {
    const auto ctas = static_cast<unsigned>((most_items - 1) / kExpandThreads + 1);
    expand_kernel<<<ctas, kExpandThreads, 0, stream>>>(params);
    MXATTN_CUDA_CHECK(cudaGetLastError());
  }
}

}  // namespace mxattn::plan::cuda
