// The CUDA toolkit's conversions under one name per direction. On the host they are the toolkit's
// own C++; on a device the hardware's instructions where it has them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp4.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "base/portability.h"
#include "formats/limits.h"

namespace mxattn::toolkit {

template <class Format>
struct Conversion;

template <>
struct Conversion<E4M3> {
  MXATTN_HOST_DEVICE static std::uint8_t encode(float x) {
    return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
  }
  MXATTN_HOST_DEVICE static float decode(std::uint8_t code) {
    return __half2float(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3)));
  }
};

template <>
struct Conversion<E5M2> {
  MXATTN_HOST_DEVICE static std::uint8_t encode(float x) {
    return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E5M2);
  }
  MXATTN_HOST_DEVICE static float decode(std::uint8_t code) {
    return __half2float(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E5M2)));
  }
};

template <>
struct Conversion<E2M1> {
  MXATTN_HOST_DEVICE static std::uint8_t encode(float x) {
    return __nv_cvt_float_to_fp4(x, __NV_E2M1, cudaRoundNearest);
  }
  MXATTN_HOST_DEVICE static float decode(std::uint8_t code) {
    return __half2float(__half(__nv_cvt_fp4_to_halfraw(code, __NV_E2M1)));
  }
};

template <>
struct Conversion<Fp16> {
  MXATTN_HOST_DEVICE static std::uint16_t encode(float x) {
    return __half_as_ushort(__float2half_rn(x));
  }
  MXATTN_HOST_DEVICE static float decode(std::uint16_t code) {
    return __half2float(__ushort_as_half(code));
  }
};

template <>
struct Conversion<Bf16> {
  MXATTN_HOST_DEVICE static std::uint16_t encode(float x) {
    return __bfloat16_as_ushort(__float2bfloat16_rn(x));
  }
  MXATTN_HOST_DEVICE static float decode(std::uint16_t code) {
    return __bfloat162float(__ushort_as_bfloat16(code));
  }
};

/// Scales: the least power of two not below |x|, and the greatest not above.
template <>
struct Conversion<E8M0> {
  MXATTN_HOST_DEVICE static std::uint8_t encode_up(float x) {
    return __nv_cvt_float_to_e8m0(x, __NV_SATFINITE, cudaRoundPosInf);
  }
  MXATTN_HOST_DEVICE static std::uint8_t encode_down(float x) {
    return __nv_cvt_float_to_e8m0(x, __NV_SATFINITE, cudaRoundZero);
  }
  MXATTN_HOST_DEVICE static float decode(std::uint8_t code) {
    return __bfloat162float(__nv_bfloat16(__nv_cvt_e8m0_to_bf16raw(code)));
  }
};

}  // namespace mxattn::toolkit
