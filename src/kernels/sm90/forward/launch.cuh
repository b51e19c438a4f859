// Definition of launch_forward, for the files of instances/.
#pragma once

#include "kernels/sm90/forward/kernel.cuh"
#include "kernels/sm90/launch.h"
#include "kernels/sm90/launch_persistent.cuh"

namespace mxattn::kernels::sm90 {

template <class Config>
void launch_forward(const ForwardParams& params, int num_ctas, cudaStream_t stream) {
  launch_persistent<Config, forward::SharedStorage<Config>>(forward::forward_kernel<Config>, params,
                                                            num_ctas, stream);
}

}  // namespace mxattn::kernels::sm90
