// The element formats as data: field widths, limits and special codes.
//
// A code is sign, exponent, mantissa from the top, `kMagnitudeMask` everything but the sign. Every
// limit of a format that other rooms need is read from here.
#pragma once

#include <cstdint>

namespace mxattn {

/// FP8 for forward operands (OCP OFP8, "fn"): no infinity, one NaN a sign.
struct E4M3 {
  using Code = std::uint8_t;
  static constexpr int kExponentBits = 4;
  static constexpr int kMantissaBits = 3;
  static constexpr int kBias = 7;
  static constexpr int kMaxExponent = 8;  // floor(log2 kMax)
  static constexpr float kMax = 448.0f;
  static constexpr float kMinNormal = 0x1p-6f;
  static constexpr float kMinSubnormal = 0x1p-9f;
  static constexpr Code kMagnitudeMask = 0x7F;
  static constexpr Code kMaxCode = 0x7E;
  static constexpr bool kHasNan = true;
  static constexpr bool kHasInfinity = false;
  static constexpr bool kSaturates = true;  // conversion to the format clamps to kMax
};

/// FP8 with the exponent range of FP16. It has infinities; our conversions saturate all the same.
struct E5M2 {
  using Code = std::uint8_t;
  static constexpr int kExponentBits = 5;
  static constexpr int kMantissaBits = 2;
  static constexpr int kBias = 15;
  static constexpr int kMaxExponent = 15;
  static constexpr float kMax = 57344.0f;
  static constexpr float kMinNormal = 0x1p-14f;
  static constexpr float kMinSubnormal = 0x1p-16f;
  static constexpr Code kMagnitudeMask = 0x7F;
  static constexpr Code kMaxCode = 0x7B;
  static constexpr bool kHasNan = true;
  static constexpr bool kHasInfinity = true;
  static constexpr bool kSaturates = true;
};

/// FP4: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; nothing else.
struct E2M1 {
  using Code = std::uint8_t;
  static constexpr int kExponentBits = 2;
  static constexpr int kMantissaBits = 1;
  static constexpr int kBias = 1;
  static constexpr int kMaxExponent = 2;
  static constexpr float kMax = 6.0f;
  static constexpr float kMinNormal = 1.0f;
  static constexpr float kMinSubnormal = 0.5f;
  static constexpr Code kMagnitudeMask = 0x7;
  static constexpr Code kMaxCode = 0x7;
  static constexpr bool kHasNan = false;
  static constexpr bool kHasInfinity = false;
  static constexpr bool kSaturates = true;
};

struct Fp16 {
  using Code = std::uint16_t;
  static constexpr int kExponentBits = 5;
  static constexpr int kMantissaBits = 10;
  static constexpr int kBias = 15;
  static constexpr int kMaxExponent = 15;
  static constexpr float kMax = 65504.0f;
  static constexpr float kMinNormal = 0x1p-14f;
  static constexpr float kMinSubnormal = 0x1p-24f;
  static constexpr Code kMagnitudeMask = 0x7FFF;
  static constexpr Code kMaxCode = 0x7BFF;
  static constexpr bool kHasNan = true;
  static constexpr bool kHasInfinity = true;
  static constexpr bool kSaturates = false;
};

struct Bf16 {
  using Code = std::uint16_t;
  static constexpr int kExponentBits = 8;
  static constexpr int kMantissaBits = 7;
  static constexpr int kBias = 127;
  static constexpr int kMaxExponent = 127;
  static constexpr float kMax = 0x1.FEp127f;
  static constexpr float kMinNormal = 0x1p-126f;
  static constexpr float kMinSubnormal = 0x1p-133f;
  static constexpr Code kMagnitudeMask = 0x7FFF;
  static constexpr Code kMaxCode = 0x7F7F;
  static constexpr bool kHasNan = true;
  static constexpr bool kHasInfinity = true;
  static constexpr bool kSaturates = false;
};

/// Scale of a block: 2^(code - 127). No sign, no zero, no infinity.
struct E8M0 {
  using Code = std::uint8_t;
  static constexpr int kBias = 127;
  static constexpr int kMinExponent = -127;  // code 0x00: subnormal as an FP32
  static constexpr int kMaxExponent = 127;   // code 0xFE
  static constexpr Code kNanCode = 0xFF;
};

}  // namespace mxattn
