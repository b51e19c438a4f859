// Bits of floats, exactly rounded operations, and powers of two.
//
// Every rounding of the library is written out: add_rn, mul_rn and fma_rn say that one rounding to
// nearest-even happens there. Host code builds with -ffp-contract=off, so that no compiler fuses
// what we kept apart, and on a device the intrinsics forbid it.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "base/portability.h"

namespace mxattn {

inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
inline constexpr float kInfinity = std::numeric_limits<float>::infinity();

MXATTN_HOST_DEVICE constexpr std::uint32_t bits_of(float x) {
  return std::bit_cast<std::uint32_t>(x);
}
MXATTN_HOST_DEVICE constexpr float float_of(std::uint32_t bits) {
  return std::bit_cast<float>(bits);
}

MXATTN_HOST_DEVICE inline float add_rn(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

MXATTN_HOST_DEVICE inline float mul_rn(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

MXATTN_HOST_DEVICE inline float fma_rn(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return std::fma(a, b, c);
#endif
}

MXATTN_HOST_DEVICE inline float div_rn(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

MXATTN_HOST_DEVICE constexpr int clamp_int(int x, int low, int high) {
  return x < low ? low : (x > high ? high : x);
}

/// 2^e for e in [-126, 127], by bits.
MXATTN_HOST_DEVICE constexpr float pow2(int e) {
  return float_of(static_cast<std::uint32_t>(e + 127) << 23);
}

MXATTN_HOST_DEVICE constexpr bool is_nan(float x) { return x != x; }

}  // namespace mxattn
