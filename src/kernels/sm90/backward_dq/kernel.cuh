// dQ of the folded FP8 recipes on sm_90a (docs/numerics.md, section 4).
//
// A CTA owns 128 queries of one document and head and walks the keys they see in tiles of 128,
// ascending. Warpgroup 0 loads; warpgroups 1 and 2 own 64 queries each:
//
//   block t:  dQ += dS(t) K(t)   S(t+1) = Q K(t+1)^T   dP(t+1) = G V(t+1)^T
//   phase t:  dS of tile t from S, dP; nothing in flight
//
// A turn passes between the two, so that one is in its phase while the other is in its block.
// dQ stays in the tensor core's accumulators, a power of two r_i a row, and is added to an FP32 sum
// at fixed places. Row constants live in registers, so the phase of a uniform tile loads nothing.
//
// With DsScale::kRow the exponent of dS is one of the row and tile, and each tile's dQ is added.
#pragma once

#include "kernels/sm90/backward.h"
#include "kernels/sm90/backward_dq/config.h"
#include "kernels/sm90/backward_dq/phase.cuh"
#include "kernels/sm90/backward_dq/scales.cuh"
#include "kernels/sm90/backward_dq/tiles.h"
#include "kernels/sm90/backward_steps.h"
#include "kernels/sm90/block_scope.h"
#include "kernels/sm90/device_ops.h"
#include "kernels/sm90/epilogue.h"
#include "kernels/sm90/sums.h"
#include "kernels/sm90/turn.h"
#include "kernels/sm90/work.h"
#include "ptx/barrier.h"
#include "ptx/copy.h"
#include "ptx/grid.h"
#include "ptx/wgmma.h"
#include "recipe/stages.h"
#include "tile/fragment.h"
#include "tile/ring.h"
#include "tile/swizzle.h"

namespace mxattn::kernels::sm90::dq {

using stages::Exponent;
using stages::kKeyTile;

template <class Config>
struct alignas(1024) SharedStorage {
  std::uint8_t q[Config::kRows * Config::kDim];  // of the item
  std::uint8_t g[Config::kRows * Config::kDim];
  // What block t - 1 reads: rows of tile t and the transpose of tile t - 1.
  struct alignas(1024) Stage {
    std::uint8_t k[kKeyTile * Config::kDim];
    std::uint8_t v[kKeyTile * Config::kDim];
    std::uint8_t k_transposed[Config::kDim * kKeyTile];
  } stages[Config::kStages];
  std::uint32_t facts[Config::kStages];  // beside the rows of tile t: TileFacts
  // Exponents of tiles that are not uniform. NOTE: no barrier of their own. They arrive with the
  // rows of tile t; phase t reads them after that stage has been handed back, and they are
  // overwritten twice as many blocks on as there are stages, which needs block t + 1 to be over.
  alignas(16) std::int8_t ek[2 * Config::kStages][kKeyTile];
  alignas(16) std::int8_t ev[2 * Config::kStages][kKeyTile];
  // The same of chunks that begin with tile t.
  LastKeys<Config::kRows> last_keys[2 * Config::kStages];
  // 64 queries x d in FP32 a warpgroup: sums, and in the epilogue rows, each warp its own 16.
  float4 sums[Config::kConsumers][Config::kFloat4s];
  RowTables<Config::kRows> tables;  // beside Q and G
  RowFacts rows[Config::kRows];     // written by the first of the row's quad, read by the quad
  Work work[kWorkSlots];            // items at hand and ahead
  // The producers' own: tiles whose keys all rows of a warpgroup see.
  Range whole[kWorkSlots][Config::kConsumers];
  tile::RingBarriers<kWorkSlots> work_ring;
  tile::RingBarriers<1> query_ring;  // Q, G and tables
  tile::RingBarriers<Config::kStages> operand_ring;
};

// ---- producer ---------------------------------------------------------------------------------

/// How many of `count` slots from `first` on a table of `slots` holds: the last tile of the last
/// document may reach past its end.
__device__ __forceinline__ std::uint32_t slots_within(int count, std::int64_t first,
                                                      std::int64_t slots) {
  return static_cast<std::uint32_t>(min(std::int64_t{count}, slots - first));
}

/// Copies what LastKeys holds of a chunk.
template <class Config>
__device__ __forceinline__ void load_last_keys(const BackwardParams& params, const Work& work,
                                               int chunk, LastKeys<Config::kRows>& to,
                                               std::uint32_t full) {
  const Document& d = work.document;
  const Range seen = in_chunk(visible_keys(params.mask, d.q_len, d.k_len, work.item.first), chunk);
  const int begin = max(seen.end - 1, 0) / stages::kSlotAlignment * stages::kSlotAlignment;
  const std::int64_t offset = key_offset(params, work, begin);
  // Of the document only: nobody writes the tables of slots behind its last group.
  const std::uint32_t bytes = min(to.kKeys, stages::whole_groups(d.k_len) - begin);
  to.begin = begin;
  ptx::mbarrier_expect(full, (Config::kMonotone ? 2 : 1) * bytes);
  ptx::copy_bulk(ptx::shared_address(to.nv), params.v_running_norms + offset, bytes, full);
  if constexpr (Config::kMonotone) {
    ptx::copy_bulk(ptx::shared_address(to.ek), params.k_exponents + offset, bytes, full);
  }
}

// Key tiles from which an item is long enough to hide what the next one reads before its first
// tile. Until then the next is taken early, and no other CTA can take it.
inline constexpr int kShortItem = 8;

/// Items, Q, G and tables: one thread.
template <class Config>
__device__ void load_items(const BackwardParams& params, SharedStorage<Config>& shared) {
  for (std::uint32_t item = 0;; ++item) {  // of the CTA's
    const auto at = tile::RingPosition<kWorkSlots>::after(item);
    const Work& work = place_work<false>(params, shared.work, shared.work_ring, at);
    if (not work.last) {
#pragma unroll
      for (int c = 0; c < Config::kConsumers; ++c) {
        shared.whole[at.stage][c] = block_scope<false, kKeyTile>(params.mask, work.document,
                                                                 work.item.first + kBlockRows * c)
                                        .whole_of_full();
      }
    }
    ptx::mbarrier_arrive(shared.work_ring.full_at(at.stage));
    if (work.last) return;

    const int slot = static_cast<int>(work.document.q_slot) + work.item.first;
    const int head = work.item.head;
    const std::int64_t row = head * params.q_slots + slot;
    const std::uint32_t rows = slots_within(
        Config::kRows, row, params.heads_k * params.queries_per_key_head * params.q_slots);
    const std::uint32_t full = shared.query_ring.full_at(0);
    shared.query_ring.wait_empty(tile::RingPosition<1>::after(item));
    ptx::mbarrier_arrive_expect(
        full, sizeof(shared.q) + sizeof(shared.g) +
                  rows * static_cast<std::uint32_t>(sizeof(shared.tables) / Config::kRows));
    ptx::copy_tensor_3d(ptx::shared_address(shared.q), &params.q, 0, slot, head, full);
    ptx::copy_tensor_3d(ptx::shared_address(shared.g), &params.g, 0, slot, head, full);
    const auto copy_table = [&](auto& to, const auto* from) {
      ptx::copy_bulk(ptx::shared_address(to), from + row, rows * sizeof(*from), full);
    };
    copy_table(shared.tables.delta, params.delta);
    copy_table(shared.tables.eq, params.q_exponents);
    copy_table(shared.tables.eg, params.g_exponents);
    copy_table(shared.tables.ng, params.g_norms);
    copy_table(shared.tables.no, params.o_norms);
    // Q and G come back before the last tile.
    if (work.visits.size() >= kShortItem) {
      shared.query_ring.wait_empty(tile::RingPosition<1>::after(item + 1));
    }
  }
}

/// One thread: fills the stage of a block with rows of tile `next`, unless the item ends before it,
/// and the transpose of the tile before, unless it begins with `next`.
template <class Config>
__device__ __forceinline__ void load_block(const BackwardParams& params,
                                           SharedStorage<Config>& shared, std::uint32_t block,
                                           const Work& work, int next, std::uint32_t facts) {
  const int at = block % Config::kStages;
  auto& stage = shared.stages[at];
  const std::uint32_t full = shared.operand_ring.full_at(at);
  const bool rows = next < work.visits.end;
  const bool transposes = next > work.visits.begin;
  const int slot = static_cast<int>(work.document.k_slot) + next * kKeyTile;
  shared.facts[at] = facts;
  ptx::mbarrier_expect(full, (rows ? sizeof(stage.k) + sizeof(stage.v) : 0) +
                                 (transposes ? sizeof(stage.k_transposed) : 0));
  if (rows) {
    ptx::copy_tensor_3d(ptx::shared_address(stage.k), &params.k, 0, slot, work.key_head, full);
    ptx::copy_tensor_3d(ptx::shared_address(stage.v), &params.v, 0, slot, work.key_head, full);
  }
  if (transposes) {
    ptx::copy_tensor_3d(ptx::shared_address(stage.k_transposed), &params.k_transposed,
                        slot - kKeyTile, 0, work.key_head, full);
  }
  const int exponents_slot = TileFacts::slot(facts);
  if (rows and TileFacts::phase(facts, 0) == Phase::kGeneral) {
    const std::int64_t offset = key_offset(params, work, next * kKeyTile);
    const std::uint32_t bytes = slots_within(kKeyTile, offset, params.heads_k * params.k_slots);
    ptx::mbarrier_expect(full, 2 * bytes);
    ptx::copy_bulk(ptx::shared_address(shared.ek[exponents_slot]), params.k_exponents + offset,
                   bytes, full);
    ptx::copy_bulk(ptx::shared_address(shared.ev[exponents_slot]), params.v_exponents + offset,
                   bytes, full);
  }
  if (rows and begins_chunk(work, next)) {
    load_last_keys<Config>(params, work, stages::chunk_of(next * kKeyTile),
                           shared.last_keys[exponents_slot], full);
  }
  ptx::mbarrier_arrive(full);
}

/// The operands of every block: one thread. Where tables are not monotone a warp, whose other lanes
/// help to look at exponents.
///
/// NOTE: with 24 registers little may live from a tile to the next or across a wait: a count of
/// blocks instead of a place in the ring, and what an item is read from shared memory again.
template <class Config>
__device__ void load_operands(const BackwardParams& params, SharedStorage<Config>& shared) {
  const bool leads = Config::kMonotone or threadIdx.x % 32 == 0;
  std::uint32_t block = 0;                 // of the CTA's
  for (std::uint32_t item = 0;; ++item) {  // of the CTA's
    const auto work_at = tile::RingPosition<kWorkSlots>::after(item);
    shared.work_ring.wait_full(work_at);
    const Work& work = shared.work[work_at.stage];
    if (work.last) return;
    std::uint32_t facts = 0;  // of the tile whose rows were loaded last
    int next = work.visits.empty() ? work.visits.end + 1 : work.visits.begin;
    for (; next <= work.visits.end; ++next, ++block) {
      if (next < work.visits.end) {
        const std::uint32_t before = facts;
        facts = facts_of_tile<Config>(params, work, shared.whole[work_at.stage], next,
                                      block % (2 * Config::kStages));
        const bool others = ((facts ^ before) & TileFacts::kExponents) != 0;
        if (next != work.visits.begin and (begins_chunk(work, next) or next % 8 == 7 or others)) {
          facts |= TileFacts::kRare;
        }
      }
      if (leads) {
        shared.operand_ring.wait_empty(tile::RingPosition<Config::kStages>::after(block));
        load_block<Config>(params, shared, block, work, next, facts);
      }
    }
    if constexpr (not Config::kMonotone) __syncwarp();
    if (leads) ptx::mbarrier_arrive(shared.work_ring.empty_at(work_at.stage));
  }
}

// ---- consumers --------------------------------------------------------------------------------

template <class Config>
using PhaseTurn = Turn<Config::kConsumers, 1 + Config::kConsumers>;  // behind the sums' barriers

/// FP32 sums of a warpgroup's dQ: each thread adds its own.
template <class Config>
__device__ __forceinline__ Sums<Config::kOutputs, SumPlace::kShared> sums_of(
    SharedStorage<Config>& shared, int consumer) {
  return {shared.sums[consumer] + threadIdx.x % 128 / 32 * (Config::kFloat4s / 4)};
}

template <class Config>
__device__ void attend(const BackwardParams& params, SharedStorage<Config>& shared, int consumer) {
  const int thread = threadIdx.x % 128;
  const bool leader = ptx::opaque(threadIdx.x % 32) == 0;
  const int warp = thread / 32;
  std::uint32_t item = 0;  // of the CTA's
  tile::RingPosition<Config::kStages> at;
  // Made where it is used: it would cost registers in the loop.
  const auto sums = [&] { return sums_of<Config>(shared, consumer); };
  const std::uint32_t q_tile = ptx::shared_address(shared.q) + consumer * 64 * Config::kDim;
  const std::uint32_t g_tile = ptx::shared_address(shared.g) + consumer * 64 * Config::kDim;
  using Gradients = ptx::WgmmaE4m3<Config::kDim>;

  PhaseTurn<Config>::open(consumer);
  for (;; ++item) {
    shared.work_ring.wait_full(tile::RingPosition<kWorkSlots>::after(item));
    const Work& work = shared.work[item % kWorkSlots];
    if (work.last) break;
    const Document& d = work.document;
    const int first_row = work.item.first + 64 * consumer;

    const int tiles_end = work.visits.end;
    float dq[Config::kOutputs], s[64], dp[64];
    RowFactors factors;
    std::uint32_t facts = 0;
    bool started = false;
    const auto clear = [&] {
#pragma unroll
      for (int i = 0; i < Config::kOutputs; ++i) dq[i] = 0.0f;
    };

    const auto scores = [&](const typename SharedStorage<Config>::Stage& stage) {
      issue_scores<Config, kKeyTile>(s, dp, q_tile, g_tile, ptx::shared_address(stage.k),
                                     ptx::shared_address(stage.v));
    };

    // Q and G go back before the last tile, which needs no further scores.
    const auto release_queries = [&] {
      if (leader or Config::kEveryLaneArrives) {
        ptx::mbarrier_arrive(shared.query_ring.empty_at(0));
      }
    };
    RowFacts* const rows = shared.rows + 64 * consumer + tile::fragment_row(thread, 0);
    const auto form_factors = [&](const RowFacts& first, const RowFacts& second) {
      const Exponent ek = Exponent::stored(TileFacts::ek(facts));
      const Exponent ev = Exponent::stored(TileFacts::ev(facts));
      set_factors(factors, 0, first, ek, ev, params.score_scale);
      set_factors(factors, 1, second, ek, ev, params.score_scale);
    };
    RowFacts own[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = min(first_row + tile::fragment_row(thread, h), d.q_len - 1);
      own[h].mu = params.row_reference[work.item.head * params.total_q + d.q_token + row];
    }
    shared.query_ring.wait_full(tile::RingPosition<1>::after(item));
    // NOTE: of rows past the document's end it may be anything. They see no key.
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = 64 * consumer + tile::fragment_row(thread, h);
      own[h].delta = shared.tables.delta[row];
      own[h].eq = shared.tables.eq[row];
      own[h].eg = shared.tables.eg[row];
      own[h].ng = shared.tables.ng[row];
      own[h].no = shared.tables.no[row];
      own[h].r = cuda::kNoScale;
    }
    __syncwarp();  // all lanes have read the tables before they go back
    if (not work.visits.empty()) {
      shared.operand_ring.wait_full(at);
      facts = shared.facts[at.stage];
      ptx::wgmma_fence();
      scores(shared.stages[at.stage]);
      // While the first scores are multiplied.
      clear();
      ptx::pin(dq);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = first_row + tile::fragment_row(thread, h);
        own[h].visible =
            row < d.q_len ? visible_keys(params.mask, d.q_len, d.k_len, row) : Range{0, 0};
      }
      const int chunk = stages::chunk_of(work.visits.begin * kKeyTile);
      const ChunkKeys found =
          keys_of_chunk<Config>(params, work, shared.last_keys[TileFacts::slot(facts)],
                                first_row + 16 * warp, {own[0].visible, own[1].visible}, chunk);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        own[h].r = scale_in_chunk(own[h], chunk, found.nv[h], found.ek[h]);
        if (threadIdx.x % 4 == 0) rows[8 * h] = own[h];
      }
      form_factors(own[0], own[1]);
      ptx::wgmma_wait_group<0>();
      ptx::pin(s);
      ptx::pin(dp);
      if (leader or Config::kEveryLaneArrives) {
        ptx::mbarrier_arrive(shared.operand_ring.empty_at(at.stage));
      }
      at.advance();
    } else {
      // NOTE: what a path leaves undefined would keep its registers from the item before, and
      // without the barrier the usual path would set all this to 0 too.
      __syncwarp();
      clear();
#pragma unroll
      for (int i = 0; i < 64; ++i) s[i] = dp[i] = 0.0f;
    }
    if (work.visits.size() <= 1) release_queries();
    __syncwarp();
    int keep = 0;  // what is in the accumulator
    for (int t = work.visits.begin; t < tiles_end; ++t) {
      const int first_key = t * kKeyTile;
      // Rarely: a chunk begins (chunks are whole tiles), a promotion is due, or exponents change.
      if ((facts & TileFacts::kRare) != 0) {
        const int chunk = stages::chunk_of(first_key);
        if (first_key == stages::chunk_begin(chunk)) {
          const ChunkKeys found = keys_of_chunk<Config>(
              params, work, shared.last_keys[TileFacts::slot(facts)], first_row + 16 * warp,
              {rows[0].visible, rows[8].visible}, chunk);
          // NOTE: the quad of a row shares its facts: all read before one writes.
          const std::int32_t before[2] = {rows[0].r, rows[8].r};
          const std::int32_t after[2] = {scale_in_chunk(rows[0], chunk, found.nv[0], found.ek[0]),
                                         scale_in_chunk(rows[8], chunk, found.nv[1], found.ek[1])};
          __syncwarp();
          if (threadIdx.x % 4 == 0) {
            rows[0].r = after[0];
            rows[8].r = after[1];
          }
          __syncwarp();
          const float change[2] = {change_of(before[0], after[0]), change_of(before[1], after[1])};
          if (keep) {
#pragma unroll
            for (int i = 0; i < Config::kOutputs; ++i) {
              dq[i] = stages::rescale_accumulator<DeviceOps>(dq[i], change[tile::fragment_half(i)]);
            }
          }
        }
        if (keep and stages::promotes_dq(t, consumer)) {
          sums().promote(dq, {stages::factor(scale_of(rows[0])), stages::factor(scale_of(rows[8]))},
                         started);
          started = true;
          keep = 0;
        }
        form_factors(rows[0], rows[8]);
      }

      TileCodes codes;
      PhaseTurn<Config>::take(consumer);
      const Phase phase = TileFacts::phase(facts, consumer);
      if (phase == Phase::kPlain) {
        phase_uniform<Config, false>(s, dp, factors, rows, first_key, codes);
      } else if (phase == Phase::kMasked) {
        phase_uniform<Config, true>(s, dp, factors, rows, first_key, codes);
      } else {
        const int slot = TileFacts::slot(facts);
        phase_general<Config>(s, dp, rows, first_key, shared.ek[slot], shared.ev[slot],
                              params.score_scale, codes);
      }
      float dq_scale[2];  // DsScale::kRow: of the tile's part of dQ
      if constexpr (Config::kRowScale) {
        encode_by_row(dp, codes.largest, {scale_of(rows[0]), scale_of(rows[8])}, codes.ds,
                      dq_scale);
      }
      if constexpr (Config::kDumpCodes) dump_codes(params, work, first_row, first_key, codes);
      PhaseTurn<Config>::pass(consumer);
      shared.operand_ring.wait_full(at);
      const auto& stage = shared.stages[at.stage];
      const std::uint64_t kt = tile::k_major_descriptor(Config::kTransposedSwizzle,
                                                        ptx::shared_address(stage.k_transposed));
      ptx::wgmma_fence();
      Gradients::rs(dq, codes.ds[0], kt, keep);
      keep = Config::kRowScale ? 0 : 1;
#pragma unroll
      for (int k = 1; k < 4; ++k) {
        Gradients::add_rs(dq, codes.ds[k], kt + k * tile::kDescriptorStepK32);
      }
      ptx::wgmma_commit_group();
      // The last block multiplies what lies there, finite or not: nobody reads the result.
      scores(stage);
      facts = shared.facts[at.stage];
      if constexpr (Config::kRowScale) {
        // The next scores are multiplied while dQ is added.
        ptx::wgmma_wait_group<2>();
        ptx::pin(dq);
        sums().promote(dq, dq_scale, started);
        started = true;
      }
      ptx::wgmma_wait_group<0>();
      ptx::pin(s);
      ptx::pin(dp);
      ptx::pin(dq);
      if (leader or Config::kEveryLaneArrives) {
        ptx::mbarrier_arrive(shared.operand_ring.empty_at(at.stage));
      }
      at.advance();
      if (t + 2 == tiles_end) release_queries();
    }
    const bool keeps = not Config::kRowScale and not work.visits.empty();
    float scale[2] = {keeps ? stages::factor(scale_of(rows[0])) : 0.0f,
                      keeps ? stages::factor(scale_of(rows[8])) : 0.0f};
    const float rest = sums().finish(dq, scale, started);
    const WarpRows<Config::kDim> finished(shared.sums[consumer] + warp * (Config::kFloat4s / 4));
    finished.put(dq);
    finished.store(
        params.dq, work.item.head, work.document.q_token,
        work.item.first + 64 * consumer + 16 * warp, work.document.q_len, [&](auto& x, int row) {
          // The scale of the row, from the quad that has it.
          const float own = __shfl_sync(0xFFFFFFFFu, row < 8 ? scale[0] : scale[1], row % 8 * 4);
          settle(x, rest, own);
          finished.finish_rotated(x, params.softmax_scale, params.rotate);
        });
    ptx::mbarrier_arrive(
        shared.work_ring.empty_at(item % kWorkSlots));  // every lane: it happens rarely
  }
  PhaseTurn<Config>::close(consumer);
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    dq_kernel(const __grid_constant__ BackwardParams params) {
  extern __shared__ std::uint8_t raw[];
  auto& shared = *reinterpret_cast<SharedStorage<Config>*>(raw);
  ptx::launch_dependents();
  if (threadIdx.x == 0) {
    shared.work_ring.initialise(128 * Config::kConsumers + 1);
    constexpr int kArrivals = (Config::kEveryLaneArrives ? 128 : 4) * Config::kConsumers;
    shared.query_ring.initialise(kArrivals);
    shared.operand_ring.initialise(kArrivals);
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
    const bool leads = threadIdx.x % 32 == 0;
    if (warp == 0 and leads) load_items(params, shared);
    if (warp == 1 and (leads or not Config::kMonotone)) load_operands(params, shared);
  } else {
    ptx::set_max_registers_up<Config::kConsumerRegisters>();
    attend(params, shared, warpgroup - 1);
  }
}

}  // namespace mxattn::kernels::sm90::dq
