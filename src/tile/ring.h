// A ring of shared-memory stages between a producer and its consumers.
#pragma once

#include <cstdint>

#include "ptx/barrier.h"

namespace mxattn::tile {

/// Where a role stands in a ring of kStages: the stage and the parity of its present phase.
template <int kStages>
struct RingPosition {
  int stage = 0;
  std::uint32_t parity = 0;

  /// Where a role stands that has been through `count` stages: where a ring turns rarely, a count
  /// serves several of them.
  __device__ __forceinline__ static RingPosition after(std::uint32_t count) {
    return {static_cast<int>(count % kStages), (count / kStages) & 1};
  }
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

/// Waits until the phase of that parity is complete. Debug builds trap after about a second
/// instead of hanging the device.
__device__ __forceinline__ void wait_phase(std::uint32_t barrier, std::uint32_t parity) {
#if defined(MXATTN_DEVICE_DEBUG)
  const long long start = clock64();
  while (not ptx::mbarrier_try_wait(barrier, parity)) {
    if (clock64() - start > 2'000'000'000ll) __trap();
  }
#else
  while (not ptx::mbarrier_try_wait(barrier, parity)) {
  }
#endif
}

/// Barriers of a ring: `full` counts the producer's arrival and its bytes, `empty` the consumers'.
template <int kStages>
struct RingBarriers {
  alignas(8) std::uint64_t full[kStages];
  alignas(8) std::uint64_t empty[kStages];

  __device__ __forceinline__ void initialise(std::uint32_t consumer_arrivals,
                                             std::uint32_t producer_arrivals = 1) {
    for (int s = 0; s < kStages; ++s) {
      ptx::mbarrier_init(ptx::shared_address(&full[s]), producer_arrivals);
      ptx::mbarrier_init(ptx::shared_address(&empty[s]), consumer_arrivals);
    }
  }
  __device__ __forceinline__ std::uint32_t full_at(int stage) const {
    return ptx::shared_address(&full[stage]);
  }
  __device__ __forceinline__ std::uint32_t empty_at(int stage) const {
    return ptx::shared_address(&empty[stage]);
  }
  /// The producer may fill the stage.
  __device__ __forceinline__ void wait_empty(RingPosition<kStages> at) const {
    // A fresh barrier counts its phase of parity 1 as complete: the first round does not wait.
    wait_phase(empty_at(at.stage), at.parity ^ 1);
  }
  __device__ __forceinline__ void wait_full(RingPosition<kStages> at) const {
    wait_phase(full_at(at.stage), at.parity);
  }
};

}  // namespace mxattn::tile
