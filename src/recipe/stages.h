// The stages of the recipes: every constant, scale, order and rounding place said once.
//
// Source of the formulas: docs/numerics.md (section numbers below are its). Kernels call these
// functions and write no formula of their own. A stage that works on floating-point values takes an
// arithmetic `Ops`, so that the FP64 oracle, the scalar FP32 code, SIMD code and device code
// evaluate the same expression:
//
//   Ops::F                 the value type (double, float, a vector of floats)
//   Ops::add/sub/mul       one rounding each (none that matters in FP64)
//   Ops::fma(a, b, c)      a b + c with one rounding
//   Ops::exp2(x), log2(x)  FP32: results below 2^-126 are flushed to 0
//   Ops::flush(x)          FP32: x, or 0 where |x| < 2^-126 (an operation with .ftz)
//   Ops::set(float)        a constant
//
// Those formulas are in formulas.inc, whose text is included here and once for every SIMD target.
//
// Index letters: i query, j key, t key tile, s query step of 64; exponents are base 2.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/numeric.h"
#include "base/portability.h"

namespace mxattn::stages {

// ---- constants -------------------------------------------------------------------------------

inline constexpr double kLog2E = 1.4426950408889634074;
inline constexpr double kLn2 = 0.69314718055994530942;

inline constexpr int kTokenExponentMin = -96;  // a zero token counts as this
inline constexpr int kTokenExponentMax = 96;
inline constexpr int kNanExponent = 127;  // a token that holds NaN or Inf; its codes are 0
inline constexpr int kRunningGrid = 4;    // running exponents are multiples of this
inline constexpr int kNormExponentMin = -96;
inline constexpr int kNormExponentMax = 126;
inline constexpr int kScoreExponentMin = -100;  // of EQ + EK
inline constexpr int kScoreExponentMax = 96;
inline constexpr int kFactorExponentMin = -126;  // of every factor 2^e that is formed
inline constexpr int kFactorExponentMax = 127;

inline constexpr int kProbabilityShift = 8;  // P is held as E4M3(2^8 p)
inline constexpr int kDsHeadroom = 8;        // E4M3 reaches 2^8 and a bit
inline constexpr int kDsSlack = 2;           // bits by which the scale of dS undercuts its bound
inline constexpr int kChunkSpread = 6;       // beyond it c and r are taken per query tile
inline constexpr float kFp16Max = 65504.0f;  // D' is clamped to it
inline constexpr float kFp16Integers = 2048.0f;  // FP16 holds all integers up to it
inline constexpr int kDqDeltaExponent = 126;     // D'' is clamped to +-2^126

inline constexpr int kBlockTokens = 32;  // mxfp8: tokens that share an exponent
inline constexpr int kKeyTile = 128;     // keys of a tile, counted from the document's start
inline constexpr int kQueryTile = 128;   // queries of a tile
inline constexpr int kQueryStep = 64;    // queries of a step of the dK/dV pass
inline constexpr int kMmaDepth = 32;     // elements contracted by one 8-bit MMA (k32 step)
// Documents start at multiples of this in operand buffers.
inline constexpr int kSlotAlignment = 16;

/// Slots of the groups that hold so many tokens.
MXATTN_HOST_DEVICE constexpr int whole_groups(int tokens) {
  return (tokens + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment;
}

// ---- exponents that may be NaN ---------------------------------------------------------------

/// An exponent or a sum of exponents. `nan` is tested before any clamp or sum: what is formed from
/// a token holding NaN is NaN, whatever is added to it.
struct Exponent {
  int value = 0;
  bool nan = false;

  Exponent() = default;
  MXATTN_HOST_DEVICE constexpr Exponent(int v, bool is_nan = false) : value(v), nan(is_nan) {}
  /// From a stored byte, in which 127 means NaN.
  MXATTN_HOST_DEVICE static constexpr Exponent stored(std::int8_t byte) {
    return {byte, byte == kNanExponent};
  }
  MXATTN_HOST_DEVICE constexpr Exponent operator-() const { return {-value, nan}; }
  MXATTN_HOST_DEVICE friend constexpr Exponent operator+(Exponent a, Exponent b) {
    return {a.value + b.value, a.nan or b.nan};
  }
  MXATTN_HOST_DEVICE friend constexpr Exponent operator-(Exponent a, Exponent b) { return a + -b; }
  MXATTN_HOST_DEVICE friend constexpr Exponent max(Exponent a, Exponent b) {
    return {a.value > b.value ? a.value : b.value, a.nan or b.nan};
  }
  constexpr bool operator==(const Exponent&) const = default;
};

/// 2^e with e clamped to [-126, 127]; NaN of a NaN exponent.
MXATTN_HOST_DEVICE constexpr float factor(Exponent e) {
  return e.nan ? kNan : pow2(clamp_int(e.value, kFactorExponentMin, kFactorExponentMax));
}

// ---- scores (sections 3 and 4) ----------------------------------------------------------------

/// rn(log2(e) softmax_scale): scores leave the softmax in log2 units.
inline float score_scale(float softmax_scale) {
  return static_cast<float>(kLog2E * static_cast<double>(softmax_scale));
}

/// a = score_scale 2^(EQ + EK), the sum clamped to [-100, 96].
MXATTN_HOST_DEVICE inline float score_factor(float score_scale, Exponent eq, Exponent ek) {
  const Exponent e = eq + ek;
  if (e.nan) return kNan;
  return mul_rn(score_scale, pow2(clamp_int(e.value, kScoreExponentMin, kScoreExponentMax)));
}

// ---- forward (section 3) ----------------------------------------------------------------------

/// 2^(c - 8): turns the tile's partial sum T = sum h cV into a part of O.
MXATTN_HOST_DEVICE constexpr float output_factor(Exponent c) {
  return factor(c - kProbabilityShift);
}

// ---- chunks (section 2.5): [0,128), [128,512), [512,2048), then 2048 each ---------------------

MXATTN_HOST_DEVICE constexpr int chunk_of(int token) {
  return token < 128 ? 0 : token < 512 ? 1 : 2 + token / 2048;
}
MXATTN_HOST_DEVICE constexpr int chunk_begin(int chunk) {
  return chunk == 0 ? 0 : chunk == 1 ? 128 : chunk == 2 ? 512 : (chunk - 2) * 2048;
}
MXATTN_HOST_DEVICE constexpr int chunk_end(int chunk) { return chunk_begin(chunk + 1); }

// ---- backward: the dK/dV pass (section 4) -----------------------------------------------------

/// Scales that hold for all queries of a chunk (or of one query tile, where the chunk spreads).
struct ChunkScales {
  Exponent a{-400};  // max of nG + EQ + nO over tokens with O != 0
  Exponent b{-400};  // max of nG + EQ
  Exponent c{-400};  // max of eG
};

/// An r that 2^r can be formed of: tokens of zeros in Q and K, whose exponent is -96, bring it
/// lower.
MXATTN_HOST_DEVICE constexpr Exponent ds_exponent(Exponent bound) {
  const Exponent r = bound - (kDsHeadroom + kDsSlack);
  return {r.value < kFactorExponentMin ? kFactorExponentMin : r.value, r.nan};
}

/// r of dS 2^(EQ - r) for keys whose tile has norm exponent nV_T.
MXATTN_HOST_DEVICE constexpr Exponent ds_exponent_dk(const ChunkScales& scales, Exponent nv_tile) {
  return ds_exponent(max(scales.a, scales.b + nv_tile));
}

/// The addend of t = 2^(acc a - mu + eG - c + 8), an integer.
MXATTN_HOST_DEVICE constexpr Exponent dkv_addend(std::int32_t mu, Exponent eg, Exponent c) {
  return Exponent(-mu + kProbabilityShift) + eg - c;
}

/// F = 2^(c - 8 + EV + EQ - r).
MXATTN_HOST_DEVICE constexpr float dkv_gradient_factor(Exponent c, Exponent ev, Exponent eq,
                                                       Exponent r) {
  return factor(c - kProbabilityShift + ev + eq - r);
}

/// The factor of D' = D 2^(c - 8 - eG + EQ - r). D' is then rounded to FP16 and clamped.
MXATTN_HOST_DEVICE constexpr float dkv_delta_factor(Exponent c, Exponent eg, Exponent eq,
                                                    Exponent r) {
  return factor(c - kProbabilityShift - eg + eq - r);
}

/// D' of one query: D times dkv_delta_factor, rounded once to FP16, clamped, NaN kept. For scalars.
template <class Ops>
MXATTN_HOST_DEVICE typename Ops::F dkv_delta(typename Ops::F d, typename Ops::F delta_factor) {
  const typename Ops::F x = Ops::round_fp16(Ops::mul(d, delta_factor));
  return x > kFp16Max ? kFp16Max : (x < -kFp16Max ? -kFp16Max : x);
}

/// Places where an accumulator is added to the FP32 sum and starts afresh: in every period of so
/// many 64-query steps, counted from the document's start, one step; half 0 is keys 0-63 of the key
/// tile, half 1 keys 64-127.
inline constexpr int kPromotionSteps = 32;
MXATTN_HOST_DEVICE constexpr int dv_promotion(int half) { return half == 0 ? 7 : 23; }
MXATTN_HOST_DEVICE constexpr int dk_promotion(int half) { return half == 0 ? 15 : 31; }
MXATTN_HOST_DEVICE constexpr bool promotes_dv(int step, int half) {
  return step % kPromotionSteps == dv_promotion(half);
}
MXATTN_HOST_DEVICE constexpr bool promotes_dk(int step, int half) {
  return step % kPromotionSteps == dk_promotion(half);
}

/// Whether the FP32 sum of an accumulator has begun before step i of an item of keys: whether one
/// that is promoted at `place` of the period, and where another query head begins, was so. The item
/// walks `steps` steps from `begin` on for each head; i counts over all heads. Its first step
/// promotes nothing.
MXATTN_HOST_DEVICE constexpr bool was_promoted(int place, int begin, int steps, int i) {
  const int first = (place - begin - 1) & (kPromotionSteps - 1);  // counted from the second step
  return i > steps or first < i - 1;
}

// ---- backward: the dQ pass (section 4) --------------------------------------------------------

/// r_i of a row and key chunk: nv = running maximum of nV over the chunk up to its last key
/// visible to the row, ek that key's exponent.
MXATTN_HOST_DEVICE constexpr Exponent ds_exponent_dq(Exponent ng, Exponent no, Exponent nv,
                                                     Exponent ek) {
  return ds_exponent(ng + max(no, nv) + ek);
}

/// f of dS 2^(EK - r) = 2^(acc a - mu + f) (acc' - D'').
MXATTN_HOST_DEVICE constexpr Exponent dq_addend(std::int32_t mu, Exponent eg, Exponent ev,
                                                Exponent ek, Exponent r) {
  return Exponent(-mu) + eg + ev + ek - r;
}

/// D'' = D 2^-(eG + EV), clamped to +-2^126, NaN kept: a zero V token (EV = -96) reaches 2^110.
MXATTN_HOST_DEVICE inline float dq_delta(float d, Exponent eg, Exponent ev) {
  const float x = mul_rn(d, factor(-(eg + ev)));
  const float limit = pow2(kDqDeltaExponent);
  return x > limit ? limit : (x < -limit ? -limit : x);
}

/// `tile` counts key tiles from the document's start; half 0 is rows 0-63 of the query tile.
MXATTN_HOST_DEVICE constexpr bool promotes_dq(int tile, int half) {
  return tile % 16 == (half == 0 ? 7 : 15);
}

// ---- what recipes other than the canonical one need -------------------------------------------

inline constexpr float kLazyThreshold = 4.0f;         // RowReference::kLazy4, log2 units
inline constexpr float kTensorForwardPScale = 28.0f;  // 448 / 16
inline constexpr float kTensorBackwardPScale = 448.0f;

// ---- formulas over an arithmetic ---------------------------------------------------------------

#include "recipe/formulas.inc"

}  // namespace mxattn::stages
