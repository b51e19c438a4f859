// The launch of a kernel whose CTAs stay and take items from a list.
#pragma once

#include <cuda_runtime_api.h>

#include "base/cuda_check.h"

namespace mxattn::kernels::sm90 {

/// Storage: what the kernel finds in dynamic shared memory. params.next_item is set to 0 first.
template <class Config, class Storage, class Params>
void launch_persistent(void (*kernel)(Params), const Params& params, int num_ctas,
                       cudaStream_t stream) {
  constexpr int kShared = sizeof(Storage);
  static_assert(kShared <= 232448, "a CTA has 227 KB of shared memory");
  MXATTN_CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared));
  MXATTN_CUDA_CHECK(cudaMemsetAsync(params.next_item, 0, sizeof(int), stream));
  kernel<<<num_ctas, Config::kThreads, kShared, stream>>>(params);
  MXATTN_CUDA_CHECK(cudaGetLastError());
}

}  // namespace mxattn::kernels::sm90
