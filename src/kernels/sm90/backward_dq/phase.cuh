// The phase of a key tile of dQ: codes of dS from S and dP, in registers.
#pragma once

#include <cstdint>

#include "kernels/sm90/backward.h"
#include "kernels/sm90/backward_steps.h"
#include "kernels/sm90/device_ops.h"
#include "kernels/sm90/seen_columns.h"
#include "kernels/sm90/work.h"
#include "ptx/math.h"
#include "recipe/stages.h"
#include "tile/fragment.h"

namespace mxattn::kernels::sm90::dq {

using stages::Exponent;

/// What rarely matters of a query row: kept in shared memory, where it costs no register.
struct RowFacts {
  Range visible;  // keys; empty for rows past the document's end
  int mu;
  float delta;                 // D
  std::int8_t eq, eg, ng, no;  // stored bytes
  std::int32_t r;  // of the accumulator; kNoScale before the first chunk that the row sees
};

/// What a phase needs of the thread's two rows for keys of one EK and EV.
struct RowFactors {
  float a[2];       // score factor
  float addend[2];  // -mu + f
  float delta[2];   // D''
};

/// The exponent of the row's accumulator; rows that have seen nothing have none, and it is 0.
__device__ __forceinline__ Exponent scale_of(const RowFacts& row) {
  return row.r == cuda::kNoScale ? Exponent(0) : exponent_of(row.r);
}

__device__ __forceinline__ void set_factors(RowFactors& factors, int h, const RowFacts& row,
                                            Exponent ek, Exponent ev, float score_scale) {
  const Exponent eg = Exponent::stored(row.eg);
  factors.a[h] = stages::score_factor(score_scale, Exponent::stored(row.eq), ek);
  const Exponent f = stages::dq_addend(row.mu, eg, ev, ek, scale_of(row));
  factors.addend[h] = f.nan ? kNan : static_cast<float>(f.value);
  factors.delta[h] = stages::dq_delta(row.delta, eg, ev);
}

/// Codes of dS of one tile: operands of four MMAs of 32 keys. With DsScale::kRow dS itself waits in
/// the registers of dP until its largest magnitudes are known.
struct TileCodes {
  std::uint32_t ds[4][4];
  float largest[2] = {0, 0};
};

/// Phase of block k of a tile: 32 keys that share EK and EV. seen: null without masks.
template <class Config>
__device__ __forceinline__ void phase_block(int k, const float (&s)[64], float (&dp)[64],
                                            const RowFactors& factors, const SeenColumns* seen,
                                            TileCodes& codes) {
#pragma unroll
  for (int pair = 2 * k; pair < 2 * k + 2; ++pair) {  // of 8-key blocks
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float ds[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int i = 8 * pair + 4 * (e / 2) + 2 * h + e % 2;
        const float p = stages::probability<DeviceOps>(s[i], factors.a[h], factors.addend[h]);
        ds[e] = stages::dq_ds<DeviceOps>(p, dp[i], factors.delta[h]);
        if constexpr (Config::kRowScale) {
          if (seen != nullptr and not seen->sees(i)) ds[e] = 0.0f;
          dp[i] = ds[e];
          codes.largest[h] = fmaxf(codes.largest[h], fabsf(ds[e]));
        }
      }
      if constexpr (not Config::kRowScale) {
        codes.ds[pair / 2][2 * (pair % 2) + h] = ptx::to_e4m3x4(ds[0], ds[1], ds[2], ds[3]);
      }
    }
  }
  if constexpr (not Config::kRowScale) {
    if (seen != nullptr) seen->mask_codes(codes.ds[k], k);
  }
}

/// Phase of a tile whose keys share EK and EV.
template <class Config, bool kMasked>
__device__ __forceinline__ void phase_uniform(const float (&s)[64], float (&dp)[64],
                                              const RowFactors& factors, const RowFacts* rows,
                                              int first_key, TileCodes& codes) {
  const SeenColumns seen(rows[0].visible, rows[8].visible, first_key);
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    phase_block<Config>(k, s, dp, factors, kMasked ? &seen : nullptr, codes);
  }
}

/// Phase of any tile: factors of every block of 32 keys, or of every key of one that is not
/// uniform. The same bits as phase_uniform for a row whose visible keys share EK and EV.
template <class Config>
__device__ __forceinline__ void phase_general(const float (&s)[64], float (&dp)[64],
                                              const RowFacts* rows, int first_key,
                                              const std::int8_t* tile_ek,
                                              const std::int8_t* tile_ev, float score_scale,
                                              TileCodes& codes) {
  const SeenColumns seen(rows[0].visible, rows[8].visible, first_key);
  const int lane = threadIdx.x % 32;
  const int column = 2 * (threadIdx.x % 4);
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const std::int8_t* const ek = tile_ek + 32 * k;
    const std::int8_t* const ev = tile_ev + 32 * k;
    RowFactors factors;
    if (__all_sync(0xFFFFFFFFu, ek[lane] == ek[0] and ev[lane] == ev[0])) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        set_factors(factors, h, rows[8 * h], Exponent::stored(ek[0]), Exponent::stored(ev[0]),
                    score_scale);
      }
      phase_block<Config>(k, s, dp, factors, &seen, codes);
      continue;
    }
    float ds[16];
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const int i = 16 * k + j;
      const int h = tile::fragment_half(i);
      const int key = 8 * (j >> 2) + column + (j & 1);
      set_factors(factors, h, rows[8 * h], Exponent::stored(ek[key]), Exponent::stored(ev[key]),
                  score_scale);
      const float p = stages::probability<DeviceOps>(s[i], factors.a[h], factors.addend[h]);
      ds[j] = stages::dq_ds<DeviceOps>(p, dp[i], factors.delta[h]);
      if constexpr (Config::kRowScale) {
        if (not seen.sees(i)) ds[j] = 0.0f;
        dp[i] = ds[j];
        codes.largest[h] = fmaxf(codes.largest[h], fabsf(ds[j]));
      }
      if (j % 4 == 3) __syncwarp();  // a few keys at a time, for want of registers
    }
    if constexpr (not Config::kRowScale) {
      tile::pack_operand(codes.ds[k], ds);
      seen.mask_codes(codes.ds[k], k);
    }
  }
}

/// For tests: the codes of a tile as CodeDump says.
__device__ __forceinline__ void dump_codes(const BackwardParams& params, const Work& work,
                                           int first_row, int first_key, const TileCodes& codes) {
  if (params.dump.ds_dq == nullptr) return;
  const Document& d = work.document;
  for (int k = 0; k < 4; ++k) {
    for_each_code(codes.ds[k], [&](int half, int column, std::uint8_t code) {
      const int query = first_row + tile::fragment_row(threadIdx.x % 128, half);
      const int key = first_key + 32 * k + column;
      if (query >= d.q_len or key >= d.k_len) return;
      const std::int64_t row = work.item.head * params.total_q + d.q_token + query;
      params.dump.ds_dq[row * params.dump.keys + key] = code;
    });
  }
}

}  // namespace mxattn::kernels::sm90::dq
