// dK and dV of the folded FP8 recipes on sm_90a (docs/numerics.md, section 4).
//
// A CTA owns 128 keys of one document and key head and walks the queries that see them in steps of
// 64, query heads of the group one after the other. Warpgroup 0 loads: warp 0 keeps steps in flight
// through the copy engine, warps 1 to 3 form what each query of a step adds (addend, D').
// Warpgroups 1 and 2 own 64 keys each; scores are computed transposed (keys x queries), so that P
// and dS leave the accumulators as A operands:
//
//   block i:  dV += P(i)^T G(i)   dK += dS(i)^T Q(i)   S(i+1) = K Q(i+1)^T   dP(i+1) = V G(i+1)^T
//   phase i:  P, dS of step i from S, dP; nothing in flight
//
// While one warpgroup is in its block the other is in its phase; no barrier holds them to it.
// dV and dK stay in the tensor core's accumulators and are added to FP32 sums at fixed places.
//
// With DsScale::kRow the exponent of dS is one of the key and step, and each step's dK is added.
#pragma once

#include "kernels/sm90/backward.h"
#include "kernels/sm90/backward_dkv/config.h"
#include "kernels/sm90/backward_dkv/phase.cuh"
#include "kernels/sm90/backward_dkv/stats.cuh"
#include "kernels/sm90/backward_steps.h"
#include "kernels/sm90/device_ops.h"
#include "kernels/sm90/epilogue.h"
#include "kernels/sm90/sums.h"
#include "kernels/sm90/work.h"
#include "ptx/barrier.h"
#include "ptx/copy.h"
#include "ptx/grid.h"
#include "ptx/wgmma.h"
#include "recipe/stages.h"
#include "tile/fragment.h"
#include "tile/ring.h"
#include "tile/swizzle.h"

namespace mxattn::kernels::sm90::dkv {

using stages::Exponent;
using stages::kKeyTile;
using stages::kQueryStep;

/// Scales of a warp's accumulators, and of its factors a and F. In shared memory, where they
/// cost no register.
struct ScalesNow {
  std::int32_t c, r;  // cuda::kNanScale for NaN
};

template <class Config>
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
  // Of each warp: its part of the sums that are here, or in the epilogue its rows.
  float4 sums[Config::kConsumers][4][Config::kWarpFloat4s];
  StepStats stats[Config::kStatsStages];               // what phase i reads
  alignas(16) std::int8_t ek[kKeyTile], ev[kKeyTile];  // of the item, beside k and v
  KeyFacts keys[kKeyTile];  // written by the first of the key's quad, read by the quad
  ScalesNow scales[Config::kConsumers][4];   // of each warp, for itself
  Range block_steps[Config::kConsumers][4];  // DsScale::kRow: of each warp, steps_of_block
  Work work[kWorkSlots];                     // items at hand and ahead
  tile::RingBarriers<kWorkSlots> work_ring;
  tile::RingBarriers<1> key_ring;  // K and V
  tile::RingBarriers<Config::kStages> operand_ring;
  tile::RingBarriers<Config::kStatsStages> stats_ring;
};

// ---- producers --------------------------------------------------------------------------------

// Steps from which an item is long enough to hide what the next one reads before its first step.
// Until then the next is taken early, and no other CTA can take it.
inline constexpr int kShortItem = 16;

/// Warp 0, one thread: items, K and V, and the operands of every block.
template <class Config>
__device__ void load(const BackwardParams& params, SharedStorage<Config>& shared) {
  tile::RingPosition<Config::kStages> at;
  std::uint32_t placed = 0;
  for (std::uint32_t item = 0;; ++item) {
    const Work& work = shared.work[item % kWorkSlots];
    // This item, and behind a short one the next.
    while (placed <= item or
           (placed == item + 1 and not work.last and work.visits.size() < kShortItem)) {
      const auto work_at = tile::RingPosition<kWorkSlots>::after(placed++);
      place_work<true>(params, shared.work, shared.work_ring, work_at);
      ptx::mbarrier_arrive(shared.work_ring.full_at(work_at.stage));
    }
    if (work.last) return;
    const Document& d = work.document;
    const int key_slot = static_cast<int>(d.k_slot) + work.item.first;
    shared.key_ring.wait_empty(tile::RingPosition<1>::after(item));
    const std::uint32_t key_full = shared.key_ring.full_at(0);
    // Of the document only: nobody writes the tables of slots behind its last group.
    const std::uint32_t keys = min(kKeyTile, stages::whole_groups(d.k_len - work.item.first));
    ptx::mbarrier_arrive_expect(key_full, sizeof(shared.k) + sizeof(shared.v) + 2 * keys);
    const std::int64_t offset = work.item.head * params.k_slots + key_slot;
    ptx::copy_bulk(ptx::shared_address(shared.ek), params.k_exponents + offset, keys, key_full);
    ptx::copy_bulk(ptx::shared_address(shared.ev), params.v_exponents + offset, keys, key_full);
    ptx::copy_tensor_3d(ptx::shared_address(shared.k), &params.k, 0, key_slot, work.item.head,
                        key_full);
    ptx::copy_tensor_3d(ptx::shared_address(shared.v), &params.v, 0, key_slot, work.item.head,
                        key_full);

    // The rows of a step, and a block later its transposes.
    const int total = work.visits.size() * params.queries_per_key_head;
    int head = work.item.head * params.queries_per_key_head;
    int step = work.visits.begin;
    int head_before = 0, slot_before = 0;
    for (int i = 0; i <= total and total > 0; ++i) {
      const int slot = static_cast<int>(d.q_slot) + step * kQueryStep;
      const bool rows = i < total;
      const bool transposes = i > 0;
      shared.operand_ring.wait_empty(at);
      auto& stage = shared.stages[at.stage];
      const std::uint32_t full = shared.operand_ring.full_at(at.stage);
      ptx::mbarrier_arrive_expect(
          full, (rows ? sizeof(stage.q) + sizeof(stage.g) : 0) +
                    (transposes ? sizeof(stage.q_transposed) + sizeof(stage.g_transposed) : 0));
      if (rows) {
        ptx::copy_tensor_3d(ptx::shared_address(stage.q), &params.q, 0, slot, head, full);
        ptx::copy_tensor_3d(ptx::shared_address(stage.g), &params.g, 0, slot, head, full);
      }
      if (transposes) {
        ptx::copy_tensor_3d(ptx::shared_address(stage.g_transposed), &params.g_transposed,
                            slot_before, 0, head_before, full);
        ptx::copy_tensor_3d(ptx::shared_address(stage.q_transposed), &params.q_transposed,
                            slot_before, 0, head_before, full);
      }
      at.advance();
      head_before = head;
      slot_before = slot;
      if (++step == work.visits.end) {
        step = work.visits.begin;
        ++head;
      }
    }
  }
}

// ---- consumers --------------------------------------------------------------------------------

/// FP32 sums of a warpgroup's dV or dK, where the Config places them. Made where they are used:
/// they would cost registers in the loop.
template <class Config, bool kOfDk>
__device__ __forceinline__ auto sums_of(const BackwardParams& params, SharedStorage<Config>& shared,
                                        int consumer) {
  constexpr SumPlace kPlace = kOfDk ? Config::kDkSums : Config::kDvSums;
  constexpr int kWarpSum = Config::kFloat4s / 4;
  const int warp = threadIdx.x % 128 / 32;
  float4* sums;
  if constexpr (kPlace == SumPlace::kShared) {
    sums = shared.sums[consumer][warp] + (kOfDk ? Config::kSharedSums - 1 : 0) * kWarpSum;
  } else {
    sums = params.sums +
           ((blockIdx.x * Config::kConsumers + consumer) * 2 + kOfDk) * Config::kFloat4s +
           warp * kWarpSum;
  }
  return Sums<Config::kOutputs, kPlace>{sums};
}

/// dV and dK of the item's keys. first: of the steps that were not left out.
template <class Config>
__device__ __forceinline__ void end_item(const BackwardParams& params,
                                         SharedStorage<Config>& shared, int consumer, int half,
                                         int warp, const Work& work, int total, int first,
                                         const ScalesNow& scales, float (&dv)[Config::kOutputs],
                                         float (&dk)[Config::kOutputs]) {
  const auto was_promoted = [&](int place) {
    return stages::was_promoted(place, work.visits.begin, work.visits.size(), total);
  };
  const int row = work.item.first + 64 * half + 16 * warp;
  const bool dv_started = was_promoted(stages::dv_promotion(half));
  const bool dk_started =
      Config::kRowScale ? total > first : was_promoted(stages::dk_promotion(half));
  const float dv_factor = total > 0 ? stages::output_factor(exponent_of(scales.c)) : 0.0f;
  const float dk_factor =
      total > 0 and not Config::kRowScale ? stages::factor(exponent_of(scales.r)) : 0.0f;
  float dv_scale[2] = {dv_factor, dv_factor}, dk_scale[2] = {dk_factor, dk_factor};
  // Rows lie where shared sums do: these must be out before.
  const WarpRows<Config::kDim> rows(shared.sums[consumer][warp]);
  const float dv_rest =
      sums_of<Config, false>(params, shared, consumer).finish(dv, dv_scale, dv_started);
  float dk_rest = 0;
  if constexpr (Config::kSharedSums > 0)
    dk_rest = sums_of<Config, true>(params, shared, consumer).finish(dk, dk_scale, dk_started);
  rows.put(dv);
  rows.store(params.dv, work.item.head, work.document.k_token, row, work.document.k_len,
             [&](auto& x, int) { settle(x, dv_rest, dv_scale[0]); });
  if constexpr (Config::kSharedSums == 0)
    dk_rest = sums_of<Config, true>(params, shared, consumer).finish(dk, dk_scale, dk_started);
  rows.put(dk);
  rows.store(params.dk, work.item.head, work.document.k_token, row, work.document.k_len,
             [&](auto& x, int) {
               settle(x, dk_rest, dk_scale[0]);
               rows.finish_rotated(x, params.softmax_scale, params.rotate);
             });
}

template <class Config>
__device__ void attend(const BackwardParams& params, SharedStorage<Config>& shared, int consumer) {
  const int thread = threadIdx.x % 128;
  const bool leader = ptx::opaque(threadIdx.x % 32) == 0;
  const std::uint32_t quad_lane = ptx::opaque(threadIdx.x % 4);
  const int warp = thread / 32;
  tile::RingPosition<Config::kStages> at;
  tile::RingPosition<Config::kStatsStages> stats_at;
  ScalesNow& scales = shared.scales[consumer][warp];
  using Gradients = ptx::WgmmaE4m3<Config::kDim>;

  for (std::uint32_t item = 0;; ++item) {
    shared.work_ring.wait_full(tile::RingPosition<kWorkSlots>::after(item));
    const Work& work = shared.work[item % kWorkSlots];
    if (work.last) return;
    const Document& d = work.document;
    const int total = work.visits.size() * params.queries_per_key_head;
    // The 64 keys of an item that are this warpgroup's. They take turns, since the lower ones are
    // seen from one more step of the diagonal; with scales by rows that would spill a register.
    const int half = Config::kRowScale ? consumer : (consumer + static_cast<int>(item)) % 2;
    const int first_key = work.item.first + 64 * half;
    const std::uint32_t k_tile = ptx::shared_address(shared.k) + half * 64 * Config::kDim;
    const std::uint32_t v_tile = ptx::shared_address(shared.v) + half * 64 * Config::kDim;

    float dv[Config::kOutputs], dk[Config::kOutputs], s[32], dp[32];
    KeyFactors factors[2] = {};
    const auto clear = [&] {
#pragma unroll
      for (int j = 0; j < Config::kOutputs; ++j) dv[j] = dk[j] = 0.0f;
    };

    const auto scores = [&](const typename SharedStorage<Config>::Stage& stage) {
      issue_scores<Config, kQueryStep>(s, dp, k_tile, v_tile, ptx::shared_address(stage.q),
                                       ptx::shared_address(stage.g));
    };

    // Of the next step. NOTE: what a path leaves undefined would keep its registers from the item
    // before.
    StepPairs pairs{};
    std::uint32_t flags = 0;
    const auto read_stats = [&](tile::RingPosition<Config::kStatsStages> from) {
      shared.stats_ring.wait_full(from);
      pairs.load(shared.stats[from.stage], quad_lane);
      flags = shared.stats[from.stage].facts.flags[half];
    };
    // K and V go back before the last step, which needs no further scores.
    const auto release_keys = [&] {
      if (leader) ptx::mbarrier_arrive(shared.key_ring.empty_at(0));
    };
    int i = 0, step = work.visits.begin;
    const int steps_end = work.visits.end;
    const auto hand_back_stats = [&] {
      __syncwarp();
      if (leader or Config::kEveryLaneArrives) {
        ptx::mbarrier_arrive(shared.stats_ring.empty_at(stats_at.stage));
      }
      stats_at.advance();
      if (++step == steps_end) step = work.visits.begin;
    };
    const auto hand_back_operands = [&] {
      if (leader) ptx::mbarrier_arrive(shared.operand_ring.empty_at(at.stage));
      at.advance();
    };
    KeyFacts* const keys = shared.keys + 64 * consumer + tile::fragment_row(thread, 0);
    shared.key_ring.wait_full(tile::RingPosition<1>::after(item));
    if (total > 0) {
      read_stats(stats_at);
      shared.operand_ring.wait_full(at);
      const ScalesNow begun = {shared.stats[stats_at.stage].facts.c,
                               shared.stats[stats_at.stage].facts.r};
      if (leader) scales = begun;
      if (StepFacts::phase(flags) == Phase::kSkip) {
        hand_back_stats();
        hand_back_operands();
        i = 1;
        if (total > 1) {
          read_stats(stats_at);
          // Scales that change now change an accumulator of zeros, or of NaN.
          const StepFacts& now = shared.stats[stats_at.stage].facts;
          if (now.c != begun.c or now.r != begun.r) flags |= StepFacts::kRare;
        }
        shared.operand_ring.wait_full(at);
      }
      ptx::wgmma_fence();
      scores(shared.stages[at.stage]);
      // While the first scores are multiplied.
      clear();
      ptx::pin(dv);
      ptx::pin(dk);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int in_tile = 64 * half + tile::fragment_row(thread, h);
        const int key = work.item.first + in_tile;
        const bool valid = key < d.k_len;
        const KeyFacts own = {
            valid ? visible_queries(params.mask, d.q_len, d.k_len, key) : Range{0, 0},
            valid ? shared.ek[in_tile] : 0, valid ? shared.ev[in_tile] : 0};
        if (quad_lane == 0) keys[8 * h] = own;
        factors[h] = factors_of(own, StepFacts::eq(flags), exponent_of(begun.c),
                                exponent_of(begun.r), params.score_scale);
      }
      ptx::wgmma_wait_group<0>();
      ptx::pin(s);
      ptx::pin(dp);
      hand_back_operands();
    } else {
      // All lanes have seen K and V arrive before they go back. NOTE: without the barrier the usual
      // path would set all this to 0 too.
      __syncwarp();
      clear();
#pragma unroll
      for (int j = 0; j < 32; ++j) s[j] = dp[j] = 0.0f;
    }
    const int first = i;  // that is not left out
    if (i + 1 >= total) release_keys();
    if (Config::kRowScale and leader) {
      shared.block_steps[consumer][warp] = steps_of_block(params.mask, d, first_key + 16 * warp);
    }
    __syncwarp();
    for (; i < total; ++i) {
      const Phase phase = StepFacts::phase(flags);
      if ((flags & StepFacts::kRare) != 0) {
        const auto was_promoted = [&](int place) {
          return stages::was_promoted(place, work.visits.begin, work.visits.size(), i);
        };
        const StepFacts facts = shared.stats[stats_at.stage].facts;
        const ScalesNow before = scales;
        __syncwarp();
        if (leader) scales = {facts.c, facts.r};
        const bool head_ends = step == work.visits.begin and i > 0;
        const Exponent c_old = exponent_of(before.c), c = exponent_of(facts.c);
        const Exponent r_old = exponent_of(before.r), r = exponent_of(facts.r);
        if (head_ends or (i > 0 and stages::promotes_dv(step, half))) {
          const float scale = stages::output_factor(c_old);
          sums_of<Config, false>(params, shared, consumer)
              .promote(dv, {scale, scale}, was_promoted(stages::dv_promotion(half)));
#pragma unroll
          for (int j = 0; j < Config::kOutputs; ++j) dv[j] = 0.0f;
        } else if (i > 0 and facts.c != before.c) {
          const float change = stages::factor(c_old - c);
#pragma unroll
          for (int j = 0; j < Config::kOutputs; ++j) {
            dv[j] = stages::rescale_accumulator<DeviceOps>(dv[j], change);
          }
        }
        if constexpr (not Config::kRowScale) {
          if (head_ends or (i > 0 and stages::promotes_dk(step, half))) {
            const float scale = stages::factor(r_old);
            sums_of<Config, true>(params, shared, consumer)
                .promote(dk, {scale, scale}, was_promoted(stages::dk_promotion(half)));
#pragma unroll
            for (int j = 0; j < Config::kOutputs; ++j) dk[j] = 0.0f;
          } else if (i > 0 and facts.r != before.r) {
            const float change = stages::factor(r_old - r);
#pragma unroll
            for (int j = 0; j < Config::kOutputs; ++j) {
              dk[j] = stages::rescale_accumulator<DeviceOps>(dk[j], change);
            }
          }
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          factors[h] = factors_of(keys[8 * h], StepFacts::eq(flags), c, r, params.score_scale);
        }
      }

      const int first_query = step * kQueryStep;
      StepCodes codes;
      if (phase == Phase::kPlain) {
        phase_plain<Config, false>(s, dp, pairs, factors, keys, first_query, codes);
      } else if (phase == Phase::kMasked) {
        phase_plain<Config, true>(s, dp, pairs, factors, keys, first_query, codes);
      } else {
        phase_general<Config>(s, dp, shared.stats[stats_at.stage], keys, first_query,
                              params.score_scale, codes);
      }
      float dk_scale[2];  // DsScale::kRow: of the step's part of dK
      if constexpr (Config::kRowScale) {
        const Exponent r = exponent_of(shared.stats[stats_at.stage].facts.r);
        encode_by_row(dp, codes.largest, {r, r}, codes.ds, dk_scale);
        // Both ends at once: a branch between them takes a register.
        const Range steps = shared.block_steps[consumer][warp];
        if (step < steps.begin or step >= steps.end) dk_scale[0] = dk_scale[1] = 0.0f;
      }
      if constexpr (Config::kDumpCodes) {
        const int head = work.item.head * params.queries_per_key_head + i / work.visits.size();
        dump_codes(params, d, head, first_query, first_key, codes);
      }

      // Statistics of the next step are read before the block: while it runs, the tensor cores take
      // all of shared memory's bandwidth.
      if (i + 1 < total) {
        tile::RingPosition<Config::kStatsStages> next = stats_at;
        next.advance();
        read_stats(next);
      }
      shared.operand_ring.wait_full(at);
      const auto& stage = shared.stages[at.stage];
      const std::uint64_t gt = tile::k_major_descriptor(Config::kTransposedSwizzle,
                                                        ptx::shared_address(stage.g_transposed));
      const std::uint64_t qt = tile::k_major_descriptor(Config::kTransposedSwizzle,
                                                        ptx::shared_address(stage.q_transposed));
      ptx::wgmma_fence();
      Gradients::add_rs(dv, codes.p[0], gt);
      Gradients::add_rs(dv, codes.p[1], gt + tile::kDescriptorStepK32);
      ptx::wgmma_commit_group();
      Gradients::rs(dk, codes.ds[0], qt, Config::kRowScale ? 0 : 1);
      Gradients::add_rs(dk, codes.ds[1], qt + tile::kDescriptorStepK32);
      ptx::wgmma_commit_group();
      // The last block multiplies what lies there, finite or not: nobody reads the result.
      scores(stage);
      hand_back_stats();
      if constexpr (Config::kRowScale) {
        // The next scores are multiplied while dK is added.
        ptx::wgmma_wait_group<2>();
        ptx::pin(dk);
        sums_of<Config, true>(params, shared, consumer).promote(dk, dk_scale, i > first);
      }
      ptx::wgmma_wait_group<0>();
      ptx::pin(s);
      ptx::pin(dp);
      ptx::pin(dv);
      ptx::pin(dk);
      hand_back_operands();
      if (i + 2 == total) release_keys();
    }
    end_item<Config>(params, shared, consumer, half, warp, work, total, first, scales, dv, dk);
    ptx::mbarrier_arrive(
        shared.work_ring.empty_at(item % kWorkSlots));  // every lane: it happens rarely
  }
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    dkv_kernel(const __grid_constant__ BackwardParams params) {
  extern __shared__ std::uint8_t raw[];
  auto& shared = *reinterpret_cast<SharedStorage<Config>*>(raw);
  ptx::launch_dependents();
  if (threadIdx.x == 0) {
    shared.work_ring.initialise(128 * Config::kConsumers + 32 * Config::kStatsWarps);
    shared.key_ring.initialise(4 * Config::kConsumers);
    shared.operand_ring.initialise(4 * Config::kConsumers);
    shared.stats_ring.initialise((Config::kEveryLaneArrives ? 128 : 4) * Config::kConsumers, 32);
    ptx::fence_mbarrier_init();
  }
  clear_stages<Config>(shared.stages);
  ptx::fence_proxy_async_shared();
  __syncthreads();
  ptx::wait_on_dependencies();

  const int warpgroup = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x) / 128, 0);
  if (warpgroup == 0) {
    ptx::set_max_registers_down<Config::kProducerRegisters>();
    const int warp = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x) / 32, 0);
    if (warp == 0) {
      if (threadIdx.x == 0) load(params, shared);
    } else {
      form_stats<Config>(params, shared, warp - 1);
    }
  } else {
    ptx::set_max_registers_up<Config::kConsumerRegisters>();
    attend(params, shared, warpgroup - 1);
  }
}

}  // namespace mxattn::kernels::sm90::dkv
