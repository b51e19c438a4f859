// Host side of launches: what the quantisers' kernels are instantiated for.
#pragma once

#include <cuda_runtime_api.h>

#include "base/cuda_launch.h"
#include "base/error.h"
#include "quantize/cuda/tile.cuh"

namespace mxattn::cuda {

/// body(Layout<dim>{}).
template <class Body>
void with_layout(int dim, const Body& body) {
  MXATTN_CHECK(dim == 64 or dim == 128, "dim ", dim, ": the quantisers take 64 and 128");
  if (dim == 64) {
    body(Layout<64>{});
  } else {
    body(Layout<128>{});
  }
}

}  // namespace mxattn::cuda
