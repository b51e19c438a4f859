// E8M0, the scale byte of MX blocks: a power of two by its biased exponent.
#pragma once

#include <bit>
#include <cstdint>

#include "base/numeric.h"
#include "base/portability.h"
#include "formats/exponent.h"
#include "formats/limits.h"

namespace mxattn {

/// The byte of 2^e; e is clamped to [-127, 127].
MXATTN_HOST_DEVICE constexpr std::uint8_t exponent_to_e8m0(int e) {
  return static_cast<std::uint8_t>(clamp_int(e, E8M0::kMinExponent, E8M0::kMaxExponent) +
                                   E8M0::kBias);
}

/// The exponent of a byte other than NaN.
MXATTN_HOST_DEVICE constexpr int e8m0_to_exponent(std::uint8_t code) { return code - E8M0::kBias; }

/// 2^(code - 127). Code 0 is a subnormal FP32: arithmetic that flushes subnormals sees 0.
MXATTN_HOST_DEVICE constexpr float e8m0_to_float(std::uint8_t code) {
  if (code == E8M0::kNanCode) return kNan;
  return std::bit_cast<float>(code == 0 ? 0x00400000u : static_cast<std::uint32_t>(code) << 23);
}

/// The least power of two that is at least |x|. Clamped: 0 gives code 0, infinity 0xFE; NaN is
/// kept.
MXATTN_HOST_DEVICE constexpr std::uint8_t float_to_e8m0_up(float x) {
  if (is_nan(x)) return E8M0::kNanCode;
  const detail::Normalised a = detail::normalise(x);
  return exponent_to_e8m0(a.exponent + (a.mantissa != 0 ? 1 : 0));
}

/// The greatest power of two that is at most |x|, clamped likewise.
MXATTN_HOST_DEVICE constexpr std::uint8_t float_to_e8m0_down(float x) {
  if (is_nan(x)) return E8M0::kNanCode;
  return exponent_to_e8m0(detail::normalise(x).exponent);
}

}  // namespace mxattn
