// Packs and masks for the tests of this room.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <random>
#include <vector>

#include "pack/pack.h"

namespace mxattn::plan {

using Lengths = std::vector<int>;

inline Pack pack_of(const Lengths& q_lengths, const Lengths& k_lengths) {
  std::vector<std::int32_t> cu_q{0}, cu_k{0};
  for (const int length : q_lengths) cu_q.push_back(cu_q.back() + length);
  for (const int length : k_lengths) cu_k.push_back(cu_k.back() + length);
  return make_pack(cu_q, cu_k, cu_q.back(), cu_k.back());
}

inline Pack pack_of(const Lengths& lengths) { return pack_of(lengths, lengths); }

class Random {
 public:
  explicit Random(unsigned seed) : generator_(seed) {}
  int between(int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(generator_);
  }
  bool chance(double p) { return std::bernoulli_distribution(p)(generator_); }

  /// Lengths as packs have them: borders of tiles, zeros, and a long tail.
  int length(int longest) {
    static constexpr int kHard[] = {0, 1, 31, 63, 64, 65, 127, 128, 129, 191, 192, 255, 256, 257};
    if (chance(0.3)) return std::min(longest, kHard[between(0, std::size(kHard) - 1)]);
    return between(0, chance(0.8) ? longest / 8 : longest);
  }

  Mask mask() {
    Mask mask;
    mask.causal = chance(0.5);
    if (chance(0.4)) mask.window_left = chance(0.2) ? 0 : between(0, 600);
    if (chance(0.2)) mask.window_right = chance(0.2) ? 0 : between(0, 600);
    return mask;
  }

  /// Half of the packs have as many keys as queries; in the others a document may lack either.
  Pack pack(int documents, int longest) {
    Lengths q, k;
    const bool same = chance(0.5);
    for (int d = 0; d < documents; ++d) {
      q.push_back(length(longest));
      k.push_back(same ? q.back() : length(longest));
    }
    return pack_of(q, k);
  }

  template <class T, std::size_t N>
  T pick(const T (&values)[N]) {
    return values[between(0, static_cast<int>(N) - 1)];
  }

 private:
  std::mt19937 generator_;
};

}  // namespace mxattn::plan
