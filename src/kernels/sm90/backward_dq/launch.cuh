// Definition of launch_backward_dq, for the files of instances/.
#pragma once

#include "base/cuda_check.h"
#include "kernels/sm90/backward_dq/kernel.cuh"
#include "kernels/sm90/launch.h"

namespace mxattn::kernels::sm90 {

template <class Config>
void launch_backward_dq(const BackwardParams& params, int num_ctas, cudaStream_t stream) {
  const auto kernel = dq::dq_kernel<Config>;
  constexpr int kShared = sizeof(dq::SharedStorage<Config>);
  static_assert(kShared <= 232448, "a CTA has 227 KB of shared memory");
  MXATTN_CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared));
  MXATTN_CUDA_CHECK(cudaMemsetAsync(params.next_item, 0, sizeof(int), stream));
  kernel<<<num_ctas, Config::kThreads, kShared, stream>>>(params);
  MXATTN_CUDA_CHECK(cudaGetLastError());
}

}  // namespace mxattn::kernels::sm90
