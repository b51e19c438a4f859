// Stochastic rounding: the mean of the rounded values is the value.
//
// For neighbours a < |x| < b in the format, b is chosen if a 32-bit uniform u is below
// 2^32 (|x| - a) / (b - a), else a; the sign is put back. The probability is exact wherever at most
// 32 bits are dropped, and rounded down to a multiple of 2^-32 below that. Representable values
// never move; values beyond the largest saturate; NaN as in nearest rounding.
#pragma once

#include <cstdint>

#include "base/portability.h"
#include "base/rng.h"
#include "formats/codec.h"

namespace mxattn {

struct RoundStochastic {
  std::uint32_t uniform;

  MXATTN_HOST_DEVICE constexpr bool operator()(std::uint32_t /*quotient*/, std::uint32_t remainder,
                                               int shift) const {
    const std::uint64_t wide = remainder;
    const std::uint64_t threshold =
        shift <= 32 ? wide << (32 - shift) : (shift < 64 ? wide >> (shift - 32) : 0);
    return uniform < threshold;
  }
};

MXATTN_HOST_DEVICE constexpr std::uint8_t float_to_e4m3_stochastic(float x, std::uint32_t uniform) {
  return encode<E4M3>(x, RoundStochastic{uniform});
}
MXATTN_HOST_DEVICE constexpr std::uint8_t float_to_e5m2_stochastic(float x, std::uint32_t uniform) {
  return encode<E5M2>(x, RoundStochastic{uniform});
}
MXATTN_HOST_DEVICE constexpr std::uint8_t float_to_e2m1_stochastic(float x, std::uint32_t uniform) {
  return encode<E2M1>(x, RoundStochastic{uniform});
}

/// What a training step draws from: its seed and number.
struct DrawKey {
  std::uint32_t seed;
  std::uint32_t step;
};

/// The uniforms of channels 4 channel_group .. 4 channel_group + 3 of one token.
/// NOTE: count `token` from its document's start, or the bits of a document depend on where it lies
/// in the pack.
MXATTN_HOST_DEVICE constexpr PhiloxBlock draw_channels(DrawKey key, std::uint32_t tensor,
                                                       std::uint32_t head, std::uint32_t token,
                                                       std::uint32_t channel_group) {
  return philox4x32({{key.seed, key.step}}, {{tensor, head, token, channel_group}});
}

/// The uniform of one element.
MXATTN_HOST_DEVICE constexpr std::uint32_t draw(DrawKey key, std::uint32_t tensor,
                                                std::uint32_t head, std::uint32_t token,
                                                std::uint32_t channel) {
  return draw_channels(key, tensor, head, token, channel / 4).word[channel % 4];
}

}  // namespace mxattn
