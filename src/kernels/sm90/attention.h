// The Hopper backend: attention of recipe fp8 as launches on a stream.
//
//   forward    quantise Q, K, V -> list -> forward kernel -> rows outside documents
//   backward   transposed Q, K; g = dO / L; scales -> lists -> dK/dV -> dQ -> rows outside
#pragma once

#include "kernels/device.h"

namespace mxattn::kernels::sm90 {

const DeviceBackend& backend();

}  // namespace mxattn::kernels::sm90
