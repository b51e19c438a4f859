// Which instance of the forward runs a recipe and head dimension, and what it wants of its caller.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/sm90/forward/config.h"
#include "kernels/sm90/launch.h"

namespace mxattn::kernels::sm90 {

struct ForwardInstance {
  int dim;
  int rows;                   // queries of an item (the list's tile) and of a box of Q
  tile::Swizzle row_swizzle;  // of the boxes of Q and K
  void (*launch)(const ForwardParams& params, int num_ctas, cudaStream_t stream);
};

template <class Config>
inline constexpr ForwardInstance kForwardInstance = {
    .dim = Config::kDim,
    .rows = Config::kRows,
    .row_swizzle = Config::kRowSwizzle,
    .launch = launch_forward<Config>,
};

/// Null where there is none.
inline const ForwardInstance* find_forward(const Recipe& recipe, int dim) {
  if (not forward_runs(recipe)) return nullptr;
  for (const ForwardInstance* instance :
       {&kForwardInstance<ForwardConfig<64>>, &kForwardInstance<ForwardConfig<128>>}) {
    if (instance->dim == dim) return instance;
  }
  return nullptr;
}

}  // namespace mxattn::kernels::sm90
