// Steps of the forward: one key tile for the 64 rows of a consumer warpgroup.
#pragma once

#include "kernels/sm90/device_ops.h"
#include "kernels/sm90/forward/config.h"
#include "kernels/sm90/forward/dump.cuh"
#include "kernels/sm90/forward/tiles.h"
#include "kernels/sm90/seen_columns.h"
#include "kernels/sm90/work.h"
#include "ptx/math.h"
#include "ptx/wgmma.h"
#include "recipe/stages.h"
#include "tile/fragment.h"
#include "tile/swizzle.h"

namespace mxattn::kernels::sm90::forward {

inline constexpr std::uint32_t kStepK32 = tile::kDescriptorStepK32;
inline constexpr std::uint32_t kSign = 0x80000000u;
inline constexpr int kNoUnit = -1000;               // no byte
inline constexpr std::uint32_t kNoFacts = 0x8080u;  // exponents that no token has

/// What rarely matters of a query row: in shared memory, where it costs no register.
struct RowFacts {
  Range visible;  // keys; empty for rows past the document's end
  int eq;         // the stored byte
};

/// Facts of the rows of an item, by a warp. eq: of the item's first row.
template <class Config>
__device__ __forceinline__ void state_rows(const Mask& mask, const Work& work,
                                           const std::int8_t* eq, RowFacts* facts) {
  const Document& d = work.document;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int rows = d.q_len - work.item.first;  // of the item's first and those behind it
  // All loads before the first use; the lane's row i is byte i.
  std::uint64_t exponents = 0;
#pragma unroll
  for (int i = 0; i < Config::kRows / 32; ++i) {
    const int row = lane + 32 * i;
    const auto byte = static_cast<std::uint8_t>(row < rows ? __ldg(eq + row) : 0);
    exponents |= static_cast<std::uint64_t>(byte) << (8 * i);
  }
#pragma unroll 1
  for (int row = lane; row < Config::kRows; row += 32, exponents >>= 8) {
    facts[row] = {
        row < rows ? visible_keys(mask, d.q_len, d.k_len, work.item.first + row) : Range{0, 0},
        static_cast<std::int8_t>(exponents & 0xFF)};
  }
}

/// What a thread keeps of its two query rows over the key tiles.
template <class Config>
struct Rows {
  // O in units of 2^(unit - 8) and l in units of 2^-8: powers of two move through the FMAs of the
  // recipe exactly, so that tiles of equal EV need no factor.
  float o[Config::kOutputs];
  float m[2];
  float l[2];
  int unit[2];  // the largest c of the tiles that the row saw, or kNoUnit
  float a[2];   // score factors of tiles with these facts
  std::uint32_t tile_facts;
  const RowFacts* facts;  // of half 0; half 1 is eight rows on

  __device__ __forceinline__ Range visible(int r) const { return facts[8 * r].visible; }
  /// Whether the row, if it is one of the document's, saw no key.
  __device__ __forceinline__ bool is_keyless(int r) const { return unit[r] == kNoUnit; }
  __device__ __forceinline__ Exponent eq(int r) const {
    return Exponent::stored(static_cast<std::int8_t>(facts[8 * r].eq));
  }

  __device__ __forceinline__ void start(const RowFacts* row_facts) {
    facts = row_facts;
    tile_facts = kNoFacts;
#pragma unroll
    for (int i = 0; i < Config::kOutputs; ++i) o[i] = 0.0f;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      m[r] = -kInfinity;
      l[r] = 0.0f;
      unit[r] = kNoUnit;
    }
  }
};

/// Score factors for tiles with these facts, which almost never change.
template <class Config>
__device__ __forceinline__ void enter_tile(Rows<Config>& rows, std::uint32_t facts,
                                           float score_scale) {
  const bool same = ((facts ^ rows.tile_facts) & TileFacts::kExponents) == 0;
  rows.tile_facts = facts;
  if (same) [[likely]]
    return;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    rows.a[r] = stages::score_factor(fabsf(score_scale), rows.eq(r),
                                     Exponent::stored(TileFacts::ek(facts)));
  }
}

/// One key tile as a warpgroup sees it.
struct KeyTile {
  int begin;                  // first key
  const KeyFactors* factors;  // of general steps
  std::uint32_t low;          // of the descriptor of K, V^T and the ones behind it
};

template <class Config>
using RowLayout = tile::Descriptor<Config::kRowSwizzle>;
template <class Config>
using ValueLayout = tile::Descriptor<Config::kValueSwizzle>;

// ---- products ---------------------------------------------------------------------------------

/// Issues S = Q K^T of a tile.
template <class Config>
__device__ __forceinline__ void issue_scores(float (&s)[64], std::uint32_t q_low,
                                             std::uint32_t k_low) {
  using Scores = ptx::WgmmaE4m3<kKeyTile>;
  using Layout = RowLayout<Config>;
  Scores::fresh_ss(s, Layout::whole(q_low), Layout::whole(k_low));
#pragma unroll
  for (int step = 1; step < Config::kDim / stages::kMmaDepth; ++step) {
    // Sums of lower halves: a carry into the constant upper one would cost its registers.
    Scores::add_ss(s, Layout::whole(q_low + step * kStepK32),
                   Layout::whole(k_low + step * kStepK32));
  }
  ptx::wgmma_commit_group();
}

/// Issues one quarter of T = P V: 32 keys. If T is that wide, columns of ones make the row sum.
template <class Config, int kPartials>
__device__ __forceinline__ void issue_values(float (&t)[kPartials], const std::uint32_t (&codes)[4],
                                             const KeyTile& tile, int quarter) {
  using Values = ptx::WgmmaE4m3<2 * kPartials>;
  const std::uint64_t v = ValueLayout<Config>::whole(
      tile.low + kKeyTile * Config::kDim / tile::kDescriptorUnit + quarter * kStepK32);
  ptx::wgmma_fence();
  if (quarter == 0) {
    Values::fresh_rs(t, codes, v);
  } else {
    Values::add_rs(t, codes, v);
  }
  ptx::wgmma_commit_group();
}

/// Issues one quarter of the row sum alone.
template <class Config>
__device__ __forceinline__ void issue_sums(float (&sums)[4], const std::uint32_t (&codes)[4],
                                           const KeyTile& tile, int quarter) {
  using Ones = ptx::WgmmaE4m3<8>;
  const std::uint64_t ones = ValueLayout<Config>::whole(
      tile.low + 2 * kKeyTile * Config::kDim / tile::kDescriptorUnit + quarter * kStepK32);
  ptx::wgmma_fence();
  if (quarter == 0) {
    Ones::fresh_rs(sums, codes, ones);
  } else {
    Ones::add_rs(sums, codes, ones);
  }
  ptx::wgmma_commit_group();
}

// ---- pieces of a step -------------------------------------------------------------------------

__device__ __forceinline__ bool sees_any(Range visible, int begin) {
  return max(visible.begin, begin) < min(visible.end, begin + kKeyTile);
}

/// The four factors of the thread's columns in blocks b and b + 1 of eight keys: columns 8 b + 2 q,
/// its neighbour, and the two eight keys on. Element i of a fragment is of block i / 4 and of
/// column i % 2 there.
__device__ __forceinline__ float4 factors_of(const float (&factors)[kKeyTile], int block) {
  return reinterpret_cast<const float4*>(factors)[2 * block + static_cast<int>(threadIdx.x % 4)];
}
__device__ __forceinline__ float factor_of(const float4& factors, int i) {
  const int at = 2 * ((i >> 2) & 1) + (i & 1);
  return at == 0 ? factors.x : at == 1 ? factors.y : at == 2 ? factors.z : factors.w;
}

/// s = acc 2^EK, exactly, so that rows.a = scale 2^EQ is left of the score's factor. Where EQ + EK
/// of any of these rows and keys leaves the range of a score's exponent, the power of the key is
/// clamped instead of the sum; a NaN stays.
template <class Config>
__device__ __forceinline__ void scale_scores(const Rows<Config>& rows, float (&s)[64],
                                             const KeyFactors& keys, float score_scale) {
  bool clamped = not is_ordinary(score_scale);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int eq = rows.facts[8 * r].eq;
    clamped = clamped or eq + keys.least_ek < stages::kScoreExponentMin or
              eq + keys.most_ek > stages::kScoreExponentMax;
  }
  if (not clamped) {
#pragma unroll
    for (int i = 0; i < 64; i += 8) {
      const float4 factors = factors_of(keys.k, i / 4);
#pragma unroll
      for (int j = i; j < i + 8; ++j) s[j] = mul_rn(s[j], factor_of(factors, j));
    }
    return;
  }
  float least[2], most[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int eq = rows.facts[8 * r].eq;
    least[r] = stages::factor(stages::kScoreExponentMin - eq);
    most[r] = stages::factor(stages::kScoreExponentMax - eq);
  }
  const float sign = score_scale < 0.0f ? -1.0f : 1.0f;
#pragma unroll
  for (int i = 0; i < 64; i += 8) {
    const float4 factors = factors_of(keys.k, i / 4);
#pragma unroll
    for (int j = i; j < i + 8; ++j) {
      const int r = tile::fragment_half(j);
      const float power = ptx::min_nan(ptx::max_nan(factor_of(factors, j), least[r]), most[r]);
      s[j] = mul_rn(mul_rn(s[j], sign), power);
    }
  }
}

/// Scores of the thread's first kColumns columns become -inf where a row does not see them.
template <int kColumns>
__device__ __forceinline__ void mask_scores(float (&s)[64], const SeenColumns& seen) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int column = 0; column < kColumns; ++column) {
      const int i = 4 * (column / 2) + 2 * r + column % 2;
      if (not seen.sees(i)) s[i] = -kInfinity;
    }
  }
}

/// The largest 2^EV that each row sees among the thread's columns of a masked tile.
template <class Config>
__device__ __forceinline__ void find_most_ev(const float (&s)[64], const KeyFactors& keys,
                                             float (&most_ev)[2]) {
  most_ev[0] = most_ev[1] = 0.0f;
#pragma unroll
  for (int i = 0; i < 64; i += 8) {
    const float4 factors = factors_of(keys.v, i / 4);
#pragma unroll
    for (int j = i; j < i + 8; ++j) {
      float& most = most_ev[tile::fragment_half(j)];
      if (s[j] != -kInfinity) most = fmaxf(most, factor_of(factors, j));
    }
  }
}

/// alpha of both rows, and the new maximum. `top` is the tile's largest score of each row. In a
/// tile that shows every row a key (kMasked false), m_new is finite and equal maxima give 2^0 = 1
/// by themselves.
template <class Config, bool kMasked>
__device__ __forceinline__ void raise_maximum(Rows<Config>& rows, const float (&top)[2],
                                              float (&alpha)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float m_new = fmaxf(rows.m[r], top[r]);
    alpha[r] = stages::rescale<DeviceOps>(rows.m[r], m_new);
    if (kMasked and m_new == rows.m[r]) alpha[r] = 1.0f;
    rows.m[r] = m_new;
  }
}

/// The first tile that a row sees sets its unit, which to_units() may raise. `differs`: rows whose
/// unit is another than c. A row that sees no key of the tile has T = 0 and sum 0, whatever the
/// exponents hold.
template <bool kMasked, class Config>
__device__ __forceinline__ void set_units(Rows<Config>& rows, const KeyTile& tile,
                                          const Exponent (&c)[2], bool (&differs)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const bool saw = not kMasked or sees_any(rows.visible(r), tile.begin);
    if (saw and rows.unit[r] == kNoUnit) rows.unit[r] = c[r].nan ? 0 : c[r].value;
    differs[r] = saw and rows.unit[r] != c[r].value;
  }
}

/// 2^change for a change that is not positive, or 0 where FP32 has no such normal number: what is
/// that far below a row's unit is less than its rounding; at 2^-126 it would be too large.
__device__ __forceinline__ float unit_change(int change) {
  constexpr int kZero = stages::kFactorExponentMin - 1;  // all bits of 2^kZero are 0
  return pow2(max(change, kZero));
}

/// Brings O and T to one unit, for rows whose unit differs: the larger one, since the other way O
/// overflows where a row sees tokens of zeros first. What O is multiplied with goes into alpha.
template <class Config, int kPartials>
__device__ __forceinline__ void to_units(Rows<Config>& rows, float (&t)[kPartials],
                                         const Exponent (&c)[2], const bool (&differs)[2],
                                         float (&alpha)[2]) {
  float scale[2] = {1.0f, 1.0f};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (not differs[r]) continue;
    if (not c[r].nan and c[r].value > rows.unit[r]) {
      alpha[r] = mul_rn(alpha[r], unit_change(rows.unit[r] - c[r].value));
      rows.unit[r] = c[r].value;
    } else {
      scale[r] = c[r].nan ? kNan : unit_change(c[r].value - rows.unit[r]);
    }
  }
#pragma unroll
  for (int i = 0; i < Config::kOutputs; ++i) t[i] = mul_rn(t[i], scale[tile::fragment_half(i)]);
}

/// l = l alpha + sum.
template <class Config>
__device__ __forceinline__ void promote_sums(Rows<Config>& rows, const float (&sum)[2],
                                             const float (&alpha)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) rows.l[r] = fma_rn(rows.l[r], alpha[r], sum[r]);
}

/// O = O alpha + T.
template <class Config, int kPartials>
__device__ __forceinline__ void promote(Rows<Config>& rows, const float (&t)[kPartials],
                                        const float (&alpha)[2]) {
#pragma unroll
  for (int i = 0; i < Config::kOutputs; ++i) {
    rows.o[i] = fma_rn(rows.o[i], alpha[tile::fragment_half(i)], t[i]);
  }
}

// ---- the step ---------------------------------------------------------------------------------

/// One tile. General steps give the same bits as the others for a row whose visible keys share EK
/// and EV: they multiply by powers of two, of scores before and of P behind its rounding places,
/// and these are 1, or are in rows.a, where exponents agree. The others need a scale >= 0, so that
/// the maximum of the scores is the score of the maximum. issue_next() issues the scores of the
/// tile that follows into s.
template <class Config, Step kStep, class IssueNext>
__device__ __forceinline__ void step(Rows<Config>& rows, float (&s)[64], const KeyTile& tile,
                                     const IssueNext& issue_next, int block,
                                     const ForwardParams& params, const Work& work) {
  constexpr bool kMasked = is_masked(kStep), kGeneral = is_general(kStep);
  constexpr int kQuarters = kStep == Step::kLowerMasked ? 2 : 4;  // of 32 keys
  constexpr int kScores = 16 * kQuarters;
  if constexpr (kGeneral) scale_scores<Config>(rows, s, *tile.factors, params.score_scale);
  float most_ev[2];
  const SeenColumns seen(rows.visible(0), rows.visible(1), tile.begin);
  if constexpr (kMasked) mask_scores<kScores / 2>(s, seen);
  if constexpr (kMasked and kGeneral) find_most_ev<Config>(s, *tile.factors, most_ev);
  // Four chains a row: one would wait for itself.
  float chain[2][4];
#pragma unroll
  for (int i = 0; i < kScores; ++i) {
    float& most = chain[tile::fragment_half(i)][2 * ((i >> 2) & 1) + (i & 1)];
    most = i < 8 ? s[i] : fmaxf(most, s[i]);
  }
  float top[2], alpha[2], addend[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float raw =
        tile::quad_max(fmaxf(fmaxf(chain[r][0], chain[r][1]), fmaxf(chain[r][2], chain[r][3])));
    top[r] = stages::score<DeviceOps>(raw, rows.a[r]);
    // 0 times infinity, where the softmax scale is 0.
    if (kMasked and raw == -kInfinity) top[r] = -kInfinity;
  }
  raise_maximum<Config, kMasked>(rows, top, alpha);
#pragma unroll
  for (int r = 0; r < 2; ++r) addend[r] = stages::forward_addend<DeviceOps>(rows.m[r]);

  // c of each row, and 2^-c.
  const Exponent tile_ev = Exponent::stored(TileFacts::ev(rows.tile_facts));
  Exponent c[2] = {tile_ev, tile_ev};
  float inverse_c[2];
  if constexpr (kGeneral) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if constexpr (kMasked) {
        const int value = static_cast<int>(bits_of(tile::quad_max(most_ev[r])) >> 23) - 127;
        c[r] = {value, value > stages::kTokenExponentMax};
      }
      // Any number will do for a NaN, which T is multiplied with.
      inverse_c[r] = stages::factor(-c[r].value);
    }
  }

  // P in quarters of 32 keys; each is multiplied as soon as it is packed. NOTE: with early scores
  // the codes keep their registers until T is there, which general steps do not have.
  constexpr bool kEarly = Config::kEarlyScores and not kGeneral;
  float t[kGeneral ? Config::kOutputs : Config::kOutputsAndSums];
  float sums[4];
  std::uint32_t codes[kQuarters][4];
  std::uint32_t weights[kQuarters][4];  // general steps: hs, and codes are h
#pragma unroll
  for (int g = 0; g < kQuarters; ++g) {
#pragma unroll
    for (int i = 16 * g; i < 16 * (g + 1); ++i) {
      const int r = tile::fragment_half(i);
      const bool masked = kMasked and kGeneral and s[i] == -kInfinity;
      s[i] = stages::probability<DeviceOps>(s[i], rows.a[r], addend[r]);
      if (masked) s[i] = 0.0f;
    }
    if constexpr (kGeneral) {
      tile::pack_operand(weights[g], s + 16 * g);
      issue_sums<Config>(sums, weights[g], tile, g);
#pragma unroll
      for (int i = 16 * g; i < 16 * (g + 1); i += 8) {
        const float4 factors = factors_of(tile.factors->v, i / 4);
#pragma unroll
        for (int j = i; j < i + 8; ++j) {
          const float fold = mul_rn(factor_of(factors, j), inverse_c[tile::fragment_half(j)]);
          // A masked weight stays 0 whatever its key holds; a seen NaN is in c as well.
          s[j] = kMasked and s[j] == 0.0f ? 0.0f : mul_rn(s[j], fold);
        }
      }
    }
    tile::pack_operand(codes[g], s + 16 * g);
    // 2^-inf is 0 by itself, but not where the score's factor or addend is NaN or infinite.
    if constexpr (kMasked and not kGeneral) seen.mask_codes(codes[g], g);
    // A dependency that is none: alpha, whose sign is 0, shall be formed beside the exponentials
    // and not where T waits for it.
    if (g == kQuarters - 1) codes[g][0] |= (bits_of(alpha[0]) | bits_of(alpha[1])) & kSign;
    issue_values<Config>(t, codes[g], tile, g);
    if constexpr (Config::kDump) {
      const DumpRows dump(params, work, block);
      for (int r = 0; r < 2; ++r) {
        const int key = tile.begin + 32 * g;
        dump.codes(params.dump.h, codes[g], rows.visible(r), r, key);
        dump.codes(params.dump.hs, kGeneral ? weights[g] : codes[g], rows.visible(r), r, key);
      }
    }
  }
  bool differs[2];
  set_units<kMasked>(rows, tile, c, differs);
  // The next scores are multiplied while T is added to O.
  if (kEarly) issue_next();
  ptx::wgmma_wait_group<kEarly ? 1 : 0>();
  ptx::pin(t);
  if constexpr (kGeneral) ptx::pin(sums);
  if (not kEarly) issue_next();
  if constexpr (kGeneral) {
    promote_sums(rows, {sums[0], sums[2]}, alpha);
  } else {
    promote_sums(rows, {t[Config::kOutputs], t[Config::kOutputs + 2]}, alpha);
  }
  if constexpr (Config::kDump) {
    const DumpRows dump(params, work, block);
    for (int r = 0; r < 2; ++r) {
      if (not sees_any(rows.visible(r), tile.begin)) continue;
      dump.tile(r, tile.begin / kKeyTile, alpha[r], rows.m[r]);
    }
  }
  if (differs[0] or differs[1]) to_units(rows, t, c, differs, alpha);
  promote(rows, t, alpha);
}

}  // namespace mxattn::kernels::sm90::forward
