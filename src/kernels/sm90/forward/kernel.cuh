// Forward of the folded FP8 recipes on sm_90a (docs/numerics.md, section 3).
//
// A CTA is persistent and takes items of 64 queries a consumer, of one document and head, from a
// list, longest first. One warp of warpgroup 0 loads: it takes items, looks at the exponents of key
// tiles and keeps the tiles in flight through the copy engine. The other warpgroups, two at d = 128
// and three at d = 64, own 64 query rows each and walk the key tiles from the diagonal down
// (step.cuh):
//
//   WG 1   max exp pack, PV(32) x 4 | S(t-1) beside O = O alpha + T | max exp ...
//   WG 2   ... O = O alpha + T      | max exp pack, PV(32) x 4      | S(t-1) beside ...
//
// Nothing but the units that they wait for keeps them apart, so that one is in its exponentials
// while the tensor core works for the others. P leaves the score registers in the order pi of
// tile/swizzle.h, which V^T shares. The row sum rides in the PV product as eight columns of ones
// (tiles whose EV is uniform).
#pragma once

#include "base/division.h"
#include "kernels/sm90/epilogue.h"
#include "kernels/sm90/forward/config.h"
#include "kernels/sm90/forward/step.cuh"
#include "kernels/sm90/forward/tiles.h"
#include "kernels/sm90/work.h"
#include "ptx/barrier.h"
#include "ptx/copy.h"
#include "ptx/grid.h"
#include "tile/ring.h"

namespace mxattn::kernels::sm90::forward {

inline constexpr std::uint32_t kAllLanes = 0xFFFFFFFFu;
inline constexpr std::uint32_t kOneE4m3x4 = 0x38383838u;  // four codes of 1.0

template <class Config>
struct alignas(1024) SharedStorage {
  // producer -> consumers; swizzled as their tensor maps say
  std::uint8_t q[Config::kItems][Config::kRows * Config::kDim];
  struct alignas(1024) Stage {
    std::uint8_t k[kKeyTile * Config::kDim];
    std::uint8_t v[Config::kDim * kKeyTile];
    std::uint8_t ones[8 * kKeyTile];  // rows d..d+7 of V^T; written once
  } stages[Config::kStages];
  // Epilogue, each warp its own 16 rows:
  alignas(128) std::uint16_t out[Config::kRows * Config::kDim];
  KeyFactors factors[Config::kStages];           // of tiles that are not uniform
  std::uint32_t facts[Config::kStages];          // beside each key tile: TileFacts
  Work work[Config::kItems];                     // beside each q
  RowFacts rows[Config::kItems][Config::kRows];  // the same
  tile::RingBarriers<Config::kItems> q_ring;
  tile::RingBarriers<Config::kStages> kv_ring;
};

// ---- producer ---------------------------------------------------------------------------------

/// By a whole warp: all lanes look at exponents, the first does the rest.
template <class Config>
__device__ void load(const ForwardParams& params, SharedStorage<Config>& shared) {
  const int lane = threadIdx.x % 32;
  const bool leader = lane == 0;
  tile::RingPosition<Config::kItems> q_at;
  tile::RingPosition<Config::kStages> kv_at;
  while (true) {
    // The queries, and what their item is about: read back where it is needed, since the loop has
    // few registers.
    Work& work = shared.work[q_at.stage];
    plan::WorkItem item;
    if (leader) item = take_item(params);
    shared.q_ring.wait_empty(q_at);
    if (leader) describe_work<false>(params, item, work);
    __syncwarp();
    const std::uint32_t q_full = shared.q_ring.full_at(q_at.stage);
    if (work.last) {
      ptx::mbarrier_arrive(q_full);
      return;
    }
    if (leader) {
      ptx::mbarrier_expect(q_full, sizeof(shared.q[0]));
      ptx::copy_tensor_3d(ptx::shared_address(shared.q[q_at.stage]), &params.q, 0,
                          static_cast<int>(work.document.q_slot) + work.item.first, work.item.head,
                          q_full);
    }
    state_rows<Config>(params.mask, work,
                       params.q_exponents + work.item.head * params.q_slots + work.document.q_slot +
                           work.item.first,
                       shared.rows[q_at.stage]);
    ptx::mbarrier_arrive(q_full);  // every lane wrote, so every lane arrives
    q_at.advance();

    // Key tiles from the diagonal down to the first visible one. Lane i knows how the steps of
    // consumer i go.
    BlockScope scope;
    if (lane < Config::kConsumers) {
      scope = block_scope<false, kKeyTile>(params.mask, work.document,
                                           work.item.first + kBlockRows * lane);
    }
    for (int t = work.visits.end - 1; t >= work.visits.begin; --t) {
      const std::int64_t offset =
          work.key_head * params.k_slots + work.document.k_slot + t * kKeyTile;
      TileExponents exponents(params.k_exponents + offset, params.v_exponents + offset,
                              work.document.k_len - t * kKeyTile);
      shared.kv_ring.wait_empty(kv_at);
      const std::uint32_t full = shared.kv_ring.full_at(kv_at.stage);
      if (leader) {
        auto& stage = shared.stages[kv_at.stage];
        const int slot = static_cast<int>(work.document.k_slot) + t * kKeyTile;
        ptx::mbarrier_expect(full, sizeof(stage.k) + sizeof(stage.v));
        ptx::copy_tensor_3d(ptx::shared_address(stage.k), &params.k, 0, slot, work.key_head, full);
        ptx::copy_tensor_3d(ptx::shared_address(stage.v), &params.v, slot, 0, work.key_head, full);
      }
      const bool uniform = exponents.all_agree() and is_ordinary(params.score_scale);
      std::uint32_t facts = TileFacts::exponents(exponents.ek(), exponents.ev());
      if (not uniform) {
        facts = TileFacts::exponents(0, exponents.most_ev());
        exponents.store(shared.factors[kv_at.stage]);
      }
      const std::uint32_t steps = __reduce_or_sync(
          0xFFFFFFFFu,
          lane < Config::kConsumers ? TileFacts::step_bits(lane, step_of(scope, t, uniform)) : 0u);
      __syncwarp();
      if (leader) shared.facts[kv_at.stage] = facts | steps;
      if (leader or Config::kEveryLaneArrives) ptx::mbarrier_arrive(full);
      kv_at.advance();
    }
  }
}

// ---- consumers --------------------------------------------------------------------------------

/// LSE, mu and L: two lanes of a quad write a row each.
template <class Config>
__device__ __forceinline__ void store_statistics(const ForwardParams& params, const Work& work,
                                                 const Rows<Config>& rows, int lane, int warp_row) {
  const int r = lane % 4;
  const int row = warp_row + lane / 4 + 8 * r;
  const bool outside = row >= work.document.q_len;  // one branch, not two
  if (outside or r >= 2) return;
  const float m = r == 0 ? rows.m[0] : rows.m[1];
  const float l = mul_rn(r == 0 ? rows.l[0] : rows.l[1], pow2(-stages::kProbabilityShift));
  const bool keyless = r == 0 ? rows.is_keyless(0) : rows.is_keyless(1);
  const bool finite = m != -kInfinity;
  const float mu = finite ? ceilf(m) : 0.0f;
  const float correction = DeviceOps::exp2(m - mu);
  const std::int64_t at = work.item.head * params.total_q + work.document.q_token + row;
  if constexpr (Config::kDump) {
    if (finite) params.dump.correction[at] = correction;
  }
  params.row_reference[at] = static_cast<int>(mu);
  params.row_sum[at] = finite ? mul_rn(l, correction) : (keyless ? 1.0f : l);
  params.lse[at] = keyless ? -kInfinity : stages::log_sum_exp<DeviceOps>(finite ? m : 0.0f, l);
}

/// Whether either half of a word is below a number.
__device__ __forceinline__ bool any_half_below(std::uint32_t halves, std::uint32_t number) {
  return (halves & 0xFFFFu) < number or halves < number << 16;
}

/// O / l of the thread's rows, in BF16. Almost all quotients are one multiplication; where one of a
/// warp may need more, its group is divided anew by all lanes. This runs once an item and waits for
/// its instructions, so the fewest are the fastest.
template <class Config>
__device__ __forceinline__ void divide(const Rows<Config>& rows,
                                       const StagedRows<Config::kDim>& quotients) {
  constexpr std::uint32_t kTieOffsets = RoundedDivisor::kTieOffset * 0x10001u;
  constexpr std::uint32_t kTwiceSmall = bits_of(pow2(RoundedDivisor::kSmall)) >> 16 << 1;
  // O is in units of 2^(unit - 8) and l of 2^-8: what is left of them is one power of two. O of a
  // row without keys is 0.
  const auto divisor = [&](int r) {
    const float l = rows.is_keyless(r) ? 1.0f : rows.l[r];
    const float near = ptx::reciprocal_approx(l);
    return RoundedDivisor(l, rows.is_keyless(r) ? 0 : rows.unit[r],
                          fma_rn(fma_rn(-l, near, 1.0f), near, near));
  };
  const RoundedDivisor by[2] = {divisor(0), divisor(1)};
  // Of both halves of pairs: the least distance from ties of a group of 16 columns, and twice the
  // least magnitude of a row.
  constexpr int kGroups = Config::kDim / 16;
  std::uint32_t from_tie[kGroups], twice_least[2] = {~0u, ~0u};
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    std::uint32_t pairs[4];
    from_tie[group] = ~0u;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* const o = rows.o + 8 * group + 2 * i;
      const float low = by[i % 2].quick(o[0]), high = by[i % 2].quick(o[1]);
      pairs[i] = ptx::to_bf16x2(low, high);
      const std::uint32_t lower = ptx::permute_bytes(bits_of(low), bits_of(high), 0x5410);
      from_tie[group] = __viaddmin_u16x2(lower, kTieOffsets, from_tie[group]);
      twice_least[i % 2] = __viaddmin_u16x2(pairs[i], pairs[i], twice_least[i % 2]);
    }
    quotients.put(group, pairs);
  }
  std::uint32_t nearest = ~0u, least = ~0u;
#pragma unroll
  for (const std::uint32_t distance : from_tie) nearest = __vminu2(nearest, distance);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (not rows.is_keyless(r)) least = __vminu2(least, twice_least[r]);
  }
  const bool every_group =
      any_half_below(least, kTwiceSmall) or not by[0].is_ordinary() or not by[1].is_ordinary();
  const auto differs = [&](std::uint32_t distance) {
    return __any_sync(kAllLanes, every_group or any_half_below(distance, RoundedDivisor::kNearTie));
  };
  if (not differs(nearest)) [[likely]]
    return;
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    if (not differs(from_tie[group])) continue;
    std::uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* const o = rows.o + 8 * group + 2 * i;
      pairs[i] = ptx::to_bf16x2(by[i % 2].exact(o[0]), by[i % 2].exact(o[1]));
    }
    quotients.put(group, pairs);
  }
}

/// O of the thread's rows, and what is stored of a row beside it; rows of the document only are
/// written. `thread`: of the warpgroup; `staging`: the warpgroup's.
template <class Config>
__device__ __forceinline__ void store(const ForwardParams& params, const Work& work,
                                      const Rows<Config>& rows, int first_row, int thread,
                                      std::uint16_t* staging) {
  const int lane = thread % 32, warp = thread / 32;
  const int warp_row = first_row + 16 * warp;
  const StagedRows<Config::kDim> quotients(staging + 16 * warp * Config::kDim, lane);
  divide(rows, quotients);
  store_statistics(params, work, rows, lane, warp_row);
  quotients.store(params.out, work.item.head, work.document.q_token, warp_row, work.document.q_len);
}

template <class Config>
__device__ void attend(const ForwardParams& params, SharedStorage<Config>& shared, int consumer) {
  // Opaque: derived where it is used, an item once. Kept over the tiles it would be spilled.
  const auto thread = [] { return static_cast<int>(ptx::opaque(threadIdx.x) % 128); };
  const bool leader = threadIdx.x % 32 == 0;

  constexpr std::uint32_t kStageStep = sizeof(shared.stages[0]) / tile::kDescriptorUnit;
  constexpr std::uint32_t kItemStep = sizeof(shared.q[0]) / tile::kDescriptorUnit;
  constexpr std::uint32_t kBlockStep = 64 * Config::kDim / tile::kDescriptorUnit;
  const std::uint32_t q_base = RowLayout<Config>::low(ptx::shared_address(shared.q[0]));
  const std::uint32_t k_base =
      ptx::opaque(RowLayout<Config>::low(ptx::shared_address(shared.stages[0].k)));
  tile::RingPosition<Config::kItems> q_at;
  tile::RingPosition<Config::kStages> kv_at;
  Rows<Config> rows;
  // The 64 rows of an item that are this warpgroup's. They take turns, since the lower rows of an
  // item see less of the diagonal.
  int block = consumer;
  while (true) {
    shared.q_ring.wait_full(q_at);
    const Work& work = shared.work[q_at.stage];
    if (work.last) break;
    const RowFacts* const row_facts =
        shared.rows[q_at.stage] + block * 64 + tile::fragment_row(thread(), 0);
    const std::uint32_t q_low = ptx::opaque(q_base + q_at.stage * kItemStep + block * kBlockStep);
    float s[64];
    std::uint32_t facts = 0;
    const auto issue = [&](tile::RingPosition<Config::kStages> at) {
      shared.kv_ring.wait_full(at);
      facts = shared.facts[at.stage];
      ptx::wgmma_fence();
      issue_scores<Config>(s, q_low, k_base + at.stage * kStageStep);
    };
    // How the step at hand goes, and where the tile behind it is. The last step multiplies a tile
    // that is there; nobody reads the result.
    Step kind = Step::kSkip;
    int remaining = work.visits.size();
    tile::RingPosition<Config::kStages> next = kv_at;
    const std::uint32_t shift = ptx::opaque(TileFacts::step_shift(block));
    const auto look_ahead = [&] {
      enter_tile(rows, facts, params.score_scale);
      kind = TileFacts::step(facts, shift);
      if (remaining > 1) next.advance();
    };
    if (remaining == 0) {
      rows.start(row_facts);
      // NOTE: keeps the zeros of this rare way from being set on the other one too.
      __syncwarp();
    } else {
      issue(kv_at);
      rows.start(row_facts);
      look_ahead();
      ptx::wgmma_wait_group<0>();
      ptx::pin(s);
      int begin = (work.visits.end - 1) * kKeyTile;
      do {
        KeyTile tile;
        tile.begin = begin;
        tile.factors = shared.factors + kv_at.stage;
        tile.low = k_base + kv_at.stage * kStageStep;
        const auto issue_next = [&] { issue(next); };

        if (kind == Step::kPlain) {
          step<Config, Step::kPlain>(rows, s, tile, issue_next, block, params, work);
        } else if (kind == Step::kMasked) {
          step<Config, Step::kMasked>(rows, s, tile, issue_next, block, params, work);
        } else if (kind == Step::kLowerMasked) {
          step<Config, Step::kLowerMasked>(rows, s, tile, issue_next, block, params, work);
        } else if (kind == Step::kGeneral) {
          step<Config, Step::kGeneral>(rows, s, tile, issue_next, block, params, work);
        } else if (kind == Step::kGeneralMasked) {
          step<Config, Step::kGeneralMasked>(rows, s, tile, issue_next, block, params, work);
        } else {
          issue_next();
        }
        if (leader or Config::kEveryLaneArrives) {
          ptx::mbarrier_arrive(shared.kv_ring.empty_at(kv_at.stage));
        }
        kv_at = next;
        begin -= kKeyTile;
        --remaining;
        look_ahead();
        ptx::wgmma_wait_group<0>();
        ptx::pin(s);
      } while (remaining > 0);
      kv_at.advance();
    }
    store(params, work, rows, work.item.first + 64 * block, thread(),
          shared.out + consumer * 64 * Config::kDim);
    ptx::mbarrier_arrive(shared.q_ring.empty_at(q_at.stage));  // every lane: it happens rarely
    q_at.advance();
    block = block + 1 == Config::kConsumers ? 0 : block + 1;
  }
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    forward_kernel(const __grid_constant__ ForwardParams params) {
  extern __shared__ std::uint8_t raw[];
  auto& shared = *reinterpret_cast<SharedStorage<Config>*>(raw);

  ptx::launch_dependents();
  // The columns of ones behind every V^T tile; equal bytes need no swizzle.
  for (int i = threadIdx.x; i < Config::kStages * 8 * kKeyTile / 4; i += Config::kThreads) {
    auto& stage = shared.stages[i / (8 * kKeyTile / 4)];
    reinterpret_cast<std::uint32_t*>(stage.ones)[i % (8 * kKeyTile / 4)] = kOneE4m3x4;
  }
  if (threadIdx.x == 0) {
    shared.q_ring.initialise(128 * Config::kConsumers, 32);
    shared.kv_ring.initialise((Config::kEveryLaneArrives ? 128 : 4) * Config::kConsumers,
                              Config::kEveryLaneArrives ? 32 : 1);
    ptx::fence_mbarrier_init();
    ptx::prefetch_tensor_map(&params.q);
    ptx::prefetch_tensor_map(&params.k);
    ptx::prefetch_tensor_map(&params.v);
  }
  ptx::fence_proxy_async_shared();
  __syncthreads();
  ptx::wait_on_dependencies();

  const int warpgroup = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x) / 128, 0);
  if (warpgroup == 0) {
    ptx::set_max_registers_down<Config::kProducerRegisters>();
    if (threadIdx.x < 32) load(params, shared);
  } else {
    ptx::set_max_registers_up<Config::kConsumerRegisters>();
    attend(params, shared, warpgroup - 1);
  }
}

}  // namespace mxattn::kernels::sm90::forward
