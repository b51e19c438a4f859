// The phase of a step of dK/dV: codes of P and dS from S and dP, in registers.
#pragma once

#include "kernels/sm90/backward.h"
#include "kernels/sm90/backward_dkv/stats.cuh"
#include "kernels/sm90/backward_steps.h"
#include "kernels/sm90/device_ops.h"
#include "kernels/sm90/seen_columns.h"
#include "ptx/math.h"
#include "recipe/stages.h"
#include "tile/fragment.h"

namespace mxattn::kernels::sm90::dkv {

/// What rarely matters of a key: kept in shared memory, where it costs no register.
struct KeyFacts {
  Range visible;  // queries that see it
  int ek, ev;     // stored bytes
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

/// DsScale::kRow: steps of which any of the 32 keys that the CPU takes at once, `key` among them,
/// may see a query. Only these add to their dK; it matters where the scale is NaN.
__device__ __forceinline__ Range steps_of_block(const Mask& mask, const Document& d, int key) {
  constexpr int kBlock = 32;
  const int first = key / kBlock * kBlock;
  if (first >= d.k_len) return {0, 0};
  const int last = min(first + kBlock, d.k_len) - 1;
  return {visible_queries(mask, d.q_len, d.k_len, first).begin / kQueryStep,
          (visible_queries(mask, d.q_len, d.k_len, last).end + kQueryStep - 1) / kQueryStep};
}

}  // namespace mxattn::kernels::sm90::dkv
