// FP32 arithmetic of the device, for the templates of recipe/stages.h.
#pragma once

#include "base/numeric.h"
#include "ptx/math.h"

namespace mxattn::kernels::sm90 {

struct DeviceOps {
  using F = float;
  __device__ __forceinline__ static float set(float x) { return x; }
  __device__ __forceinline__ static float add(float a, float b) { return add_rn(a, b); }
  __device__ __forceinline__ static float sub(float a, float b) { return add_rn(a, -b); }
  __device__ __forceinline__ static float mul(float a, float b) { return mul_rn(a, b); }
  __device__ __forceinline__ static float fma(float a, float b, float c) { return fma_rn(a, b, c); }
  __device__ __forceinline__ static float sub_from_product(float a, float b, float c) {
    return fma_rn(a, b, -c);
  }
  // NOTE: device code builds with -ftz=true, so every operation has flushed already.
  __device__ __forceinline__ static float flush(float x) { return x; }
  __device__ __forceinline__ static float round_fp16(float x) { return ptx::round_fp16(x); }
  __device__ __forceinline__ static float exp2(float x) { return ptx::exp2_approx(x); }
  __device__ __forceinline__ static float log2(float x) { return ptx::log2_approx(x); }
};

}  // namespace mxattn::kernels::sm90
