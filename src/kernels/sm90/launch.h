// Launches of the Hopper kernels. All throw Error (kCuda); none allocates or waits.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/sm90/backward.h"
#include "kernels/sm90/backward_dkv/config.h"
#include "kernels/sm90/backward_dq/config.h"
#include "kernels/sm90/forward/config.h"

namespace mxattn::kernels::sm90 {

/// The items are Config::kRows queries. Instances: forward/instances/. `num_ctas`: one a
/// multiprocessor.
template <class Config>
void launch_forward(const ForwardParams& params, int num_ctas, cudaStream_t stream);

/// dK and dV; the items are tiles of 128 keys. Instances: backward_dkv/instances/.
/// params.sums: sum_bytes_per_cta() for each CTA.
template <class Config>
void launch_backward_dkv(const BackwardParams& params, int num_ctas, cudaStream_t stream);

/// dQ; the items are 128 queries. Instances: backward_dq/instances/.
template <class Config>
void launch_backward_dq(const BackwardParams& params, int num_ctas, cudaStream_t stream);

inline constexpr std::int64_t kSumBytesPerCta = sum_bytes_per_cta(128);  // of any instance

}  // namespace mxattn::kernels::sm90
