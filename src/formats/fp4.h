// E2M1: to nearest even, saturating; two codes a byte, the even index in the low nibble.
//
// NOTE: the format has no NaN: NaN becomes +6, as on hardware. A quantiser must find non-finite
// values itself and make the block scale NaN.
#pragma once

#include <cstdint>

#include "base/portability.h"
#include "formats/codec.h"

namespace mxattn {

/// A code in the low four bits.
MXATTN_HOST_DEVICE constexpr std::uint8_t float_to_e2m1(float x) { return encode<E2M1>(x); }
MXATTN_HOST_DEVICE constexpr std::uint8_t double_to_e2m1(double x) { return encode<E2M1>(x); }
/// Reads the low four bits only.
MXATTN_HOST_DEVICE constexpr float e2m1_to_float(std::uint8_t code) { return decode<E2M1>(code); }

MXATTN_HOST_DEVICE constexpr float round_e2m1(float x) { return round_to<E2M1>(x); }
MXATTN_HOST_DEVICE constexpr double round_e2m1(double x) { return round_to<E2M1>(x); }

/// The byte that holds the codes of elements 2i (`even`) and 2i + 1 (`odd`).
MXATTN_HOST_DEVICE constexpr std::uint8_t pack_e2m1(std::uint8_t even, std::uint8_t odd) {
  return static_cast<std::uint8_t>((even & 0xFu) | (odd & 0xFu) << 4);
}

/// The code of element `index`, of which only the parity matters, of its byte.
MXATTN_HOST_DEVICE constexpr std::uint8_t unpack_e2m1(std::uint8_t byte, int index) {
  return static_cast<std::uint8_t>((index & 1) != 0 ? byte >> 4 : byte & 0xFu);
}

}  // namespace mxattn
