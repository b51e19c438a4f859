// One encoder and one decoder for every element format, by integer arithmetic on the bits.
//
// Integers make the result independent of the rounding mode, of flushed subnormals and of the
// compiler, and the same source gives the same bits on host and device. The named functions
// (float_to_e4m3, ...) lie in the header of each format.
#pragma once

#include <bit>
#include <cstdint>

#include "base/portability.h"
#include "formats/limits.h"

namespace mxattn {
namespace detail {

template <class Float>
struct FloatLayout;

template <>
struct FloatLayout<float> {
  using Bits = std::uint32_t;
  static constexpr int kMantissaBits = 23;
  static constexpr int kBias = 127;
};

template <>
struct FloatLayout<double> {
  using Bits = std::uint64_t;
  static constexpr int kMantissaBits = 52;
  static constexpr int kBias = 1023;
};

}  // namespace detail

/// To nearest, ties to the even code. `quotient` and `remainder` are of a significand divided by
/// 2^shift; true means: take quotient + 1.
struct RoundNearestEven {
  template <class Bits>
  MXATTN_HOST_DEVICE constexpr bool operator()(Bits quotient, Bits remainder, int shift) const {
    constexpr int kLargest = static_cast<int>(sizeof(Bits)) * 8 - 1;
    const Bits half = Bits{1} << ((shift < kLargest ? shift : kLargest) - 1);
    return remainder > half or (remainder == half and (quotient & 1) != 0);
  }
};

/// Rounds once, from Float straight to Format. Beyond the largest finite value: saturates or
/// becomes infinite, as the format says. NaN of either sign becomes the code with all magnitude
/// bits set (which in E2M1, a format without NaN, is +6), as the conversions of CUDA do. -0 stays
/// -0.
template <class Format, class Float, class Rounding = RoundNearestEven>
MXATTN_HOST_DEVICE constexpr typename Format::Code encode(Float x, Rounding rounding = {}) {
  using Layout = detail::FloatLayout<Float>;
  using Bits = typename Layout::Bits;
  using Code = typename Format::Code;
  constexpr int kSignShift = static_cast<int>(sizeof(Bits)) * 8 - 1;
  constexpr Bits kImplicitOne = Bits{1} << Layout::kMantissaBits;
  constexpr Bits kInfinityBits = (Bits{1} << kSignShift) - kImplicitOne;

  const Bits bits = std::bit_cast<Bits>(x);
  const Bits magnitude = bits & ~(Bits{1} << kSignShift);
  if (magnitude > kInfinityBits) return Format::kMagnitudeMask;

  // x = significand 2^(exponent - kMantissaBits)
  const int field = static_cast<int>(magnitude >> Layout::kMantissaBits);
  const Bits fraction = magnitude & (kImplicitOne - 1);
  const Bits significand = field == 0 ? fraction : (fraction | kImplicitOne);
  const int exponent = (field == 0 ? 1 : field) - Layout::kBias;

  // Bits to drop: what the narrower mantissa lacks, and more where x is subnormal in Format.
  constexpr int kLowestExponent = 1 - Format::kBias;
  const int lost = exponent < kLowestExponent ? kLowestExponent - exponent : 0;
  const int shift = Layout::kMantissaBits - Format::kMantissaBits + lost;
  // From this shift on the quotient is 0 and the remainder the whole significand.
  constexpr int kEmptyingShift = Layout::kMantissaBits + 1;
  const int bounded = shift < kEmptyingShift ? shift : kEmptyingShift;
  const Bits quotient = significand >> bounded;
  const Bits remainder = significand - (quotient << bounded);
  const Bits rounded = quotient + (rounding(quotient, remainder, shift) ? 1 : 0);

  // The implicit one of `rounded` adds 1 to the exponent field, a carry one more.
  const int base = exponent + lost - kLowestExponent;
  Bits code = rounded + (static_cast<Bits>(base) << Format::kMantissaBits);
  if (code > Format::kMaxCode) code = Format::kMaxCode + (Format::kSaturates ? 0 : 1);
  constexpr Code kSign = Format::kMagnitudeMask + 1;
  return static_cast<Code>(code | ((bits >> kSignShift) != 0 ? kSign : Code{0}));
}

/// Exact. Bits above the format's width are ignored. NaN codes give a quiet NaN.
template <class Format>
MXATTN_HOST_DEVICE constexpr float decode(typename Format::Code code) {
  constexpr int kDrop = 23 - Format::kMantissaBits;
  constexpr std::uint32_t kTopField = (1u << Format::kExponentBits) - 1;
  const std::uint32_t magnitude = code & Format::kMagnitudeMask;
  const std::uint32_t sign = (code & (Format::kMagnitudeMask + 1u)) != 0 ? 0x80000000u : 0u;
  const std::uint32_t field = magnitude >> Format::kMantissaBits;
  const std::uint32_t fraction = magnitude & ((1u << Format::kMantissaBits) - 1);

  std::uint32_t bits = 0;
  if (Format::kHasNan and magnitude > Format::kMaxCode + (Format::kHasInfinity ? 1u : 0u)) {
    bits = 0x7FC00000u;
  } else if (Format::kHasInfinity and field == kTopField) {
    bits = 0x7F800000u;
  } else if (Format::kBias == 127) {  // the exponent range of FP32: the same fields
    bits = magnitude << kDrop;
  } else if (field != 0) {
    bits = (field + (127 - Format::kBias)) << 23 | fraction << kDrop;
  } else {
    bits = std::bit_cast<std::uint32_t>(static_cast<float>(fraction) * Format::kMinSubnormal);
  }
  return std::bit_cast<float>(sign | bits);
}

/// The value of Format nearest to x, as encode() and decode() make it: one rounding.
template <class Format, class Float>
MXATTN_HOST_DEVICE constexpr Float round_to(Float x) {
  return static_cast<Float>(decode<Format>(encode<Format>(x)));
}

}  // namespace mxattn
