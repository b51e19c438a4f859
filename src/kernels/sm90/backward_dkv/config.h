// Shapes of the dK/dV kernel of Hopper.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/sm90/backward.h"
#include "kernels/sm90/registers.h"
#include "recipe/recipe.h"
#include "recipe/stages.h"
#include "tile/swizzle.h"

namespace mxattn::kernels::sm90 {

/// One instance of the kernel. It takes any table of exponents: those of queries are looked at one
/// by one, those of keys are a row's own. kDump: for tests, see CodeDump.
template <int kHeadDim, DsScale kTheDsScale, bool kDump = false>
struct DkvConfig {
  static constexpr int kDim = kHeadDim;
  static constexpr DsScale kDsScale = kTheDsScale;
  static constexpr bool kRowScale = kDsScale == DsScale::kRow;
  static constexpr bool kDumpCodes = kDump;
  // Statistics are handed back by one lane for its warp. Tools that look for races may not follow
  // that: for them, in instances for tests, every lane does.
  static constexpr bool kEveryLaneArrives = kDump;
  static constexpr int kConsumers = 2;  // warpgroups, 64 keys each
  static constexpr int kStages = 3;
  static constexpr int kStatsWarps = 3;  // of the producer warpgroup, each every third step
  static constexpr int kStatsStages = 6;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kConsumerRegisters = kDim == 64 ? 208 : 240;
  static constexpr int kProducerRegisters = kDim == 64 ? 88 : 24;

  static constexpr tile::Swizzle kRowSwizzle = tile::swizzle_of(kDim);     // of K, V, Q and G
  static constexpr tile::Swizzle kTransposedSwizzle = tile::Swizzle::k64;  // of Q^T and G^T
  static constexpr int kOutputs = kDim / 2;  // registers of dV and of dK

  // Where both sums do not fit into shared memory, that of dK does if every step is added to it.
  static constexpr bool kFit = sums_fit_shared(kDim);
  static constexpr SumPlace kDvSums = kFit ? SumPlace::kShared : SumPlace::kGlobal;
  static constexpr SumPlace kDkSums = kFit or kRowScale ? SumPlace::kShared : SumPlace::kGlobal;
  static constexpr int kFloat4s = 64 * kDim / 4;  // of a sum
  static constexpr int kSharedSums = kFit ? 2 : kRowScale ? 1 : 0;
  // What a warp has of shared memory for sums, and for its rows in the epilogue.
  static constexpr int kWarpFloat4s = (kSharedSums > 1 ? kSharedSums : 1) * kFloat4s / 4;

  static_assert(kDim == 64 or kDim == 128);
  static_assert(kDsScale == DsScale::kNorm or kDsScale == DsScale::kRow);
  static_assert(fits_register_pool(kConsumers, kConsumerRegisters, kProducerRegisters));
  static_assert(kStatsStages % kStatsWarps == 0, "a warp fills stages of its own");
};

}  // namespace mxattn::kernels::sm90
