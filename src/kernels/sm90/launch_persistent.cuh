// The launch of a kernel whose CTAs stay and take items from a list.
#pragma once

#include <cuda_runtime_api.h>

#include "base/cuda_launch.h"

namespace mxattn::kernels::sm90 {

/// Storage: what the kernel finds in dynamic shared memory. *params.next_item must be 0.
template <class Config, class Storage, class Params>
void launch_persistent(void (*kernel)(Params), const Params& params, int num_ctas,
                       cudaStream_t stream) {
  constexpr int kShared = sizeof(Storage);
  static_assert(kShared <= 232448, "a CTA has 227 KB of shared memory");
  MXATTN_CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared));
  launch_overlapping(kernel, dim3(static_cast<unsigned>(num_ctas)), Config::kThreads, kShared,
                     stream, params);
}

}  // namespace mxattn::kernels::sm90
