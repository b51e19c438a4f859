// A turn that passes between consumer warpgroups, so that one at a time is in its exponentials
// while the others multiply. Barriers kFirstTurn, kFirstTurn + 1, ... belong to it.
#pragma once

#include "ptx/barrier.h"

namespace mxattn::kernels::sm90 {

/// NOTE: the last warpgroup passes once before the first take; whoever leaves while holding a turn
/// that was passed to it takes it, so that no arrival is left over.
template <int kConsumers, int kFirstTurn>
struct Turn {
  static constexpr int kThreads = 128 * 2;  // one that passes, one that takes

  __device__ __forceinline__ static void take(int consumer) {
    ptx::named_barrier_sync(kFirstTurn + consumer, kThreads);
  }
  __device__ __forceinline__ static void pass(int consumer) {
    ptx::named_barrier_arrive(kFirstTurn + (consumer + 1) % kConsumers, kThreads);
  }
  /// At the start and at the end of a role.
  __device__ __forceinline__ static void open(int consumer) {
    if (consumer == kConsumers - 1) pass(consumer);
  }
  __device__ __forceinline__ static void close(int consumer) {
    if (consumer == 0) take(consumer);
  }
};

}  // namespace mxattn::kernels::sm90
