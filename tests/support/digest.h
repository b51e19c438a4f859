// FNV-1a over numbers: one word that stands for a long list of results.
#pragma once

#include <cstdint>

namespace mxattn::testing_support {

class Digest {
 public:
  /// Takes the low `bytes` bytes of `value`, lowest first.
  constexpr void add(std::uint64_t value, int bytes) {
    for (int i = 0; i < bytes; ++i) {
      hash_ = (hash_ ^ ((value >> (8 * i)) & 0xFF)) * 0x100000001B3u;
    }
  }
  constexpr std::uint64_t value() const { return hash_; }

 private:
  std::uint64_t hash_ = 0xCBF29CE484222325u;
};

}  // namespace mxattn::testing_support
