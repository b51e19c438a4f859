// Exponents that a quantiser stores (section 2): of tokens, of running maxima, of norms.
#pragma once

#include <cstdint>

#include "base/numeric.h"
#include "formats/exponent.h"
#include "recipe/recipe.h"
#include "recipe/stages.h"

namespace mxattn::stages {

/// Exponent of a token, from the largest magnitude of its channels. Monotone, so a group's exponent
/// is the maximum of its tokens' exponents; NaN and Inf give 127, which every maximum keeps.
MXATTN_HOST_DEVICE constexpr int token_exponent(ExponentRule rule, float max_magnitude) {
  if (not(max_magnitude < kInfinity)) return kNanExponent;
  if (max_magnitude == 0) return kTokenExponentMin;
  const int e = rule == ExponentRule::kRoundUp ? round_up_exponent<E4M3>(max_magnitude)
                                               : floor_exponent<E4M3>(max_magnitude);
  return clamp_int(e, kTokenExponentMin, kTokenExponentMax);
}

/// E = 4 ceil(maximum / 4): what a running maximum of token exponents becomes. 127 stays.
MXATTN_HOST_DEVICE constexpr int running_exponent(int maximum) {
  static_assert(kTokenExponentMin % kRunningGrid == 0 and kTokenExponentMax % kRunningGrid == 0);
  if (maximum == kNanExponent) return kNanExponent;
  const int above_min = maximum - kTokenExponentMin;  // not negative: the division truncates
  return kTokenExponentMin + (above_min + kRunningGrid - 1) / kRunningGrid * kRunningGrid;
}

/// Least n with sqrt(sum_of_squares) 2^exponent <= 2^n, by the bits of the sum (normal or 0).
/// `exponent` is a number here, 127 too; NaN of the sum gives 127.
MXATTN_HOST_DEVICE constexpr int norm_exponent(float sum_of_squares, int exponent) {
  if (not(sum_of_squares < kInfinity)) return kNanExponent;
  if (sum_of_squares == 0) return kNormExponentMin;
  const std::uint32_t bits = bits_of(sum_of_squares);
  const int floor_log2 = static_cast<int>(bits >> 23) - 127;
  const int ceil_log2 = floor_log2 + ((bits & 0x7FFFFFu) != 0 ? 1 : 0);
  const int half = (ceil_log2 + 1) >> 1;  // rounds up; the shift is arithmetic
  return clamp_int(half + exponent, kNormExponentMin, kNormExponentMax);
}

/// Factor that brings the largest magnitude of a tensor to 448 (1 for a zero tensor). It stays
/// finite for tensors so small that 448 / amax is not.
MXATTN_HOST_DEVICE inline float tensor_scale(float amax) {
  if (amax == 0) return 1;
  const float scale = div_rn(E4M3::kMax, amax);
  return scale < pow2(kFactorExponentMax) ? scale : pow2(kFactorExponentMax);
}

}  // namespace mxattn::stages
