// The exponent rules against their definitions, and what they promise a quantiser.
#include "formats/exponent.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <vector>

#include "base/numeric.h"
#include "formats/e8m0.h"
#include "formats/fp4.h"
#include "formats/fp8.h"
#include "support/float_inputs.h"

namespace mxattn {
namespace {

/// Positive finite FP32 values: every exponent with the mantissas where a rule may turn, subnormals
/// of every length, and random ones.
std::vector<float> magnitudes() {
  std::vector<float> values;
  for (std::uint32_t field = 0; field < 255; ++field) {
    for (const std::uint32_t mantissa : {0x0u, 0x1u, 0x3FFFFFu, 0x400000u, 0x400001u, 0x5FFFFFu,
                                         0x600000u, 0x600001u, 0x7FFFFEu, 0x7FFFFFu}) {
      values.push_back(float_of(field << 23 | mantissa));
    }
  }
  for (int bit = 0; bit < 23; ++bit) {
    for (const std::uint32_t low : {0u, 1u, (1u << bit) / 2, 3 * (1u << bit) / 4}) {
      values.push_back(float_of(1u << bit | (low & ((1u << bit) - 1))));
    }
  }
  for (std::uint64_t i = 0; i < 200'000; ++i) {
    values.push_back(
        float_of(static_cast<std::uint32_t>(testing_support::random_bits(i)) & 0x7FFFFFFFu));
  }
  std::erase_if(values, [](float x) { return x == 0 or not std::isfinite(x); });
  return values;
}

template <class Format>
class ExponentRule : public testing::Test {};
using Formats = testing::Types<E4M3, E5M2, E2M1>;
TYPED_TEST_SUITE(ExponentRule, Formats);

// FP64 holds kMax 2^e exactly for every e that occurs, so these comparisons are exact.
TYPED_TEST(ExponentRule, BitEqualDefinition) {
  using Format = TypeParam;
  for (const float a : magnitudes()) {
    const int up = round_up_exponent<Format>(a);
    ASSERT_LE(a, std::ldexp(double{Format::kMax}, up)) << std::hexfloat << a;
    ASSERT_GT(a, std::ldexp(double{Format::kMax}, up - 1)) << std::hexfloat << a;

    const int floor = floor_exponent<Format>(a) + Format::kMaxExponent;
    ASSERT_GE(a, std::ldexp(1.0, floor)) << std::hexfloat << a;
    ASSERT_LT(a, std::ldexp(1.0, floor + 1)) << std::hexfloat << a;
    ASSERT_EQ(round_up_exponent<Format>(-a), up);
  }
}

TYPED_TEST(ExponentRule, ZeroIsBelowEverything) {
  using Format = TypeParam;
  EXPECT_EQ(round_up_exponent<Format>(0.0f), -276 - Format::kMaxExponent);
  EXPECT_EQ(floor_exponent<Format>(0.0f), -276 - Format::kMaxExponent);
  EXPECT_LT(round_up_exponent<Format>(0.0f), floor_exponent<Format>(0x1p-149f));
}

TEST(ExponentRule, BitEqualVectors) {
  EXPECT_EQ(round_up_exponent<E4M3>(448.0f), 0);
  EXPECT_EQ(round_up_exponent<E4M3>(448.0001f), 1);
  EXPECT_EQ(round_up_exponent<E4M3>(460.0f), 1);
  EXPECT_EQ(round_up_exponent<E4M3>(896.0f), 1);
  EXPECT_EQ(round_up_exponent<E4M3>(900.0f), 2);
  EXPECT_EQ(round_up_exponent<E2M1>(6.0f), 0);
  EXPECT_EQ(round_up_exponent<E2M1>(std::nextafter(6.0f, 7.0f)), 1);
  EXPECT_EQ(floor_exponent<E4M3>(511.0f), 0);
  EXPECT_EQ(floor_exponent<E4M3>(512.0f), 1);
  // log2 rounds this value's logarithm up to 9; its bits do not.
  EXPECT_EQ(std::log2(std::nextafter(512.0f, 0.0f)), 9.0f);
  EXPECT_EQ(floor_exponent<E4M3>(std::nextafter(512.0f, 0.0f)), 0);
}

struct Quantised {
  int exponent;
  float code;
  float restored;
  bool operator==(const Quantised&) const = default;
};

/// The first value of a group whose largest magnitude is `max`.
Quantised quantise(float value, int exponent) {
  const float code = round_e4m3(std::ldexp(value, -exponent));
  return {exponent, code, std::ldexp(code, exponent)};
}

TEST(ExponentRule, CodeEqualGroups) {
  const auto floor = [](float x, float max) { return quantise(x, floor_exponent<E4M3>(max)); };
  const auto up = [](float x, float max) { return quantise(x, round_up_exponent<E4M3>(max)); };
  EXPECT_EQ(floor(460, 460), (Quantised{0, 448, 448}));
  EXPECT_EQ(floor(460, 900), (Quantised{1, 224, 448}));
  EXPECT_EQ(floor(480, 480), (Quantised{0, 448, 448}));
  EXPECT_EQ(floor(480, 900), (Quantised{1, 240, 480}));
  EXPECT_EQ(floor(500, 500), (Quantised{0, 448, 448}));
  EXPECT_EQ(floor(500, 1000), (Quantised{1, 256, 512}));
  EXPECT_EQ(up(460, 460), (Quantised{1, 224, 448}));
  EXPECT_EQ(up(460, 900), (Quantised{2, 112, 448}));
  EXPECT_EQ(up(480, 480), (Quantised{1, 240, 480}));
  EXPECT_EQ(up(480, 900), (Quantised{2, 120, 480}));
  EXPECT_EQ(up(500, 500), (Quantised{1, 256, 512}));
  EXPECT_EQ(up(500, 1000), (Quantised{2, 128, 512}));
}

TEST(E8m0, CodeEqualEveryCode) {
  for (int code = 0; code < 255; ++code) {
    const auto byte = static_cast<std::uint8_t>(code);
    const double value = std::ldexp(1.0, code - 127);
    ASSERT_EQ(e8m0_to_float(byte), value);
    ASSERT_EQ(e8m0_to_exponent(byte), code - 127);
    ASSERT_EQ(exponent_to_e8m0(code - 127), byte);
    ASSERT_EQ(float_to_e8m0_up(e8m0_to_float(byte)), byte);
    ASSERT_EQ(float_to_e8m0_down(e8m0_to_float(byte)), byte);
  }
  EXPECT_TRUE(is_nan(e8m0_to_float(E8M0::kNanCode)));
  EXPECT_EQ(float_to_e8m0_up(kNan), E8M0::kNanCode);
  EXPECT_EQ(float_to_e8m0_up(kInfinity), 0xFE);
  EXPECT_EQ(float_to_e8m0_up(0.0f), 0x00);
  EXPECT_EQ(exponent_to_e8m0(-1000), 0x00);
  EXPECT_EQ(exponent_to_e8m0(1000), 0xFE);
}

TEST(E8m0, CodeEqualBothDirections) {
  for (const float x : magnitudes()) {
    const double value = x;
    const int down = std::clamp(std::ilogb(value), -127, 127);
    const int up = std::clamp(
        std::ilogb(value) + (std::ldexp(1.0, std::ilogb(value)) < value ? 1 : 0), -127, 127);
    ASSERT_EQ(float_to_e8m0_down(-x), down + 127) << std::hexfloat << x;
    ASSERT_EQ(float_to_e8m0_up(x), up + 127) << std::hexfloat << x;
  }
}

// ---- what went wrong elsewhere ----------------------------------------------------------------

// An all-zero block, or a tiny tensor-wide factor, must not make the NaN byte of an NVFP4 scale:
// the conversion saturates, so the largest byte is 0x7E whatever the quotient.
TEST(QuantiserEdges, CodeEqualScaleOfZeroAndTinyBlocks) {
  const auto scale_byte = [](float block_max, float tensor_max) {
    const float factor = tensor_max / (E2M1::kMax * E4M3::kMax);
    return float_to_e4m3(block_max / E2M1::kMax / factor);
  };
  EXPECT_EQ(scale_byte(1.0f, 1.0f), 0x7E);
  EXPECT_EQ(scale_byte(0.0f, 1.0f), 0x00);
  EXPECT_EQ(scale_byte(1.0f, 1e-30f), 0x7E);          // the quotient is far beyond the format
  EXPECT_EQ(scale_byte(1.0f, 0.0f), 0x7E);            // and here infinite
  EXPECT_EQ(float_to_e4m3(0.0f / E2M1::kMax), 0x00);  // without a tensor-wide factor
}

// Rows of zeros and rows next to zero restore to finite values, with the clamp that callers apply.
TEST(QuantiserEdges, CodeEqualZeroAndTinyRows) {
  constexpr int kLowest = -96;
  for (const float a : {0.0f, 0x1p-149f, 0x1p-126f, 1e-30f}) {
    const int e = std::max(round_up_exponent<E4M3>(a), kLowest);
    const std::uint8_t code = float_to_e4m3(mul_rn(a, pow2(-e)));
    const float restored = mul_rn(e4m3_to_float(code), pow2(e));
    EXPECT_TRUE(std::isfinite(restored));
    EXPECT_LE(std::abs(restored - a), E4M3::kMinSubnormal * pow2(e) / 2 + a / 16);
    if (a == 0) {
      EXPECT_EQ(code, 0);
    }
  }
}

// 512 blocks of 32: an exponent rounded to nearest clips a block's largest value by up to
// 1 - 2^-1/2, rounding up costs no more than E4M3 itself, 2^-4 of the value and its neighbour.
TEST(QuantiserEdges, BoundedLossOfTheBlockMaximum) {
  double worst_up = 0;
  double worst_nearest = 0;
  for (std::uint64_t block = 0; block < 512; ++block) {
    const float size =
        (1 + static_cast<float>(block) / 512) * pow2(static_cast<int>(block % 40) - 20);
    float a = 0;
    for (std::uint64_t i = 0; i < 32; ++i) {
      const std::uint64_t random = testing_support::random_bits(block * 32 + i);
      const float uniform = static_cast<float>(random >> 40) * 0x1p-24f;
      a = std::max(a, uniform * size);
    }
    const int nearest = static_cast<int>(std::floor(std::log2(double{a} / E4M3::kMax) + 0.5));
    const auto loss = [a](int e) { return std::abs(quantise(a, e).restored - a) / double{a}; };
    worst_up = std::max(worst_up, loss(round_up_exponent<E4M3>(a)));
    worst_nearest = std::max(worst_nearest, loss(nearest));
  }
  EXPECT_LE(worst_up, 1.0 / 17);
  EXPECT_GT(worst_up, 0.05);      // the blocks are hard for E4M3
  EXPECT_GT(worst_nearest, 0.2);  // and for the other rule
  EXPECT_LE(worst_nearest, 1 - std::sqrt(0.5) + 1e-9);
}

// Small activations cast without a scale sink into the subnormals of E4M3; with a scale every value
// in the format's normal range keeps its relative bound.
TEST(QuantiserEdges, BoundedCastWithAndWithoutScale) {
  constexpr double kNormalBound = 1.0 / 17;  // (2^-4) / (1 + 2^-4)
  constexpr int kCount = 10'000;
  std::vector<float> values;
  float a = 0;
  for (std::uint64_t i = 0; i < kCount; ++i) {
    double sum = 0;  // twelve uniforms: near to normal
    for (std::uint64_t j = 0; j < 12; ++j) {
      sum += static_cast<double>(testing_support::random_bits(12 * i + j) >> 11) * 0x1p-53;
    }
    values.push_back(static_cast<float>((sum - 6) * 0x1p-8));
    a = std::max(a, std::abs(values.back()));
  }
  const int e = round_up_exponent<E4M3>(a);
  int off_without = 0;
  for (const float x : values) {
    off_without += std::abs(round_e4m3(x) - x) > kNormalBound * std::abs(x);
    if (std::abs(x) >= std::ldexp(E4M3::kMinNormal, e)) {
      ASSERT_LE(std::abs(quantise(x, e).restored - x), kNormalBound * std::abs(x));
    }
  }
  EXPECT_GT(off_without, kCount / 2);
}

}  // namespace
}  // namespace mxattn
