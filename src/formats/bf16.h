// BF16: to nearest even, no saturation; NaN becomes 0x7FFF.
#pragma once

#include <cstdint>

#include "base/portability.h"
#include "formats/codec.h"

namespace mxattn {

MXATTN_HOST_DEVICE constexpr std::uint16_t float_to_bf16(float x) { return encode<Bf16>(x); }
MXATTN_HOST_DEVICE constexpr std::uint16_t double_to_bf16(double x) { return encode<Bf16>(x); }
MXATTN_HOST_DEVICE constexpr float bf16_to_float(std::uint16_t code) { return decode<Bf16>(code); }

MXATTN_HOST_DEVICE constexpr float round_bf16(float x) { return round_to<Bf16>(x); }
MXATTN_HOST_DEVICE constexpr double round_bf16(double x) { return round_to<Bf16>(x); }

}  // namespace mxattn
