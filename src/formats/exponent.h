// Which power of two scales a group of values, from the FP32 bits of its largest magnitude.
//
// No logarithm and no division: log2 of a value next to a power of two, or the quotient of a value
// next to the format's maximum, can fall on the wrong side; bits cannot.
#pragma once

#include <bit>
#include <cstdint>

#include "base/portability.h"
#include "formats/limits.h"

namespace mxattn {
namespace detail {

/// x = (1 + mantissa 2^-23) 2^exponent.
struct Normalised {
  int exponent;
  std::uint32_t mantissa;
};

/// Of |x|; subnormal FP32 values are normalised too, whatever the flush mode.
MXATTN_HOST_DEVICE constexpr Normalised normalise(float x) {
  constexpr std::uint32_t kMantissaMask = 0x7FFFFF;
  std::uint32_t bits = std::bit_cast<std::uint32_t>(x) & 0x7FFFFFFFu;
  int offset = -127;
  if (bits <= kMantissaMask) {  // a multiple of 2^-149: an integer that a float holds exactly
    bits = std::bit_cast<std::uint32_t>(static_cast<float>(bits));
    offset -= 149;
  }
  return {static_cast<int>(bits >> 23) + offset, bits & kMantissaMask};
}

}  // namespace detail

/// Round-up rule: the least e with max_magnitude 2^-e <= Format::kMax, so nothing saturates.
/// Not clamped. 0 gives -276 - Format::kMaxExponent, below what any other value gives; NaN and
/// infinity give a number without meaning: the caller tests for them.
template <class Format>
MXATTN_HOST_DEVICE constexpr int round_up_exponent(float max_magnitude) {
  const detail::Normalised a = detail::normalise(max_magnitude);
  const detail::Normalised limit = detail::normalise(Format::kMax);
  return a.exponent - limit.exponent + (a.mantissa > limit.mantissa ? 1 : 0);
}

/// Floor rule (OCP MX v1.0): floor(log2 max_magnitude) - floor(log2 Format::kMax); values up to
/// 2^(kMaxExponent + 1) / kMax times too large saturate. Not clamped; 0 as in round_up_exponent.
template <class Format>
MXATTN_HOST_DEVICE constexpr int floor_exponent(float max_magnitude) {
  return detail::normalise(max_magnitude).exponent - Format::kMaxExponent;
}

}  // namespace mxattn
