// Counter-based random numbers: Philox4x32-10.
//
// A draw is a pure function of key and counter, so it can depend on the position of an element
// alone: no state, no order, the same bits on every backend and in every rerun.
// Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
#pragma once

#include <cstdint>

#include "base/portability.h"

namespace mxattn {

struct PhiloxKey {
  std::uint32_t word[2];
};

/// A counter, or the 128 random bits made from one.
struct PhiloxBlock {
  std::uint32_t word[4];
};

MXATTN_HOST_DEVICE constexpr PhiloxBlock philox4x32(PhiloxKey key, PhiloxBlock counter) {
  constexpr std::uint64_t kMultiplier0 = 0xD2511F53;
  constexpr std::uint64_t kMultiplier1 = 0xCD9E8D57;
  constexpr std::uint32_t kWeyl0 = 0x9E3779B9;  // golden ratio
  constexpr std::uint32_t kWeyl1 = 0xBB67AE85;  // sqrt(3) - 1
  constexpr int kRounds = 10;
  for (int round = 0; round < kRounds; ++round) {
    const std::uint64_t product0 = kMultiplier0 * counter.word[0];
    const std::uint64_t product1 = kMultiplier1 * counter.word[2];
    counter = {{static_cast<std::uint32_t>(product1 >> 32) ^ counter.word[1] ^ key.word[0],
                static_cast<std::uint32_t>(product1),
                static_cast<std::uint32_t>(product0 >> 32) ^ counter.word[3] ^ key.word[1],
                static_cast<std::uint32_t>(product0)}};
    key = {{key.word[0] + kWeyl0, key.word[1] + kWeyl1}};
  }
  return counter;
}

}  // namespace mxattn
