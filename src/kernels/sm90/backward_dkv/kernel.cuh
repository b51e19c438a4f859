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
#include "kernels/sm90/backward_steps.h"
#include "kernels/sm90/device_ops.h"
#include "kernels/sm90/epilogue.h"
#include "kernels/sm90/seen_columns.h"
#include "kernels/sm90/sums.h"
#include "kernels/sm90/work.h"
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

/// What holds for a whole step.
struct alignas(16) StepFacts {
  std::int32_t c, r;  // cuda::kNanScale for NaN

  // How the phase goes in each warpgroup, and whether something rare is due before it: another
  // query head begins, a scale or EQ is another than in the step before, a promotion. Behind them
  // EQ of the step's first query.
  std::uint32_t flags;

  __device__ __forceinline__ static std::uint32_t pack(int consumer, Phase phase, bool rare) {
    return (static_cast<std::uint32_t>(phase) | (rare ? 4u : 0u)) << (8 * consumer);
  }
  __device__ __forceinline__ static Phase phase(std::uint32_t flags, int consumer) {
    return static_cast<Phase>((flags >> (8 * consumer)) & 3u);
  }
  __device__ __forceinline__ static bool rare(std::uint32_t flags, int consumer) {
    return ((flags >> (8 * consumer)) & 4u) != 0;
  }
  __device__ __forceinline__ static std::uint32_t pack_eq(int eq) {
    return static_cast<std::uint32_t>(static_cast<std::uint8_t>(eq)) << 16;
  }
  __device__ __forceinline__ static Exponent eq(std::uint32_t flags) {
    return Exponent::stored(static_cast<std::int8_t>(flags >> 16));
  }
};

/// The steps of an item as the 64 keys of a warpgroup see them.
struct StepScope {
  Range whole{0, 0};  // steps from which all keys are seen
  Range some{0, 0};   // steps from which any key may be seen

  __device__ __forceinline__ StepScope(const Mask& mask, const Document& d, int first_key) {
    const int last_key = min(first_key + 63, d.k_len - 1);
    if (first_key > last_key) return;
    // The mask is a band: its ends never decrease with the key.
    const Range first = visible_queries(mask, d.q_len, d.k_len, first_key);
    const Range last = visible_queries(mask, d.q_len, d.k_len, last_key);
    some = {first.begin / kQueryStep, (last.end + kQueryStep - 1) / kQueryStep};
    if (first_key + 63 < d.k_len) {
      whole = {(last.begin + kQueryStep - 1) / kQueryStep, first.end / kQueryStep};
    }
  }
  /// first: of the item. Half 1 of a tile on the diagonal sees nothing of it.
  __device__ __forceinline__ Phase phase(int step, bool plain, bool first) const {
    if (first and not some.contains(step)) return Phase::kSkip;
    if (not plain) return Phase::kGeneral;
    return whole.contains(step) ? Phase::kPlain : Phase::kMasked;
  }
};

/// What rarely matters of a key: kept in shared memory, where it costs no register.
struct KeyFacts {
  Range visible;  // queries that see it
  int ek, ev;     // stored bytes
};

/// Scales of a warp's accumulators, and of its factors a and F. In shared memory for the same
/// reason.
struct ScalesNow {
  std::int32_t c, r;  // cuda::kNanScale for NaN
};

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
  StepStats stats[Config::kStatsStages];  // what phase i reads
  KeyFacts keys[kKeyTile];  // written by the first of the key's quad, read by the quad
  ScalesNow scales[Config::kConsumers][4];  // of each warp, for itself
  Work work[kWorkSlots];                    // items at hand and ahead
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
    ptx::mbarrier_arrive_expect(key_full, sizeof(shared.k) + sizeof(shared.v));
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

/// Warps 1 to 3: what every query of a step adds to the phase. `turn` is 0 to 2.
template <class Config>
__device__ void form_stats(const BackwardParams& params, SharedStorage<Config>& shared, int turn) {
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

    const StepScope scope0(params.mask, d, work.item.first);
    const StepScope scope1(params.mask, d, work.item.first + 64);
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
      const auto flags = [&](int half, const StepScope& scope) {
        return StepFacts::pack(
            half, scope.phase(s, plain, i == 0),
            changes or stages::promotes_dv(s, half) or stages::promotes_dk(s, half));
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
        stats.facts = {value_of(scales.c), value_of(r),
                       flags(0, scope0) | flags(1, scope1) | StepFacts::pack_eq(first)};
      }
      // Every lane wrote, so every lane arrives.
      ptx::mbarrier_arrive(shared.stats_ring.full_at(at.stage));
#pragma unroll
      for (int n = 0; n < Config::kStatsWarps; ++n) at.advance();
    }
    ahead = i - total;
  }
}

// ---- consumers --------------------------------------------------------------------------------

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

/// Codes of P and dS of one step: operands of two MMAs of 32 queries. With DsScale::kRow dS itself
/// waits in the registers of dP until its largest magnitudes are known.
struct StepCodes {
  std::uint32_t p[2][4], ds[2][4];
  float largest[2] = {0, 0};
};

/// What the scores and dP of a key are multiplied with, for queries of one EQ.
struct KeyFactors {
  float a, f;
};

__device__ __forceinline__ KeyFactors factors_of(const KeyFacts& key, Exponent eq, Exponent c,
                                                 Exponent r, float score_scale) {
  const Exponent ek = Exponent::stored(static_cast<std::int8_t>(key.ek));
  const Exponent ev = Exponent::stored(static_cast<std::int8_t>(key.ev));
  return {stages::score_factor(score_scale, eq, ek), stages::dkv_gradient_factor(c, ev, eq, r)};
}

/// Phase of a pair of 8-query blocks, four queries of the thread: factors(h, e) are those of key h
/// and query e. seen: null without masks. kNarrow: one key after the other, for want of registers.
template <class Config, bool kNarrow, class Factors>
__device__ __forceinline__ void phase_pair(int pair, const float (&s)[32], float (&dp)[32],
                                           const float (&addend)[4], const float (&delta)[4],
                                           const Factors& factors, const SeenColumns* seen,
                                           StepCodes& codes) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float t[4], ds[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int i = 8 * pair + 4 * (e / 2) + 2 * h + e % 2;
      const KeyFactors by = factors(h, e);
      t[e] = stages::probability<DeviceOps>(s[i], by.a, addend[e]);
      ds[e] = stages::dkv_ds<DeviceOps>(t[e], dp[i], by.f, delta[e]);
      if constexpr (Config::kRowScale) {
        if (seen != nullptr and not seen->sees(i)) ds[e] = 0.0f;
        dp[i] = ds[e];
        codes.largest[h] = fmaxf(codes.largest[h], fabsf(ds[e]));
      }
    }
    const int k = pair / 2, word = 2 * (pair % 2) + h;
    const std::uint32_t mask = seen != nullptr ? seen->code_mask(k, word) : ~0u;
    codes.p[k][word] = ptx::to_e4m3x4(t[0], t[1], t[2], t[3]) & mask;
    if constexpr (not Config::kRowScale) {
      codes.ds[k][word] = ptx::to_e4m3x4(ds[0], ds[1], ds[2], ds[3]) & mask;
    }
    if constexpr (kNarrow) __syncwarp();
  }
}

/// Phase of a plain or masked step: one EQ, addends in FP16 pairs.
template <class Config, bool kMasked>
__device__ __forceinline__ void phase_plain(const float (&s)[32], float (&dp)[32],
                                            const StepPairs& pairs, const KeyFactors (&factors)[2],
                                            const KeyFacts* keys, int first_query,
                                            StepCodes& codes) {
  const SeenColumns seen(keys[0].visible, keys[8].visible, first_query);
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    float addend[4], delta[4];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      ptx::from_fp16x2(StepPairs::word(pairs.addend, 2 * pair + n), addend[2 * n],
                       addend[2 * n + 1]);
      ptx::from_fp16x2(StepPairs::word(pairs.delta, 2 * pair + n), delta[2 * n], delta[2 * n + 1]);
    }
    phase_pair<Config, false>(
        pair, s, dp, addend, delta, [&](int h, int) { return factors[h]; },
        kMasked ? &seen : nullptr, codes);
  }
}

/// Phase of any step: addends in FP32, factors of every 32 queries, or of every query where these
/// have not one EQ. The same bits as phase_plain where both apply.
template <class Config>
__device__ __forceinline__ void phase_general(const float (&s)[32], float (&dp)[32],
                                              const StepStats& stats, const KeyFacts* keys,
                                              int first_query, float score_scale,
                                              StepCodes& codes) {
  const SeenColumns seen(keys[0].visible, keys[8].visible, first_query);
  const int column = 2 * (threadIdx.x % 4);
  const Exponent c = exponent_of(stats.facts.c);
  const Exponent r = exponent_of(stats.facts.r);
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const std::int8_t* const eq = stats.eq + 32 * k;
    const bool uniform = __all_sync(0xFFFFFFFFu, eq[threadIdx.x % 32] == eq[0]);
    const auto phases = [&](const auto& factors_at) {
#pragma unroll
      for (int pair = 2 * k; pair < 2 * k + 2; ++pair) {
        float addend[4], delta[4];
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const float2 addends =
              *reinterpret_cast<const float2*>(stats.addend + 16 * pair + 8 * n + column);
          addend[2 * n] = addends.x;
          addend[2 * n + 1] = addends.y;
          ptx::from_fp16x2(stats.delta_pairs[pair_word(2 * pair + n, column / 2)], delta[2 * n],
                           delta[2 * n + 1]);
        }
        phase_pair<Config, true>(
            pair, s, dp, addend, delta,
            [&](int h, int e) {
              return factors_at(h, 16 * (pair % 2) + 8 * (e / 2) + column + e % 2);
            },
            &seen, codes);
      }
    };
    const auto factors_of_key = [&](int h, int query) {
      return factors_of(keys[8 * h], Exponent::stored(eq[query]), c, r, score_scale);
    };
    if (uniform) {
      const KeyFactors factors[2] = {factors_of_key(0, 0), factors_of_key(1, 0)};
      phases([&](int h, int) { return factors[h]; });
    } else {
      phases(factors_of_key);
    }
  }
}

/// For tests: the codes of a step as CodeDump says.
__device__ __forceinline__ void dump_codes(const BackwardParams& params, const Document& d,
                                           int head, int first_query, int first_key,
                                           const StepCodes& codes) {
  const auto put = [&](std::uint8_t* to, const std::uint32_t(&operands)[2][4]) {
    if (to == nullptr) return;
    for (int k = 0; k < 2; ++k) {
      for_each_code(operands[k], [&](int half, int column, std::uint8_t code) {
        const int query = first_query + 32 * k + column;
        const int key = first_key + tile::fragment_row(threadIdx.x % 128, half);
        if (query >= d.q_len or key >= d.k_len) return;
        to[(head * params.total_q + d.q_token + query) * params.dump.keys + key] = code;
      });
    }
  };
  put(params.dump.t, codes.p);
  put(params.dump.ds_dkv, codes.ds);
}

/// FP32 sums of a warpgroup's dV or dK, where the Config places them.
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

/// DsScale::kRow: whether any of the 32 keys that the CPU takes at once sees a query of the step.
/// Only then does the step add to their dK; it matters where the scale is NaN.
__device__ __forceinline__ bool block_sees_step(const Mask& mask, const Document& d, int key,
                                                int step) {
  constexpr int kBlock = 32;
  const int first = key / kBlock * kBlock;
  if (first >= d.k_len) return false;
  const int last = min(first + kBlock, d.k_len) - 1;
  return visible_queries(mask, d.q_len, d.k_len, first).begin < (step + 1) * kQueryStep and
         visible_queries(mask, d.q_len, d.k_len, last).end > step * kQueryStep;
}

template <class Config>
__device__ void attend(const BackwardParams& params, SharedStorage<Config>& shared, int consumer) {
  const int thread = threadIdx.x % 128;
  const bool leader = ptx::opaque(threadIdx.x % 32) == 0;
  const std::uint32_t quad_lane = ptx::opaque(threadIdx.x % 4);
  const int warp = thread / 32;
  tile::RingPosition<Config::kStages> at;
  tile::RingPosition<Config::kStatsStages> stats_at;
  // Made where they are used: they would cost registers in the loop.
  const auto dv_sums = [&] { return sums_of<Config, false>(params, shared, consumer); };
  const auto dk_sums = [&] { return sums_of<Config, true>(params, shared, consumer); };
  ScalesNow& scales = shared.scales[consumer][warp];
  const std::uint32_t k_tile = ptx::shared_address(shared.k) + consumer * 64 * Config::kDim;
  const std::uint32_t v_tile = ptx::shared_address(shared.v) + consumer * 64 * Config::kDim;
  using Gradients = ptx::WgmmaE4m3<Config::kDim>;

  for (std::uint32_t item = 0;; ++item) {
    shared.work_ring.wait_full(tile::RingPosition<kWorkSlots>::after(item));
    const Work& work = shared.work[item % kWorkSlots];
    if (work.last) return;
    const Document& d = work.document;
    const int total = work.visits.size() * params.queries_per_key_head;
    const int first_key = work.item.first + 64 * consumer;

    // On their way while the first scores are multiplied.
    KeyFacts own[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int key = first_key + tile::fragment_row(thread, h);
      const bool valid = key < d.k_len;
      const std::int64_t slot = work.item.head * params.k_slots + d.k_slot + key;
      own[h] = {valid ? visible_queries(params.mask, d.q_len, d.k_len, key) : Range{0, 0},
                valid ? params.k_exponents[slot] : 0, valid ? params.v_exponents[slot] : 0};
    }
    float dv[Config::kOutputs], dk[Config::kOutputs], s[32], dp[32];
    KeyFactors factors[2] = {};
#pragma unroll
    for (int i = 0; i < Config::kOutputs; ++i) dv[i] = dk[i] = 0.0f;

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
      flags = shared.stats[from.stage].facts.flags;
    };
    // K and V go back before the last step, which needs no further scores.
    const auto release_keys = [&] {
      if (leader) ptx::mbarrier_arrive(shared.key_ring.empty_at(0));
    };
    const auto was_promoted_before = [&](int place, int i) {
      return stages::was_promoted(place, work.visits.begin, work.visits.size(), i);
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
    shared.key_ring.wait_full(tile::RingPosition<1>::after(item));
    if (total > 0) {
      read_stats(stats_at);
      shared.operand_ring.wait_full(at);
      const ScalesNow begun = {shared.stats[stats_at.stage].facts.c,
                               shared.stats[stats_at.stage].facts.r};
      if (leader) scales = begun;
      if (StepFacts::phase(flags, consumer) == Phase::kSkip) {
        // Scales that change now change an accumulator of zeros, or of NaN.
        hand_back_stats();
        hand_back_operands();
        i = 1;
        if (total > 1) read_stats(stats_at);
        flags |= StepFacts::pack(consumer, Phase::kPlain, true);
        shared.operand_ring.wait_full(at);
      }
      ptx::wgmma_fence();
      scores(shared.stages[at.stage]);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        factors[h] = factors_of(own[h], StepFacts::eq(flags), exponent_of(begun.c),
                                exponent_of(begun.r), params.score_scale);
      }
      ptx::wgmma_wait_group<0>();
      ptx::pin(s);
      ptx::pin(dp);
      hand_back_operands();
    } else {
#pragma unroll
      for (int j = 0; j < 32; ++j) s[j] = dp[j] = 0.0f;
    }
    const int first = i;  // that is not left out
    if (i + 1 >= total) release_keys();
    KeyFacts* const keys = shared.keys + 64 * consumer + tile::fragment_row(thread, 0);
    if (quad_lane == 0) {
      keys[0] = own[0];
      keys[8] = own[1];
    }
    __syncwarp();
    for (; i < total; ++i) {
      const Phase phase = StepFacts::phase(flags, consumer);
      if (StepFacts::rare(flags, consumer)) {
        const StepFacts facts = shared.stats[stats_at.stage].facts;
        const ScalesNow before = scales;
        __syncwarp();
        if (leader) scales = {facts.c, facts.r};
        const bool head_ends = step == work.visits.begin and i > 0;
        const Exponent c_old = exponent_of(before.c), c = exponent_of(facts.c);
        const Exponent r_old = exponent_of(before.r), r = exponent_of(facts.r);
        if (head_ends or (i > 0 and stages::promotes_dv(step, consumer))) {
          const float scale = stages::output_factor(c_old);
          dv_sums().promote(dv, {scale, scale},
                            was_promoted_before(stages::dv_promotion(consumer), i));
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
          if (head_ends or (i > 0 and stages::promotes_dk(step, consumer))) {
            const float scale = stages::factor(r_old);
            dk_sums().promote(dk, {scale, scale},
                              was_promoted_before(stages::dk_promotion(consumer), i));
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
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          if (not block_sees_step(params.mask, d, first_key + tile::fragment_row(thread, h),
                                  step)) {
            dk_scale[h] = 0.0f;
          }
        }
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
        dk_sums().promote(dk, dk_scale, i > first);
      }
      ptx::wgmma_wait_group<0>();
      ptx::pin(s);
      ptx::pin(dp);
      ptx::pin(dv);
      ptx::pin(dk);
      hand_back_operands();
      if (i + 2 == total) release_keys();
    }
    const int row = work.item.first + 64 * consumer + 16 * warp;
    const bool dv_started = was_promoted_before(stages::dv_promotion(consumer), total);
    const bool dk_started = Config::kRowScale
                                ? total > first
                                : was_promoted_before(stages::dk_promotion(consumer), total);
    const float dv_scale = total > 0 ? stages::output_factor(exponent_of(scales.c)) : 0.0f;
    const float dk_scale =
        total > 0 and not Config::kRowScale ? stages::factor(exponent_of(scales.r)) : 0.0f;
    // Rows lie where shared sums do: these must be out before.
    const WarpRows<Config::kDim> rows(shared.sums[consumer][warp]);
    dv_sums().finish(dv, {dv_scale, dv_scale}, dv_started);
    if constexpr (Config::kSharedSums > 0) dk_sums().finish(dk, {dk_scale, dk_scale}, dk_started);
    rows.put(dv);
    rows.store(params.dv, work.item.head, work.document.k_token, row, work.document.k_len,
               [](auto&) {});
    if constexpr (Config::kSharedSums == 0) dk_sums().finish(dk, {dk_scale, dk_scale}, dk_started);
    rows.put(dk);
    rows.store(params.dk, work.item.head, work.document.k_token, row, work.document.k_len,
               [&](auto& x) { rows.finish_rotated(x, params.softmax_scale, params.rotate); });
    ptx::mbarrier_arrive(
        shared.work_ring.empty_at(item % kWorkSlots));  // every lane: it happens rarely
  }
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    dkv_kernel(const __grid_constant__ BackwardParams params) {
  extern __shared__ std::uint8_t raw[];
  auto& shared = *reinterpret_cast<SharedStorage<Config>*>(raw);
  if (threadIdx.x == 0) {
    shared.work_ring.initialise(128 * Config::kConsumers + 32 * Config::kStatsWarps);
    shared.key_ring.initialise(4 * Config::kConsumers);
    shared.operand_ring.initialise(4 * Config::kConsumers);
    shared.stats_ring.initialise((Config::kEveryLaneArrives ? 128 : 4) * Config::kConsumers, 32);
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
    } else {
      form_stats(params, shared, warp - 1);
    }
  } else {
    ptx::set_max_registers_up<Config::kConsumerRegisters>();
    attend(params, shared, warpgroup - 1);
  }
}

}  // namespace mxattn::kernels::sm90::dkv
