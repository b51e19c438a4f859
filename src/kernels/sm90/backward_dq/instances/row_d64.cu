#include "kernels/sm90/backward_dq/launch.cuh"

namespace mxattn::kernels::sm90 {

template void launch_backward_dq<DqConfig<64, true, DsScale::kRow>>(const BackwardParams&, int,
                                                                    cudaStream_t);

}  // namespace mxattn::kernels::sm90
