// What a step of 64 queries tells the phases of dK/dV: scales, how the phase goes for each half of
// the tile's keys, and what each query adds. Formed by warps of the producers' warpgroup, read a
// phase ahead.
#pragma once

#include "kernels/sm90/backward.h"
#include "kernels/sm90/backward_steps.h"
#include "kernels/sm90/block_scope.h"
#include "kernels/sm90/device_ops.h"
#include "kernels/sm90/work.h"
#include "ptx/barrier.h"
#include "ptx/math.h"
#include "recipe/stages.h"
#include "tile/ring.h"

namespace mxattn::kernels::sm90::dkv {

using stages::Exponent;
using stages::kQueryStep;

/// What holds for a whole step.
struct alignas(16) StepFacts {
  std::int32_t c, r;  // cuda::kNanScale for NaN

  // A word for each half of the tile's keys: how the phase goes, whether something rare is due
  // before it (another query head begins, a scale or EQ is another than in the step before, a
  // promotion), and EQ of the step's first query.
  std::uint32_t flags[2];

  static constexpr std::uint32_t kRare = 4;

  __device__ __forceinline__ static std::uint32_t pack(Phase phase, bool rare, int eq) {
    return static_cast<std::uint32_t>(phase) | (rare ? kRare : 0u) |
           static_cast<std::uint32_t>(eq) << 8;
  }
  __device__ __forceinline__ static Phase phase(std::uint32_t flags) {
    return static_cast<Phase>(flags & 3u);
  }
  __device__ __forceinline__ static Exponent eq(std::uint32_t flags) {
    return Exponent::stored(static_cast<std::int8_t>(flags >> 8));
  }
};

/// How the phase of a block of keys goes at a step. first: of the item. Half 1 of a tile on the
/// diagonal sees nothing of it.
__device__ __forceinline__ Phase phase_of(const BlockScope& scope, int step, bool plain,
                                          bool first) {
  if (first and not scope.some.contains(step)) return Phase::kSkip;
  if (not plain) return Phase::kGeneral;
  return scope.whole_of_full().contains(step) ? Phase::kPlain : Phase::kMasked;
}

/// Where the pair of queries 8 b + 2 q, 8 b + 2 q + 1 stands: lane q of a quad reads b = 0..3 and
/// b = 4..7 as a vector each.
MXATTN_HOST_DEVICE constexpr int pair_word(int b, int q) { return (b / 4) * 16 + q * 4 + b % 4; }

/// What the phase of a step reads.
struct alignas(16) StepStats {
  // FP16 pairs of neighbouring queries, in the order in which a thread reads them as two 16-byte
  // vectors (pair_word): addends -mu + eG - c + 8, and D'.
  std::uint32_t addend_pairs[kQueryStep / 2];
  std::uint32_t delta_pairs[kQueryStep / 2];
  float addend[kQueryStep];  // where FP16 does not hold them
  std::int8_t eq[kQueryStep];
  StepFacts facts;
};

/// Pairs of the queries of a step as a thread needs them, read one phase ahead.
struct StepPairs {
  uint4 addend[2], delta[2];

  /// q: the lane's place in its quad.
  __device__ __forceinline__ void load(const StepStats& stats, std::uint32_t q) {
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      addend[v] = *reinterpret_cast<const uint4*>(&stats.addend_pairs[pair_word(4 * v, q)]);
      delta[v] = *reinterpret_cast<const uint4*>(&stats.delta_pairs[pair_word(4 * v, q)]);
    }
  }
  __device__ __forceinline__ static std::uint32_t word(const uint4 (&vectors)[2], int b) {
    const uint4& v = vectors[b / 4];
    return b % 4 == 0 ? v.x : b % 4 == 1 ? v.y : b % 4 == 2 ? v.z : v.w;
  }
};

/// Warps 1 to 3: what every query of a step adds to the phase. `turn` is 0 to 2.
template <class Config, class Storage>
__device__ void form_stats(const BackwardParams& params, Storage& shared, int turn) {
  int ahead = turn;  // steps until this warp's next one
  tile::RingPosition<Config::kStatsStages> at;
  for (int n = 0; n < turn; ++n) at.advance();
  const int lane = threadIdx.x % 32;
  for (std::uint32_t item = 0;; ++item) {
    shared.work_ring.wait_full(tile::RingPosition<kWorkSlots>::after(item));
    const Work work = shared.work[item % kWorkSlots];
    ptx::mbarrier_arrive(shared.work_ring.empty_at(item % kWorkSlots));
    if (work.last) return;
    const Document& d = work.document;
    const int num_steps = work.visits.size();
    const int total = num_steps * params.queries_per_key_head;

    // nV_T, the largest norm exponent of the tile's keys. 127 (NaN) is the largest byte.
    const std::int8_t* norms =
        params.v_norms + work.item.head * params.k_slots + d.k_slot + work.item.first;
    int nv = -128;
    for (int k = lane; k < work.item.count; k += 32) nv = max(nv, int{norms[k]});
    nv = __reduce_max_sync(0xFFFFFFFFu, nv);
    const Exponent nv_tile = Exponent::stored(static_cast<std::int8_t>(nv));

    const BlockScope scope0 = block_scope<true, kQueryStep>(params.mask, d, work.item.first);
    const BlockScope scope1 =
        block_scope<true, kQueryStep>(params.mask, d, work.item.first + kBlockRows);
    const auto scales_of = [&](int head, int step) {
      const int tile_start = step * kQueryStep / stages::kQueryTile * stages::kQueryTile;
      const std::int64_t slot = head * params.q_slots + d.q_slot + tile_start;
      return params.tile_scales[slot / stages::kSlotAlignment];
    };
    int i = ahead;
    for (; i < total; i += Config::kStatsWarps) {
      const int head = work.item.head * params.queries_per_key_head + i / num_steps;
      const int s = work.visits.begin + i % num_steps;
      const std::int64_t slots = head * params.q_slots + d.q_slot;
      const std::int64_t tokens = head * params.total_q + d.q_token;
      const cuda::TileScales raw = scales_of(head, s);
      // The step before, of the same head: whether this one differs.
      const int before = s > work.visits.begin ? s - 1 : s;
      const cuda::TileScales raw_before = scales_of(head, before);
      const int eq_before = params.q_exponents[slots + before * kQueryStep];
      stages::ChunkScales scales;
      scales.a = exponent_of(raw.a);
      scales.b = exponent_of(raw.b);
      scales.c = exponent_of(raw.c);
      const Exponent r = stages::ds_exponent_dk(scales, nv_tile);

      // A lane forms two neighbouring queries: one pair.
      float addend[2], delta[2];
      int eq[2];
      bool fits = true;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int row = s * kQueryStep + 2 * lane + n;
        const bool valid = row < d.q_len;
        // A query outside the document takes the exponent of the last one in it.
        eq[n] = params.q_exponents[slots + min(row, d.q_len - 1)];
        const Exponent eg = valid ? Exponent::stored(params.g_exponents[slots + row]) : Exponent(0);
        const bool keyless = not valid or visible_keys(params.mask, d.q_len, d.k_len, row).empty();
        const Exponent sum =
            stages::dkv_addend(valid ? params.row_reference[tokens + row] : 0, eg, scales.c);
        addend[n] = keyless ? -kInfinity : (sum.nan ? kNan : static_cast<float>(sum.value));
        fits = fits and (keyless or fabsf(addend[n]) <= stages::kFp16Integers);
        delta[n] = keyless
                       ? 0.0f
                       : stages::dkv_delta<DeviceOps>(
                             params.delta[slots + row],
                             stages::dkv_delta_factor(scales.c, eg, Exponent::stored(eq[n]), r));
      }
      const int first = __shfl_sync(0xFFFFFFFFu, eq[0], 0);
      const bool plain = __all_sync(0xFFFFFFFFu, eq[0] == first and eq[1] == first and fits);
      const bool changes =
          i > 0 and (s == work.visits.begin or first != eq_before or raw.a != raw_before.a or
                     raw.b != raw_before.b or raw.c != raw_before.c);
      const auto flags = [&](int half, const BlockScope& scope) {
        return StepFacts::pack(
            phase_of(scope, s, plain, i == 0),
            changes or stages::promotes_dv(s, half) or stages::promotes_dk(s, half), first);
      };

      shared.stats_ring.wait_empty(at);
      auto& stats = shared.stats[at.stage];
      const int word = pair_word(lane / 4, lane % 4);
      stats.addend_pairs[word] = ptx::to_fp16x2(addend[0], addend[1]);
      stats.delta_pairs[word] = ptx::to_fp16x2(delta[0], delta[1]);
      if (not plain) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          stats.addend[2 * lane + n] = addend[n];
          stats.eq[2 * lane + n] = static_cast<std::int8_t>(eq[n]);
        }
      }
      if (lane == 0) {
        stats.facts = {value_of(scales.c), value_of(r), {flags(0, scope0), flags(1, scope1)}};
      }
      // Every lane wrote, so every lane arrives.
      ptx::mbarrier_arrive(shared.stats_ring.full_at(at.stage));
#pragma unroll
      for (int n = 0; n < Config::kStatsWarps; ++n) at.advance();
    }
    ahead = i - total;
  }
}

}  // namespace mxattn::kernels::sm90::dkv
