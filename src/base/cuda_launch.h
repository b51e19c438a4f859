// Launches of kernels that overlap with the ends of those before them in the stream.
#pragma once

#include <cuda_runtime.h>

#include "base/cuda_check.h"

namespace mxattn {

/// Launches a kernel that may start while the grid before it still runs (CUDA C++ Programming
/// Guide, programmatic dependent launch). It calls ptx::wait_on_dependencies() before it touches
/// memory of the device, in every thread that does, and once in every CTA whatever the CTA does:
/// the grid after it takes its end for the end of all grids before.
template <class... Params, class... Args>
void launch_overlapping(void (*kernel)(Params...), dim3 grid, int threads, int shared_bytes,
                        cudaStream_t stream, const Args&... args) {
  cudaLaunchAttribute overlaps;
  overlaps.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlaps.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<std::size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = &overlaps;
  config.numAttrs = 1;
  MXATTN_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, args...));
}

}  // namespace mxattn
