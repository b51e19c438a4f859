#include "kernels/sm90/backward_dkv/launch.cuh"

namespace mxattn::kernels::sm90 {

template void launch_backward_dkv<DkvConfig<64, DsScale::kRow>>(const BackwardParams&, int,
                                                                cudaStream_t);

}  // namespace mxattn::kernels::sm90
