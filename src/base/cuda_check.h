// One way to call the CUDA runtime: a failure becomes an Error with the call's text.
#pragma once

#include <cuda_runtime_api.h>

#include "base/error.h"

namespace mxattn::detail {

inline void check_cuda(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // said here, and not once more by whoever asks for the last error next
  throw Error(Status::kCuda,
              concat(call, ": ", cudaGetErrorName(status), " (", cudaGetErrorString(status), ")"));
}

}  // namespace mxattn::detail

#define MXATTN_CUDA_CHECK(call) ::mxattn::detail::check_cuda((call), #call)
