#include "kernels/sm90/forward/launch.cuh"
#include "recipe/registry.h"

namespace mxattn::kernels::sm90 {

template void launch_forward<ForwardConfig<128, recipes::fp8>>(const ForwardParams&, int,
                                                               cudaStream_t);

}  // namespace mxattn::kernels::sm90
