// Launches of the Hopper kernels. All throw Error (kCuda); none allocates or waits.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/sm90/backward.h"
#include "kernels/sm90/forward/config.h"

namespace mxattn::kernels::sm90 {

/// Instances that are built: one for each recipe and head dimension (forward/instances/).
/// `num_ctas`: one a multiprocessor.
template <class Config>
void launch_forward(const ForwardParams& params, int num_ctas, cudaStream_t stream);

/// dK and dV; the items are tiles of 128 keys. params.sums: kSumBytesPerCta for each CTA.
void launch_backward_dkv(const BackwardParams& params, int num_ctas, cudaStream_t stream);

/// dQ; the items are 128 queries.
void launch_backward_dq(const BackwardParams& params, int num_ctas, cudaStream_t stream);

inline constexpr std::int64_t kSumBytesPerCta = 2 * 128 * 128 * 4;

}  // namespace mxattn::kernels::sm90
