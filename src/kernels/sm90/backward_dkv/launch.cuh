// Definition of launch_backward_dkv, for the files of instances/.
#pragma once

#include "kernels/sm90/backward_dkv/kernel.cuh"
#include "kernels/sm90/launch.h"
#include "kernels/sm90/launch_persistent.cuh"

namespace mxattn::kernels::sm90 {

template <class Config>
void launch_backward_dkv(const BackwardParams& params, int num_ctas, cudaStream_t stream) {
  launch_persistent<Config, dkv::SharedStorage<Config>>(dkv::dkv_kernel<Config>, params, num_ctas,
                                                        stream);
}

}  // namespace mxattn::kernels::sm90
