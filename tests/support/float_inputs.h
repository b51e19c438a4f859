// Hard inputs for conversions to a narrow format: random bits, and values at and next to the places
// where the rounding turns.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

namespace mxattn::testing_support {

/// Random bits as a function of an index (SplitMix64).
constexpr std::uint64_t random_bits(std::uint64_t index) {
  std::uint64_t z = (index + 1) * 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

/// A normal number at a border between two roundings, one unit off it, or at a representable value.
/// Half of them are at the borders of Format, half at those of a mantissa shorter than Format's.
/// Exponents cover [low, high].
template <class Format, class Bits>
constexpr Bits border_bits(std::uint64_t random, int mantissa_bits, int bias, int low, int high) {
  const int exponent =
      low + static_cast<int>((random >> 8) % static_cast<unsigned>(high - low + 1));
  int kept = static_cast<int>(random % (Format::kMantissaBits + 1u));
  if ((random >> 62 & 1) != 0) {
    const int subnormal = exponent < 1 - Format::kBias ? 1 - Format::kBias - exponent : 0;
    kept = subnormal < Format::kMantissaBits ? Format::kMantissaBits - subnormal : 0;
  }
  const int dropped = mantissa_bits - kept;
  const Bits one = 1;
  const Bits half = one << (dropped - 1);
  const Bits tails[8] = {0, 1, half - 1, half, half, half + 1, (one << dropped) - 1, half};
  const Bits head = static_cast<Bits>(random >> 24) & ((one << kept) - 1);
  const Bits sign = static_cast<Bits>(random >> 63) << (sizeof(Bits) * 8 - 1);
  return sign | static_cast<Bits>(exponent + bias) << mantissa_bits | head << dropped |
         tails[random >> 59 & 7];
}

template <class Format>
constexpr int lowest_exponent() {
  const int low = 1 - Format::kBias - Format::kMantissaBits - 3;
  return low < -126 ? -126 : low;
}
template <class Format>
constexpr int highest_exponent() {
  return Format::kMaxExponent + 2 > 127 ? 127 : Format::kMaxExponent + 2;
}

/// `count` floats: even indices random bits (NaN, infinities and subnormals among them), odd ones
/// near the borders of Format.
template <class Format>
std::vector<float> format_inputs(int count) {
  std::vector<float> inputs(static_cast<std::size_t>(count));
  for (int i = 0; i < count; ++i) {
    const std::uint64_t random = random_bits(static_cast<std::uint64_t>(i));
    const std::uint32_t bits =
        i % 2 == 0 ? static_cast<std::uint32_t>(random >> 32)
                   : border_bits<Format, std::uint32_t>(random, 23, 127, lowest_exponent<Format>(),
                                                        highest_exponent<Format>());
    inputs[static_cast<std::size_t>(i)] = std::bit_cast<float>(bits);
  }
  return inputs;
}

/// The same in FP64, where a border plus one unit is lost by a rounding through FP32.
template <class Format>
std::vector<double> format_double_inputs(int count) {
  std::vector<double> inputs(static_cast<std::size_t>(count));
  for (int i = 0; i < count; ++i) {
    const std::uint64_t random = random_bits(static_cast<std::uint64_t>(i) + 0x100000000u);
    const std::uint64_t bits = i % 2 == 0 ? random
                                          : border_bits<Format, std::uint64_t>(
                                                random, 52, 1023, lowest_exponent<Format>() - 8,
                                                highest_exponent<Format>());
    inputs[static_cast<std::size_t>(i)] = std::bit_cast<double>(bits);
  }
  return inputs;
}

}  // namespace mxattn::testing_support
