// Definition of launch_backward_dq, for the files of instances/.
#pragma once

#include "kernels/sm90/backward_dq/kernel.cuh"
#include "kernels/sm90/launch.h"
#include "kernels/sm90/launch_persistent.cuh"

namespace mxattn::kernels::sm90 {

template <class Config>
void launch_backward_dq(const BackwardParams& params, int num_ctas, cudaStream_t stream) {
  launch_persistent<Config, dq::SharedStorage<Config>>(dq::dq_kernel<Config>, params, num_ctas,
                                                       stream);
}

}  // namespace mxattn::kernels::sm90
