// dQ of the folded FP8 recipes on sm_90a (docs/numerics.md, section 4).
//
// A CTA owns 128 queries of one document and head and walks the keys they see in tiles of 128,
// ascending. Warpgroup 0 loads; warpgroups 1 and 2 own 64 queries each:
//
//   block t:  dQ += dS(t) K(t)   S(t+1) = Q K(t+1)^T   dP(t+1) = G V(t+1)^T
//   phase t:  dS of tile t from S, dP; nothing in flight
//
// dQ stays in the tensor core's accumulators, a power of two r_i a row, and is added to an FP32 sum
// at fixed places. Row constants live in registers, so the phase of a uniform tile loads nothing.
#pragma once

#include "kernels/sm90/backward.h"
#include "kernels/sm90/device_ops.h"
#include "kernels/sm90/document.h"
#include "kernels/sm90/epilogue.h"
#include "kernels/sm90/registers.h"
#include "ptx/barrier.h"
#include "ptx/copy.h"
#include "ptx/wgmma.h"
#include "recipe/stages.h"
#include "tile/fragment.h"
#include "tile/ring.h"
#include "tile/swizzle.h"

namespace mxattn::kernels::sm90::dq {

using stages::Exponent;
using stages::kKeyTile;

struct Config {
  static constexpr int kDim = 128;
  static constexpr int kConsumers = 2;  // warpgroups, 64 queries each
  static constexpr int kRows = 64 * kConsumers;
  static constexpr int kStages = 3;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kConsumerRegisters = 240;
  static constexpr int kProducerRegisters = 24;
  static_assert(fits_register_pool(kConsumers, kConsumerRegisters, kProducerRegisters));
};

struct alignas(1024) SharedStorage {
  std::uint8_t q[Config::kRows * Config::kDim];  // of the item
  std::uint8_t g[Config::kRows * Config::kDim];
  // What block t - 1 reads: rows of tile t and the transpose of tile t - 1.
  struct alignas(1024) Stage {
    std::uint8_t k[kKeyTile * Config::kDim];
    std::uint8_t v[kKeyTile * Config::kDim];
    std::uint8_t k_transposed[Config::kDim * kKeyTile];
  } stages[Config::kStages];
  // Beside the rows: exponents of tile t, read by phase t after the stage has been handed back.
  alignas(16) std::int8_t ek[Config::kStages][kKeyTile];
  alignas(16) std::int8_t ev[Config::kStages][kKeyTile];
  std::uint16_t out[Config::kRows * Config::kDim];  // epilogue, each warp its own 16 rows
  int item;
  tile::RingBarriers<1> item_ring;
  tile::RingBarriers<Config::kStages> operand_ring;
  tile::RingBarriers<Config::kStages> exponent_ring;
};

struct Work {
  plan::WorkItem item;
  Document document;
  int key_head;
  Range tiles;  // key tiles that any row of the item sees
};

__device__ __forceinline__ Work load_work(const BackwardParams& params, int index) {
  Work work;
  const int4 raw = reinterpret_cast<const int4*>(params.items)[index];
  work.item = {raw.x, raw.y, raw.z, raw.w};
  work.document = load_document(params.cu_seqlens_q, params.cu_seqlens_k, raw.x);
  work.key_head = raw.y / params.queries_per_key_head;
  const Document& d = work.document;
  const int last = work.item.first + work.item.count - 1;
  const int begin = visible_keys(params.mask, d.q_len, d.k_len, work.item.first).begin;
  const int end = visible_keys(params.mask, d.q_len, d.k_len, last).end;
  work.tiles = begin < end ? Range{begin / kKeyTile, (end - 1) / kKeyTile + 1} : Range{0, 0};
  return work;
}

// ---- producer ---------------------------------------------------------------------------------

__device__ void load(const BackwardParams& params, SharedStorage& shared) {
  tile::RingPosition<1> item_at;
  tile::RingPosition<Config::kStages> at, exponents_at;
  const int num_items = *params.num_items;
  while (true) {
    int index = atomicAdd(params.next_item, 1);
    if (index >= num_items) index = -1;
    shared.item_ring.wait_empty(item_at);
    shared.item = index;
    const std::uint32_t item_full = shared.item_ring.full_at(0);
    if (index < 0) {
      ptx::mbarrier_arrive(item_full);
      return;
    }
    const Work work = load_work(params, index);
    const Document& d = work.document;
    const int query_slot = static_cast<int>(d.q_slot) + work.item.first;
    ptx::mbarrier_arrive_expect(item_full, sizeof(shared.q) + sizeof(shared.g));
    ptx::copy_tensor_3d(ptx::shared_address(shared.q), &params.q, 0, query_slot, work.item.head,
                        item_full);
    ptx::copy_tensor_3d(ptx::shared_address(shared.g), &params.g, 0, query_slot, work.item.head,
                        item_full);
    item_at.advance();
    if (work.tiles.empty()) continue;

    for (int t = work.tiles.begin - 1; t < work.tiles.end; ++t) {
      const bool rows = t + 1 < work.tiles.end;
      const bool transposes = t >= work.tiles.begin;
      const int slot = static_cast<int>(d.k_slot) + t * kKeyTile;
      if (rows) {
        shared.exponent_ring.wait_empty(exponents_at);
        const std::uint32_t full = shared.exponent_ring.full_at(exponents_at.stage);
        const std::int64_t offset = work.key_head * params.k_slots + slot + kKeyTile;
        // The last tile of the last document may end before 128 slots do.
        const int bytes = static_cast<int>(
            min(std::int64_t{kKeyTile}, params.heads_k * params.k_slots - offset));
        ptx::mbarrier_arrive_expect(full, 2 * bytes);
        ptx::copy_bulk(ptx::shared_address(shared.ek[exponents_at.stage]),
                       params.k_exponents + offset, bytes, full);
        ptx::copy_bulk(ptx::shared_address(shared.ev[exponents_at.stage]),
                       params.v_exponents + offset, bytes, full);
        exponents_at.advance();
      }
      shared.operand_ring.wait_empty(at);
      auto& stage = shared.stages[at.stage];
      const std::uint32_t full = shared.operand_ring.full_at(at.stage);
      ptx::mbarrier_arrive_expect(full, (rows ? sizeof(stage.k) + sizeof(stage.v) : 0) +
                                            (transposes ? sizeof(stage.k_transposed) : 0));
      if (rows) {
        ptx::copy_tensor_3d(ptx::shared_address(stage.k), &params.k, 0, slot + kKeyTile,
                            work.key_head, full);
        ptx::copy_tensor_3d(ptx::shared_address(stage.v), &params.v, 0, slot + kKeyTile,
                            work.key_head, full);
      }
      if (transposes) {
        ptx::copy_tensor_3d(ptx::shared_address(stage.k_transposed), &params.k_transposed, slot, 0,
                            work.key_head, full);
      }
      at.advance();
    }
  }
}

// ---- consumers --------------------------------------------------------------------------------

/// The thread's two queries.
struct Rows {
  Range visible[2];  // keys
  int eq[2], eg[2];  // stored bytes
  int ng[2], no[2];
  int mu[2];
  float delta[2];  // D
  Exponent r[2];   // of the accumulator
  bool has_r[2];
};

/// Phase: codes of dS of one tile. `kUniform`: the document's keys in the tile share EK and EV.
template <bool kUniform, bool kMasked>
__device__ __forceinline__ void phase(const float (&s)[64], const float (&dp)[64], const Rows& rows,
                                      int first_key, const std::int8_t* ek_bytes,
                                      const std::int8_t* ev_bytes, float score_scale,
                                      std::uint32_t (&codes)[4][4]) {
  const int column = 2 * (threadIdx.x % 4);
  float a[2], addend[2], delta[2];
  const auto row_constants = [&](int h, Exponent ek, Exponent ev) {
    const Exponent eg = Exponent::stored(static_cast<std::int8_t>(rows.eg[h]));
    a[h] = stages::score_factor(score_scale,
                                Exponent::stored(static_cast<std::int8_t>(rows.eq[h])), ek);
    const Exponent f = stages::dq_addend(rows.mu[h], eg, ev, ek, rows.r[h]);
    addend[h] = f.nan ? kNan : static_cast<float>(f.value);
    delta[h] = stages::dq_delta(rows.delta[h], eg, ev);
  };
  if constexpr (kUniform) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      row_constants(h, Exponent::stored(ek_bytes[0]), Exponent::stored(ev_bytes[0]));
    }
  }
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    float ds[16];
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const int i = 16 * k + j;
      const int h = tile::fragment_half(i);
      const int key = 8 * (i >> 2) + column + (i & 1);
      if constexpr (not kUniform) {
        row_constants(h, Exponent::stored(ek_bytes[key]), Exponent::stored(ev_bytes[key]));
      }
      const float p = stages::probability<DeviceOps>(s[i], a[h], addend[h]);
      ds[j] = stages::dq_ds<DeviceOps>(p, dp[i], delta[h]);
      if constexpr (kMasked) {
        const bool seen =
            rows.visible[h].begin <= first_key + key and first_key + key < rows.visible[h].end;
        if (not seen) ds[j] = 0.0f;
      }
    }
    tile::pack_operand(codes[k], ds);
  }
}

/// r_i of the key chunk of `tile`, for a row that sees a key of it; else r stays.
__device__ __forceinline__ void update_scale(const BackwardParams& params, const Work& work,
                                             Rows& rows, int h, int chunk) {
  const int begin = max(rows.visible[h].begin, stages::chunk_begin(chunk));
  const int end = min(rows.visible[h].end, stages::chunk_end(chunk));
  if (begin >= end) return;
  const std::int64_t last = work.key_head * params.k_slots + work.document.k_slot + end - 1;
  rows.r[h] = stages::ds_exponent_dq(
      Exponent::stored(static_cast<std::int8_t>(rows.ng[h])),
      Exponent::stored(static_cast<std::int8_t>(rows.no[h])),
      Exponent::stored(params.v_running_norms[last]), Exponent::stored(params.k_exponents[last]));
  rows.has_r[h] = true;
}

__device__ void attend(const BackwardParams& params, SharedStorage& shared, int consumer) {
  const int thread = threadIdx.x % 128;
  const bool leader = threadIdx.x % 32 == 0;
  const int warp = thread / 32;
  tile::RingPosition<1> item_at;
  tile::RingPosition<Config::kStages> at, exponents_at;
  constexpr int kPieces = Config::kDim / 8;
  float4* sums =
      params.sums + (blockIdx.x * Config::kConsumers + consumer) * kPieces * 128 + thread;
  const std::uint32_t q_tile = ptx::shared_address(shared.q) + consumer * 64 * Config::kDim;
  const std::uint32_t g_tile = ptx::shared_address(shared.g) + consumer * 64 * Config::kDim;
  using Scores = ptx::WgmmaE4m3<kKeyTile>;
  using Gradients = ptx::WgmmaE4m3<Config::kDim>;

  while (true) {
    shared.item_ring.wait_full(item_at);
    const int index = shared.item;
    if (index < 0) return;
    const Work work = load_work(params, index);
    const Document& d = work.document;
    const int first_row = work.item.first + 64 * consumer;
    const int last_row = first_row + 63;

    Rows rows;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = first_row + tile::fragment_row(thread, h);
      const bool valid = row < d.q_len;
      rows.visible[h] = valid ? visible_keys(params.mask, d.q_len, d.k_len, row) : Range{0, 0};
      const std::int64_t slot = work.item.head * params.q_slots + d.q_slot + row;
      const bool seeing = not rows.visible[h].empty();
      rows.eq[h] = valid ? params.q_exponents[slot] : 0;
      rows.eg[h] = seeing ? params.g_exponents[slot] : 0;
      rows.ng[h] = seeing ? params.g_norms[slot] : 0;
      rows.no[h] = seeing ? params.o_norms[slot] : 0;
      rows.delta[h] = seeing ? params.delta[slot] : 0.0f;
      rows.mu[h] =
          valid ? params.row_reference[work.item.head * params.total_q + d.q_token + row] : 0;
      rows.r[h] = Exponent(0);
      rows.has_r[h] = false;
    }
    // Keys that every row of the warpgroup sees.
    Range all{0, 0};
    if (last_row < d.q_len) {
      all = {visible_keys(params.mask, d.q_len, d.k_len, last_row).begin,
             visible_keys(params.mask, d.q_len, d.k_len, first_row).end};
    }

    float dq[64], s[64], dp[64];
    int keep = 0;
    bool started = false;
    int chunk = -1;
#pragma unroll
    for (int i = 0; i < 64; ++i) dq[i] = 0.0f;

    const auto scores = [&](const SharedStorage::Stage& stage) {
      const std::uint64_t qd = tile::k_major_descriptor(tile::Swizzle::k128, q_tile);
      const std::uint64_t gd = tile::k_major_descriptor(tile::Swizzle::k128, g_tile);
      const std::uint64_t kd =
          tile::k_major_descriptor(tile::Swizzle::k128, ptx::shared_address(stage.k));
      const std::uint64_t vd =
          tile::k_major_descriptor(tile::Swizzle::k128, ptx::shared_address(stage.v));
      Scores::fresh_ss(s, qd, kd);
#pragma unroll
      for (int k = 1; k < Config::kDim / stages::kMmaDepth; ++k) {
        Scores::add_ss(s, qd + k * tile::kDescriptorStepK32, kd + k * tile::kDescriptorStepK32);
      }
      ptx::wgmma_commit_group();
      Scores::fresh_ss(dp, gd, vd);
#pragma unroll
      for (int k = 1; k < Config::kDim / stages::kMmaDepth; ++k) {
        Scores::add_ss(dp, gd + k * tile::kDescriptorStepK32, vd + k * tile::kDescriptorStepK32);
      }
      ptx::wgmma_commit_group();
    };

    if (not work.tiles.empty()) {
      shared.operand_ring.wait_full(at);
      ptx::wgmma_fence();
      scores(shared.stages[at.stage]);
      ptx::wgmma_wait_group<0>();
      ptx::pin(s);
      ptx::pin(dp);
      if (leader) ptx::mbarrier_arrive(shared.operand_ring.empty_at(at.stage));
      at.advance();
    }
    for (int t = work.tiles.begin; t < work.tiles.end; ++t) {
      const int first_key = t * kKeyTile;
      // A chunk is whole tiles, so r changes between tiles only.
      const int chunk_now = stages::chunk_of(first_key);
      float change[2] = {1.0f, 1.0f};
      if (chunk_now != chunk) {
        chunk = chunk_now;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const Exponent before = rows.r[h];
          const bool had = rows.has_r[h];
          update_scale(params, work, rows, h, chunk);
          if (had) change[h] = stages::factor(before - rows.r[h]);
        }
      }
      // Rescaling of all rows costs 64 multiplications, once a chunk.
      if (keep and (change[0] != 1.0f or change[1] != 1.0f)) {
#pragma unroll
        for (int i = 0; i < 64; ++i) {
          dq[i] = stages::rescale_accumulator<DeviceOps>(dq[i], change[tile::fragment_half(i)]);
        }
      }
      if (keep and stages::promotes_dq(t, consumer)) {
        const float scale[2] = {stages::factor(rows.r[0]), stages::factor(rows.r[1])};
        promote_to_sum(dq, scale, sums, 128, started);
        started = true;
        keep = 0;
      }

      shared.exponent_ring.wait_full(exponents_at);
      const std::int8_t* ek = shared.ek[exponents_at.stage];
      const std::int8_t* ev = shared.ev[exponents_at.stage];
      const int last = min(kKeyTile, d.k_len - first_key) - 1;
      const bool uniform = ek[0] == ek[last] and ev[0] == ev[last];
      const bool every = all.begin <= first_key and first_key + kKeyTile <= all.end;
      std::uint32_t codes[4][4];
      if (not uniform) {
        phase<false, true>(s, dp, rows, first_key, ek, ev, params.score_scale, codes);
      } else if (every) {
        phase<true, false>(s, dp, rows, first_key, ek, ev, params.score_scale, codes);
      } else {
        phase<true, true>(s, dp, rows, first_key, ek, ev, params.score_scale, codes);
      }
      __syncwarp();
      if (leader) ptx::mbarrier_arrive(shared.exponent_ring.empty_at(exponents_at.stage));
      exponents_at.advance();

      shared.operand_ring.wait_full(at);
      const auto& stage = shared.stages[at.stage];
      const std::uint64_t kt =
          tile::k_major_descriptor(tile::Swizzle::k128, ptx::shared_address(stage.k_transposed));
      ptx::wgmma_fence();
      Gradients::rs(dq, codes[0], kt, keep);
#pragma unroll
      for (int k = 1; k < 4; ++k) {
        Gradients::add_rs(dq, codes[k], kt + k * tile::kDescriptorStepK32);
      }
      ptx::wgmma_commit_group();
      // The last block multiplies what an earlier tile left in the rows: finite, and never read.
      scores(stage);
      ptx::wgmma_wait_group<0>();
      ptx::pin(s);
      ptx::pin(dp);
      ptx::pin(dq);
      keep = 1;
      if (leader) ptx::mbarrier_arrive(shared.operand_ring.empty_at(at.stage));
      at.advance();
    }
    __syncwarp();
    if (leader) ptx::mbarrier_arrive(shared.item_ring.empty_at(0));
    item_at.advance();

    const Work finished = load_work(params, index);
    const float scale[2] = {keep ? stages::factor(rows.r[0]) : 0.0f,
                            keep ? stages::factor(rows.r[1]) : 0.0f};
    add_sum(dq, scale, sums, 128, started);
    finish_rotated(dq, params.softmax_scale, params.rotate);
    store_warp_rows<Config::kDim>(dq, shared.out + (64 * consumer + 16 * warp) * Config::kDim,
                                  params.dq, finished.item.head, finished.document.q_token,
                                  finished.item.first + 64 * consumer + 16 * warp,
                                  finished.document.q_len);
  }
}

__global__ void __launch_bounds__(Config::kThreads, 1)
    dq_kernel(const __grid_constant__ BackwardParams params) {
  extern __shared__ std::uint8_t raw[];
  auto& shared = *reinterpret_cast<SharedStorage*>(raw);
  if (threadIdx.x == 0) {
    shared.item_ring.initialise(4 * Config::kConsumers);
    shared.operand_ring.initialise(4 * Config::kConsumers);
    shared.exponent_ring.initialise(4 * Config::kConsumers);
    ptx::fence_mbarrier_init();
  }
  // Rows of stages that the first items never fill must hold finite codes.
  for (int i = threadIdx.x; i < static_cast<int>(sizeof(shared.stages) / 16);
       i += Config::kThreads) {
    reinterpret_cast<uint4*>(shared.stages)[i] = uint4{0, 0, 0, 0};
  }
  ptx::fence_proxy_async_shared();
  __syncthreads();

  const int warpgroup = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x) / 128, 0);
  if (warpgroup == 0) {
    ptx::set_max_registers_down<Config::kProducerRegisters>();
    if (threadIdx.x == 0) load(params, shared);
  } else {
    ptx::set_max_registers_up<Config::kConsumerRegisters>();
    attend(params, shared, warpgroup - 1);
  }
}

}  // namespace mxattn::kernels::sm90::dq
