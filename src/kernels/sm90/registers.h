// Register budgets of warp-specialised kernels.
#pragma once

namespace mxattn::kernels::sm90 {

inline constexpr int kRegistersPerSm = 65536;

/// Whether consumer warpgroups can rise to `consumer` registers a thread once the producer
/// warpgroup has sunk to `producer`. setmaxnreg.inc waits for the CTA's own pool, which is what the
/// launch gave it: a budget that does not fit hangs the device.
constexpr bool fits_register_pool(int num_consumers, int consumer, int producer) {
  const int threads = 128 * (num_consumers + 1);
  const int at_launch = kRegistersPerSm / threads / 8 * 8;
  return 128 * (num_consumers * consumer + producer) <= at_launch * threads;
}

}  // namespace mxattn::kernels::sm90
