// The Hopper backend: attention of the folded FP8 recipes as launches on a stream.
//
//   forward    quantise Q, K, V -> list -> forward kernel -> rows outside documents
//   backward   g = dO / L; transposed Q, K; scales -> lists -> dK/dV -> dQ -> rows outside
//
// Counters are cleared before the first kernel of a call. From there on each kernel starts while
// the one before it ends (base/cuda_launch.h), but for those that make lists.
#pragma once

#include "kernels/device.h"

namespace mxattn::kernels::sm90 {

const DeviceBackend& backend();

}  // namespace mxattn::kernels::sm90
