// E4M3 and E5M2: to nearest even, saturating (infinities too); NaN becomes 0x7F; -0 is kept.
#pragma once

#include <cstdint>

#include "base/portability.h"
#include "formats/codec.h"

namespace mxattn {

MXATTN_HOST_DEVICE constexpr std::uint8_t float_to_e4m3(float x) { return encode<E4M3>(x); }
MXATTN_HOST_DEVICE constexpr std::uint8_t double_to_e4m3(double x) { return encode<E4M3>(x); }
MXATTN_HOST_DEVICE constexpr float e4m3_to_float(std::uint8_t code) { return decode<E4M3>(code); }

MXATTN_HOST_DEVICE constexpr float round_e4m3(float x) { return round_to<E4M3>(x); }
MXATTN_HOST_DEVICE constexpr double round_e4m3(double x) { return round_to<E4M3>(x); }

MXATTN_HOST_DEVICE constexpr std::uint8_t float_to_e5m2(float x) { return encode<E5M2>(x); }
MXATTN_HOST_DEVICE constexpr std::uint8_t double_to_e5m2(double x) { return encode<E5M2>(x); }
MXATTN_HOST_DEVICE constexpr float e5m2_to_float(std::uint8_t code) { return decode<E5M2>(code); }

MXATTN_HOST_DEVICE constexpr float round_e5m2(float x) { return round_to<E5M2>(x); }
MXATTN_HOST_DEVICE constexpr double round_e5m2(double x) { return round_to<E5M2>(x); }

}  // namespace mxattn
