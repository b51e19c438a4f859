// Shapes of the dQ kernel of Hopper.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/sm90/backward.h"
#include "kernels/sm90/registers.h"
#include "recipe/recipe.h"
#include "recipe/stages.h"
#include "tile/swizzle.h"

namespace mxattn::kernels::sm90 {

/// One instance of the kernel. kMonotoneTables: exponents of keys never decrease within a document,
/// so that the ends of a tile tell whether it is uniform and the last of a range is its largest.
/// kDump: for tests, see CodeDump.
template <int kHeadDim, bool kMonotoneTables, DsScale kTheDsScale, bool kDump = false>
struct DqConfig {
  static constexpr int kDim = kHeadDim;
  static constexpr bool kMonotone = kMonotoneTables;
  static constexpr DsScale kDsScale = kTheDsScale;
  static constexpr bool kRowScale = kDsScale == DsScale::kRow;
  static constexpr bool kDumpCodes = kDump;
  // compute-sanitizer follows a barrier only from lane to lane, not by way of a warp's leader.
  static constexpr bool kEveryLaneArrives = kDump;
  static constexpr int kConsumers = 2;  // warpgroups, 64 queries each
  static constexpr int kRows = 64 * kConsumers;
  static constexpr int kStages = 2;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kConsumerRegisters = kDim == 64 ? 232 : 240;
  static constexpr int kProducerRegisters = kDim == 64 ? 40 : 24;

  static constexpr tile::Swizzle kRowSwizzle = tile::swizzle_of(kDim);      // of Q, G, K and V
  static constexpr tile::Swizzle kTransposedSwizzle = tile::Swizzle::k128;  // of K^T
  static constexpr int kOutputs = kDim / 2;                                 // registers of dQ

  static constexpr int kFloat4s = 64 * kDim / 4;  // of a warpgroup's FP32 sum, in shared memory

  static_assert(kDim == 64 or kDim == 128);
  static_assert(kDsScale == DsScale::kNorm or kDsScale == DsScale::kRow);
  static_assert(fits_register_pool(kConsumers, kConsumerRegisters, kProducerRegisters));
};

}  // namespace mxattn::kernels::sm90
