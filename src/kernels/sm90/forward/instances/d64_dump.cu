#include "kernels/sm90/forward/launch.cuh"

namespace mxattn::kernels::sm90 {

template void launch_forward<WithDump<ForwardConfig<64>>>(const ForwardParams&, int, cudaStream_t);

}  // namespace mxattn::kernels::sm90
