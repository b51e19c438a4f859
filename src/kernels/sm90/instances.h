// Which instances of the kernels run a recipe and head dimension, and what they want of their
// caller.
#pragma once

#include <cuda_runtime_api.h>

#include "base/error.h"
#include "kernels/kernel.h"
#include "kernels/sm90/launch.h"
#include "recipe/recipe.h"

namespace mxattn::kernels::sm90 {

struct ForwardInstance {
  int dim;
  int rows;  // queries of an item (the list's tile) and of a box of Q
  void (*launch)(const ForwardParams& params, int num_ctas, cudaStream_t stream);
};

template <class Config>
inline constexpr ForwardInstance kForwardInstance = {
    .dim = Config::kDim,
    .rows = Config::kRows,
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

/// That of a problem which supports() has let pass.
inline const ForwardInstance& forward_of(const Problem& problem) {
  const ForwardInstance* const instance = find_forward(problem.recipe, problem.dim);
  MXATTN_CHECK(instance != nullptr, "no forward at head_dim = ", problem.dim);
  return *instance;
}

/// Both passes of a backward. Items are 128 keys and 128 queries.
struct BackwardInstance {
  int dim;
  DsScale ds_scale;
  bool monotone;  // whether it needs tables of exponents that never decrease within a document
  void (*launch_dkv)(const BackwardParams& params, int num_ctas, cudaStream_t stream);
  void (*launch_dq)(const BackwardParams& params, int num_ctas, cudaStream_t stream);
};

template <int kDim, DsScale kDsScale, bool kMonotone>
inline constexpr BackwardInstance kBackwardInstance = {
    .dim = kDim,
    .ds_scale = kDsScale,
    .monotone = kMonotone,
    .launch_dkv = launch_backward_dkv<DkvConfig<kDim, kDsScale>>,
    .launch_dq = launch_backward_dq<DqConfig<kDim, kMonotone, kDsScale>>,
};

/// Null where there is none.
inline const BackwardInstance* find_backward(const Recipe& recipe, int dim) {
  if (not forward_runs(recipe) or recipe.gradient != GradientOperand::kDividedByL) return nullptr;
  const bool monotone = recipe.scale_group == ScaleGroup::kRunning;
  for (const BackwardInstance* instance : {
           &kBackwardInstance<64, DsScale::kNorm, true>,
           &kBackwardInstance<128, DsScale::kNorm, true>,
           &kBackwardInstance<64, DsScale::kNorm, false>,
           &kBackwardInstance<128, DsScale::kNorm, false>,
           &kBackwardInstance<64, DsScale::kRow, true>,
           &kBackwardInstance<128, DsScale::kRow, true>,
       }) {
    if (instance->dim == dim and instance->ds_scale == recipe.ds_scale and
        instance->monotone == monotone) {
      return instance;
    }
  }
  return nullptr;
}

inline const BackwardInstance& backward_of(const Problem& problem) {
  const BackwardInstance* const instance = find_backward(problem.recipe, problem.dim);
  MXATTN_CHECK(instance != nullptr, "no backward at head_dim = ", problem.dim);
  return *instance;
}

}  // namespace mxattn::kernels::sm90
