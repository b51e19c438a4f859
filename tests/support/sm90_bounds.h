// How far the Hopper backend may be from the CPU's model of it, and how often.
//
// Both see the same codes, accumulators, arguments of exponentials and maxima, bit for bit. They
// differ in 2^x alone: 2 ulp on the device, 1 ulp on the CPU. So a value that is rounded to E4M3
// differs by a relative kWeight at most, and its code by one step at most, and only if the value
// lies that close to a border between codes. Borders of normal codes lie 1/16 to 1/8 apart,
// relative to the value: with mantissas spread evenly the chance is at most 2 kWeight / (1/16).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "formats/fp8.h"
#include "quantize/quantize.h"
#include "support/attention_case.h"

namespace mxattn::test {

inline constexpr double kWeight = 3 * 0x1p-23;             // of one exponential
inline constexpr double kProduct = kWeight + 2 * 0x1p-24;  // and of one product formed from it
inline constexpr double kFlipChance = 2 * 16 * kProduct;   // of one code
inline constexpr double kLargestStep = 32;                 // between codes of E4M3
inline constexpr double kLargestCode = 448;
inline constexpr double kRelativeStep = 0x1p-3;  // of a normal code
// A row has 2^-16 flips a code on average: more than these in one row are not believed.
inline constexpr double kMostFlips = 4;

/// Rows that differ, against the number that flips explain.
struct FlipCount {
  const char* name;
  std::int64_t rows = 0;
  std::int64_t differing = 0;
  double expected = 0;  // upper bound of the mean

  void add(double codes, bool differs) {
    ++rows;
    differing += differs ? 1 : 0;
    expected += std::min(1.0, codes * kFlipChance);
  }
  /// Beyond it a Poisson count of this mean lies with probability below 10^-8.
  double most() const { return expected + 6 * std::sqrt(expected) + 6; }
};

/// Largest magnitudes of the restored values of each key: (heads, slots).
inline std::vector<double> row_maxima(const Operand& x) {
  std::vector<double> most(static_cast<std::size_t>(x.heads * x.slots));
  for (int head = 0; head < x.heads; ++head) {
    for (std::int64_t slot = 0; slot < x.slots; ++slot) {
      std::uint8_t largest = 0;
      for (int c = 0; c < x.dim; ++c) {
        largest = std::max<std::uint8_t>(largest, x.row(head, slot)[c] & 0x7F);
      }
      most[static_cast<std::size_t>(head * x.slots + slot)] =
          std::ldexp(e4m3_to_float(largest), x.exponents_of(head)[slot]);
    }
  }
  return most;
}

}  // namespace mxattn::test
