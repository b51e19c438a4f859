// FP16: to nearest even, subnormals kept, no saturation; NaN becomes 0x7FFF.
#pragma once

#include <cstdint>

#include "base/portability.h"
#include "formats/codec.h"

namespace mxattn {

MXATTN_HOST_DEVICE constexpr std::uint16_t float_to_fp16(float x) { return encode<Fp16>(x); }
MXATTN_HOST_DEVICE constexpr std::uint16_t double_to_fp16(double x) { return encode<Fp16>(x); }
MXATTN_HOST_DEVICE constexpr float fp16_to_float(std::uint16_t code) { return decode<Fp16>(code); }

MXATTN_HOST_DEVICE constexpr float round_fp16(float x) { return round_to<Fp16>(x); }
MXATTN_HOST_DEVICE constexpr double round_fp16(double x) { return round_to<Fp16>(x); }

}  // namespace mxattn
