// dK and dV of the folded FP8 recipes on sm_90a (docs/numerics.md, section 4).
//
// A CTA owns 128 keys of one document and key head and walks the queries that see them in steps of
// 64, query heads of the group one after the other. Warpgroup 0 loads: warp 0 keeps steps in flight
// through the copy engine, warp 1 forms what each query of a step adds (addend, D'). Warpgroups 1
// and 2 own 64 keys each; scores are computed transposed (keys x queries), so that P and dS leave
// the accumulators as A operands:
//
//   block i:  dV += P(i)^T G(i)   dK += dS(i)^T Q(i)   S(i+1) = K Q(i+1)^T   dP(i+1) = V G(i+1)^T
//   phase i:  P, dS of step i from S, dP; nothing in flight
//
// While one warpgroup is in its block the other is in its phase; no barrier holds them to it.
// dV and dK stay in the tensor core's accumulators and are added to FP32 sums at fixed places.
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

namespace mxattn::kernels::sm90::dkv {

using stages::Exponent;
using stages::kKeyTile;
using stages::kQueryStep;

struct Config {
  static constexpr int kDim = 128;
  static constexpr int kConsumers = 2;  // warpgroups, 64 keys each
  static constexpr int kStages = 3;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kConsumerRegisters = 240;
  static constexpr int kProducerRegisters = 24;
  static_assert(fits_register_pool(kConsumers, kConsumerRegisters, kProducerRegisters));
  // float4 of FP32 sums of a CTA: dV and dK of 128 keys.
  static constexpr int kSumsPerCta = 2 * kKeyTile * kDim / 4;
};

struct alignas(1024) SharedStorage {
  std::uint8_t k[kKeyTile * Config::kDim];  // of the item
  std::uint8_t v[kKeyTile * Config::kDim];
  // What block i - 1 reads: rows of step i and transposes of step i - 1.
  struct alignas(1024) Stage {
    std::uint8_t q[kQueryStep * Config::kDim];
    std::uint8_t g[kQueryStep * Config::kDim];
    std::uint8_t q_transposed[Config::kDim * kQueryStep];
    std::uint8_t g_transposed[Config::kDim * kQueryStep];
  } stages[Config::kStages];
  std::uint16_t out[kKeyTile * Config::kDim];  // epilogue, each warp its own 16 rows
  // What phase i reads.
  struct alignas(16) Stats {
    float addend[kQueryStep];  // -mu + eG - c + 8; -inf for queries outside the document
    float delta[kQueryStep];   // D'
    std::int8_t eq[kQueryStep];
    std::int32_t c, r;         // of the step; cuda::kNanScale for NaN
    std::int32_t eq_uniform;   // of the document's queries in the step
    std::int32_t unused;
  } stats[Config::kStages];
  int item;  // index into the list, -1 at its end
  tile::RingBarriers<1> item_ring;
  tile::RingBarriers<Config::kStages> operand_ring;
  tile::RingBarriers<Config::kStages> stats_ring;
};

__device__ __forceinline__ Exponent exponent_of(std::int32_t value) {
  return value == cuda::kNanScale ? Exponent(0, true) : Exponent(value);
}
__device__ __forceinline__ std::int32_t value_of(Exponent e) { return e.nan ? cuda::kNanScale : e.value; }

/// What an item is about; every role derives it alike.
struct Work {
  plan::WorkItem item;  // head: the key head
  Document document;
  Range steps;  // 64-query steps that any key of the item is seen from
};

__device__ __forceinline__ Work load_work(const BackwardParams& params, int index) {
  Work work;
  const int4 raw = reinterpret_cast<const int4*>(params.items)[index];
  work.item = {raw.x, raw.y, raw.z, raw.w};
  work.document = load_document(params.cu_seqlens_q, params.cu_seqlens_k, raw.x);
  const Document& d = work.document;
  const int last = work.item.first + work.item.count - 1;
  const int begin = visible_queries(params.mask, d.q_len, d.k_len, work.item.first).begin;
  const int end = visible_queries(params.mask, d.q_len, d.k_len, last).end;
  work.steps = begin < end ? Range{begin / kQueryStep, (end - 1) / kQueryStep + 1} : Range{0, 0};
  return work;
}

// ---- producers --------------------------------------------------------------------------------

/// Warp 0, one thread: items, K and V, and the operands of every block.
__device__ void load(const BackwardParams& params, SharedStorage& shared) {
  tile::RingPosition<1> item_at;
  tile::RingPosition<Config::kStages> at;
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
    const int key_slot = static_cast<int>(d.k_slot) + work.item.first;
    ptx::mbarrier_arrive_expect(item_full, sizeof(shared.k) + sizeof(shared.v));
    ptx::copy_tensor_3d(ptx::shared_address(shared.k), &params.k, 0, key_slot, work.item.head,
                        item_full);
    ptx::copy_tensor_3d(ptx::shared_address(shared.v), &params.v, 0, key_slot, work.item.head,
                        item_full);
    item_at.advance();

    const int num_steps = work.steps.size();
    const int total = num_steps * params.queries_per_key_head;
    const auto head_of = [&](int i) {
      return work.item.head * params.queries_per_key_head + i / num_steps;
    };
    const auto slot_of = [&](int i) {
      return static_cast<int>(d.q_slot) + (work.steps.begin + i % num_steps) * kQueryStep;
    };
    for (int i = -1; i < total; ++i) {
      if (total == 0) break;
      shared.operand_ring.wait_empty(at);
      auto& stage = shared.stages[at.stage];
      const std::uint32_t full = shared.operand_ring.full_at(at.stage);
      const bool rows = i + 1 < total;
      const bool transposes = i >= 0;
      ptx::mbarrier_arrive_expect(
          full, (rows ? sizeof(stage.q) + sizeof(stage.g) : 0) +
                    (transposes ? sizeof(stage.q_transposed) + sizeof(stage.g_transposed) : 0));
      if (rows) {
        ptx::copy_tensor_3d(ptx::shared_address(stage.q), &params.q, 0, slot_of(i + 1),
                            head_of(i + 1), full);
        ptx::copy_tensor_3d(ptx::shared_address(stage.g), &params.g, 0, slot_of(i + 1),
                            head_of(i + 1), full);
      }
      if (transposes) {
        ptx::copy_tensor_3d(ptx::shared_address(stage.g_transposed), &params.g_transposed,
                            slot_of(i), 0, head_of(i), full);
        ptx::copy_tensor_3d(ptx::shared_address(stage.q_transposed), &params.q_transposed,
                            slot_of(i), 0, head_of(i), full);
      }
      at.advance();
    }
  }
}

/// Warp 1: what every query of a step adds to the phase.
__device__ void form_stats(const BackwardParams& params, SharedStorage& shared) {
  tile::RingPosition<1> item_at;
  tile::RingPosition<Config::kStages> at;
  const int lane = threadIdx.x % 32;
  while (true) {
    shared.item_ring.wait_full(item_at);
    const int index = shared.item;
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(shared.item_ring.empty_at(0));
    item_at.advance();
    if (index < 0) return;
    const Work work = load_work(params, index);
    const Document& d = work.document;

    // nV_T, the largest norm exponent of the tile's keys. 127 (NaN) is the largest byte.
    const std::int8_t* norms =
        params.v_norms + work.item.head * params.k_slots + d.k_slot + work.item.first;
    int nv = -128;
    for (int k = lane; k < work.item.count; k += 32) nv = max(nv, int{norms[k]});
    nv = __reduce_max_sync(0xFFFFFFFFu, nv);
    const Exponent nv_tile = Exponent::stored(static_cast<std::int8_t>(nv));

    for (int h = 0; h < params.queries_per_key_head; ++h) {
      const int head = work.item.head * params.queries_per_key_head + h;
      const std::int64_t slots = head * params.q_slots + d.q_slot;
      const std::int64_t tokens = head * params.total_q + d.q_token;
      for (int s = work.steps.begin; s < work.steps.end; ++s) {
        const int tile_start = s * kQueryStep / stages::kQueryTile * stages::kQueryTile;
        const cuda::TileScales raw = params.tile_scales[(slots + tile_start) / stages::kSlotAlignment];
        stages::ChunkScales scales;
        scales.a = exponent_of(raw.a);
        scales.b = exponent_of(raw.b);
        scales.c = exponent_of(raw.c);
        const Exponent r = stages::ds_exponent_dk(scales, nv_tile);

        float addend[2], delta[2];
        int eq[2];
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const int row = s * kQueryStep + lane + 32 * n;
          const bool valid = row < d.q_len;
          // A query outside the document takes the exponent of the last one in it.
          eq[n] = params.q_exponents[slots + min(row, d.q_len - 1)];
          const Exponent eg =
              valid ? Exponent::stored(params.g_exponents[slots + row]) : Exponent(0);
          const bool keyless =
              not valid or visible_keys(params.mask, d.q_len, d.k_len, row).empty();
          const Exponent sum =
              stages::dkv_addend(valid ? params.row_reference[tokens + row] : 0, eg, scales.c);
          addend[n] = keyless ? -kInfinity : (sum.nan ? kNan : static_cast<float>(sum.value));
          delta[n] =
              keyless ? 0.0f
                      : stages::dkv_delta<DeviceOps>(
                            params.delta[slots + row],
                            stages::dkv_delta_factor(scales.c, eg, Exponent::stored(eq[n]), r));
        }
        const int first = __shfl_sync(0xFFFFFFFFu, eq[0], 0);
        const bool uniform = __all_sync(0xFFFFFFFFu, eq[0] == first and eq[1] == first);

        shared.stats_ring.wait_empty(at);
        auto& stats = shared.stats[at.stage];
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          stats.addend[lane + 32 * n] = addend[n];
          stats.delta[lane + 32 * n] = delta[n];
          stats.eq[lane + 32 * n] = static_cast<std::int8_t>(eq[n]);
        }
        if (lane == 0) {
          stats.c = value_of(scales.c);
          stats.r = value_of(r);
          stats.eq_uniform = uniform;
        }
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(shared.stats_ring.full_at(at.stage));
        at.advance();
      }
    }
  }
}

// ---- consumers --------------------------------------------------------------------------------

/// The thread's two keys.
struct Keys {
  Range visible[2];  // queries that see the key
  int ek[2], ev[2];  // stored bytes
};

/// Phase: codes of P and of dS of one step from its scores and dP. `kUniform`: the step's queries
/// share EQ; `kMasked`: some key is not seen from some query of the step.
template <bool kUniform, bool kMasked>
__device__ __forceinline__ void phase(const float (&s)[32], const float (&dp)[32], const Keys& keys,
                                      const SharedStorage::Stats& stats, int first_query,
                                      float score_scale, std::uint32_t (&p_codes)[2][4],
                                      std::uint32_t (&ds_codes)[2][4]) {
  const int column = 2 * (threadIdx.x % 4);
  const Exponent c = exponent_of(stats.c);
  const Exponent r = exponent_of(stats.r);
  float a[2], f[2];
  if constexpr (kUniform) {
    const Exponent eq = Exponent::stored(stats.eq[0]);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      a[h] = stages::score_factor(score_scale, eq, Exponent::stored(keys.ek[h]));
      f[h] = stages::dkv_gradient_factor(c, Exponent::stored(keys.ev[h]), eq, r);
    }
  }
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    float t[16], ds[16];
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const int i = 16 * k + j;
      const int h = tile::fragment_half(i);
      const int query = 8 * (i >> 2) + column + (i & 1);
      if constexpr (not kUniform) {
        const Exponent eq = Exponent::stored(stats.eq[query]);
        a[h] = stages::score_factor(score_scale, eq, Exponent::stored(keys.ek[h]));
        f[h] = stages::dkv_gradient_factor(c, Exponent::stored(keys.ev[h]), eq, r);
      }
      t[j] = stages::probability<DeviceOps>(s[i], a[h], stats.addend[query]);
      ds[j] = stages::dkv_ds<DeviceOps>(t[j], dp[i], f[h], stats.delta[query]);
      if constexpr (kMasked) {
        const bool seen = keys.visible[h].begin <= first_query + query and
                          first_query + query < keys.visible[h].end;
        if (not seen) t[j] = ds[j] = 0.0f;
      }
    }
    tile::pack_operand(p_codes[k], t);
    tile::pack_operand(ds_codes[k], ds);
  }
}

__device__ void attend(const BackwardParams& params, SharedStorage& shared, int consumer) {
  const int thread = threadIdx.x % 128;
  const bool leader = threadIdx.x % 32 == 0;
  const int warp = thread / 32;
  tile::RingPosition<1> item_at;
  tile::RingPosition<Config::kStages> at, stats_at;
  // dV: register piece p of thread t at [p][t], p < 16; dK behind it.
  constexpr int kPieces = Config::kDim / 8;
  float4* sums = params.sums + blockIdx.x * Config::kSumsPerCta + consumer * 2 * kPieces * 128 +
                 thread;
  const std::uint32_t k_tile = ptx::shared_address(shared.k) + consumer * 64 * Config::kDim;
  const std::uint32_t v_tile = ptx::shared_address(shared.v) + consumer * 64 * Config::kDim;
  using Scores = ptx::WgmmaE4m3<kQueryStep>;
  using Gradients = ptx::WgmmaE4m3<Config::kDim>;

  while (true) {
    shared.item_ring.wait_full(item_at);
    const int index = shared.item;
    if (index < 0) return;
    const Work work = load_work(params, index);
    const Document& d = work.document;
    const int num_steps = work.steps.size();
    const int total = num_steps * params.queries_per_key_head;
    const int first_key = work.item.first + 64 * consumer;
    const int last_key = min(first_key + 63, d.k_len - 1);

    Keys keys;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int key = first_key + tile::fragment_row(thread, h);
      const bool valid = key < d.k_len;
      const std::int64_t slot = work.item.head * params.k_slots + d.k_slot + key;
      keys.visible[h] =
          valid ? visible_queries(params.mask, d.q_len, d.k_len, key) : Range{0, 0};
      keys.ek[h] = valid ? params.k_exponents[slot] : 0;
      keys.ev[h] = valid ? params.v_exponents[slot] : 0;
    }
    // Queries that see every key of the warpgroup.
    Range all{0, 0};
    if (first_key + 63 < d.k_len) {
      all = {visible_queries(params.mask, d.q_len, d.k_len, last_key).begin,
             visible_queries(params.mask, d.q_len, d.k_len, first_key).end};
    }

    float dv[64], dk[64], s[32], dp[32];
    int keep_dv = 0, keep_dk = 0;
    bool dv_started = false, dk_started = false;
    Exponent c, r;
#pragma unroll
    for (int i = 0; i < 64; ++i) dv[i] = dk[i] = 0.0f;

    const auto scores = [&](const SharedStorage::Stage& stage) {
      const std::uint64_t kd = tile::k_major_descriptor(tile::Swizzle::k128, k_tile);
      const std::uint64_t vd = tile::k_major_descriptor(tile::Swizzle::k128, v_tile);
      const std::uint64_t qd =
          tile::k_major_descriptor(tile::Swizzle::k128, ptx::shared_address(stage.q));
      const std::uint64_t gd =
          tile::k_major_descriptor(tile::Swizzle::k128, ptx::shared_address(stage.g));
      Scores::fresh_ss(s, kd, qd);
#pragma unroll
      for (int k = 1; k < Config::kDim / stages::kMmaDepth; ++k) {
        Scores::add_ss(s, kd + k * tile::kDescriptorStepK32, qd + k * tile::kDescriptorStepK32);
      }
      ptx::wgmma_commit_group();
      Scores::fresh_ss(dp, vd, gd);
#pragma unroll
      for (int k = 1; k < Config::kDim / stages::kMmaDepth; ++k) {
        Scores::add_ss(dp, vd + k * tile::kDescriptorStepK32, gd + k * tile::kDescriptorStepK32);
      }
      ptx::wgmma_commit_group();
    };

    if (total > 0) {
      shared.operand_ring.wait_full(at);
      ptx::wgmma_fence();
      scores(shared.stages[at.stage]);
      ptx::wgmma_wait_group<0>();
      ptx::pin(s);
      ptx::pin(dp);
      if (leader) ptx::mbarrier_arrive(shared.operand_ring.empty_at(at.stage));
      at.advance();
    }
    for (int i = 0; i < total; ++i) {
      const int step = work.steps.begin + i % num_steps;
      const bool head_begins = i % num_steps == 0;
      shared.stats_ring.wait_full(stats_at);
      const auto& stats = shared.stats[stats_at.stage];

      // Promotion at the fixed places and where a query head ends; rescaling where c or r changes.
      const bool promote_dv = (head_begins and i > 0) or stages::promotes_dv(step, consumer);
      const bool promote_dk = (head_begins and i > 0) or stages::promotes_dk(step, consumer);
      const Exponent c_new = exponent_of(stats.c);
      const Exponent r_new = exponent_of(stats.r);
      if (promote_dv and keep_dv) {
        const float scale = stages::output_factor(c);
        promote_to_sum(dv, {scale, scale}, sums, 128, dv_started);
        dv_started = true;
        keep_dv = 0;
      } else if (keep_dv and not(c == c_new)) {
        const float change = stages::factor(c - c_new);
#pragma unroll
        for (int j = 0; j < 64; ++j) {
          dv[j] = stages::rescale_accumulator<DeviceOps>(dv[j], change);
        }
      }
      if (promote_dk and keep_dk) {
        const float scale = stages::factor(r);
        promote_to_sum(dk, {scale, scale}, sums + kPieces * 128, 128, dk_started);
        dk_started = true;
        keep_dk = 0;
      } else if (keep_dk and not(r == r_new)) {
        const float change = stages::factor(r - r_new);
#pragma unroll
        for (int j = 0; j < 64; ++j) {
          dk[j] = stages::rescale_accumulator<DeviceOps>(dk[j], change);
        }
      }
      c = c_new;
      r = r_new;

      const int first_query = step * kQueryStep;
      const bool every = all.begin <= first_query and first_query + kQueryStep <= all.end;
      std::uint32_t p_codes[2][4], ds_codes[2][4];
      if (stats.eq_uniform) {
        if (every) {
          phase<true, false>(s, dp, keys, stats, first_query, params.score_scale, p_codes,
                             ds_codes);
        } else {
          phase<true, true>(s, dp, keys, stats, first_query, params.score_scale, p_codes, ds_codes);
        }
      } else {
        phase<false, true>(s, dp, keys, stats, first_query, params.score_scale, p_codes, ds_codes);
      }
      __syncwarp();
      if (leader) ptx::mbarrier_arrive(shared.stats_ring.empty_at(stats_at.stage));
      stats_at.advance();

      shared.operand_ring.wait_full(at);
      const auto& stage = shared.stages[at.stage];
      const std::uint64_t gt =
          tile::k_major_descriptor(tile::Swizzle::k64, ptx::shared_address(stage.g_transposed));
      const std::uint64_t qt =
          tile::k_major_descriptor(tile::Swizzle::k64, ptx::shared_address(stage.q_transposed));
      ptx::wgmma_fence();
      Gradients::rs(dv, p_codes[0], gt, keep_dv);
      Gradients::add_rs(dv, p_codes[1], gt + tile::kDescriptorStepK32);
      ptx::wgmma_commit_group();
      Gradients::rs(dk, ds_codes[0], qt, keep_dk);
      Gradients::add_rs(dk, ds_codes[1], qt + tile::kDescriptorStepK32);
      ptx::wgmma_commit_group();
      // The last block multiplies what an earlier step left in the rows: finite, and never read.
      scores(stage);
      ptx::wgmma_wait_group<0>();
      ptx::pin(s);
      ptx::pin(dp);
      ptx::pin(dv);
      ptx::pin(dk);
      keep_dv = keep_dk = 1;
      if (leader) ptx::mbarrier_arrive(shared.operand_ring.empty_at(at.stage));
      at.advance();
    }
    // K and V are free, and so is the item's index.
    __syncwarp();
    if (leader) ptx::mbarrier_arrive(shared.item_ring.empty_at(0));
    item_at.advance();

    const Work finished = load_work(params, index);
    const int row = finished.item.first + 64 * consumer + 16 * warp;
    std::uint16_t* staging = shared.out + (64 * consumer + 16 * warp) * Config::kDim;
    const float c_scale = keep_dv ? stages::output_factor(c) : 0.0f;
    const float r_scale = keep_dk ? stages::factor(r) : 0.0f;
    add_sum(dv, {c_scale, c_scale}, sums, 128, dv_started);
    store_warp_rows<Config::kDim>(dv, staging, params.dv, finished.item.head,
                                  finished.document.k_token, row, finished.document.k_len);
    add_sum(dk, {r_scale, r_scale}, sums + kPieces * 128, 128, dk_started);
    finish_rotated(dk, params.softmax_scale, params.rotate);
    store_warp_rows<Config::kDim>(dk, staging, params.dk, finished.item.head,
                                  finished.document.k_token, row, finished.document.k_len);
  }
}

__global__ void __launch_bounds__(Config::kThreads, 1)
    dkv_kernel(const __grid_constant__ BackwardParams params) {
  extern __shared__ std::uint8_t raw[];
  auto& shared = *reinterpret_cast<SharedStorage*>(raw);
  if (threadIdx.x == 0) {
    // Item: the consumers' warps and the statistics' warp hand it back.
    shared.item_ring.initialise(4 * Config::kConsumers + 1);
    shared.operand_ring.initialise(4 * Config::kConsumers);
    shared.stats_ring.initialise(4 * Config::kConsumers);
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
    const int warp = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x) / 32, 0);
    if (warp == 0) {
      if (threadIdx.x == 0) load(params, shared);
    } else if (warp == 1) {
      form_stats(params, shared);
    }
  } else {
    ptx::set_max_registers_up<Config::kConsumerRegisters>();
    attend(params, shared, warpgroup - 1);
  }
}

}  // namespace mxattn::kernels::sm90::dkv
