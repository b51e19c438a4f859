// Approximate exponentials and conversions.
#pragma once

#include <cstdint>

namespace mxattn::ptx {

/// 2^x, at most 2 ulp, subnormal inputs and results flushed to 0. PTX ISA 9.7.3.21 ex2.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// log2(x), absolute error 2^-22.6 near 1, else relative 2^-22.6. PTX ISA 9.7.3.20 lg2.
__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// 1 / x, at most 1 ulp, subnormal inputs and results flushed to 0. PTX ISA 9.7.3.13 rcp.
__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// Larger and smaller of two; NaN if either is. PTX ISA 9.7.3.11 max, 9.7.3.12 min.
__device__ __forceinline__ float max_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
__device__ __forceinline__ float min_nan(float a, float b) {
  float y;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

/// The larger of a and |b|; NaN if either is. PTX ISA 9.7.3.11 max.
__device__ __forceinline__ float max_magnitude(float a, float b) {
  float y;
  asm("{\n.reg .f32 magnitude;\n"
      "abs.f32 magnitude, %2;\n"
      "max.NaN.f32 %0, %1, magnitude;\n}\n"
      : "=f"(y)
      : "f"(a), "f"(b));
  return y;
}

/// Four floats to E4M3, nearest even, saturating, NaN to 0x7F; a lies in byte 0.
/// PTX ISA 9.7.9.21 cvt.
__device__ __forceinline__ std::uint32_t to_e4m3x4(float a, float b, float c, float d) {
  std::uint32_t codes;
  asm("{\n.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}\n"
      : "=r"(codes)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return codes;
}

/// Two E4M3 codes, the low byte first, to floats. PTX ISA 9.7.9.21 cvt.
__device__ __forceinline__ void from_e4m3x2(std::uint16_t codes, float& low, float& high) {
  asm("{\n.reg .b32 pair;\n.reg .b16 a, b;\n"
      "cvt.rn.f16x2.e4m3x2 pair, %2;\n"
      "mov.b32 {a, b}, pair;\n"
      "cvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\n}\n"
      : "=f"(low), "=f"(high)
      : "h"(codes));
}

/// Bytes of {b, a} picked by the four low nibbles of `selector`. PTX ISA 9.7.9.7 prmt.
__device__ __forceinline__ std::uint32_t permute_bytes(std::uint32_t a, std::uint32_t b,
                                                       std::uint32_t selector) {
  std::uint32_t result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(selector));
  return result;
}

/// Two floats to FP16, nearest even; `low` lies in the low half. PTX ISA 9.7.9.21 cvt.
__device__ __forceinline__ std::uint32_t to_fp16x2(float low, float high) {
  std::uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

/// Two FP16, the low half first, to floats.
__device__ __forceinline__ void from_fp16x2(std::uint32_t pair, float& low, float& high) {
  asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\n}\n"
      : "=f"(low), "=f"(high)
      : "r"(pair));
}

/// To FP16, nearest even, and back. PTX ISA 9.7.9.21 cvt.
__device__ __forceinline__ float round_fp16(float x) {
  float y;
  asm("{\n.reg .b16 half;\ncvt.rn.f16.f32 half, %1;\ncvt.f32.f16 %0, half;\n}\n"
      : "=f"(y)
      : "f"(x));
  return y;
}

/// Two floats to BF16, nearest even; `low` lies in the low half. PTX ISA 9.7.9.21 cvt.
__device__ __forceinline__ std::uint32_t to_bf16x2(float low, float high) {
  std::uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

}  // namespace mxattn::ptx
