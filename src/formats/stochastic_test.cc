#include "formats/stochastic.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <set>
#include <vector>

#include "base/numeric.h"
#include "support/float_inputs.h"

namespace mxattn {
namespace {

constexpr DrawKey kKey{2024, 7};

template <class Format>
class Stochastic : public testing::Test {
 protected:
  static float rounded(float x, std::uint32_t uniform) {
    return decode<Format>(encode<Format>(x, RoundStochastic{uniform}));
  }
};
using Formats = testing::Types<E4M3, E5M2, E2M1>;
TYPED_TEST_SUITE(Stochastic, Formats);

/// The neighbours of |x| and the probability of the upper one, by the definition.
template <class Format>
struct Neighbours {
  double low, high, probability;

  explicit Neighbours(float x) {
    const double magnitude = std::abs(double{x});
    std::uint32_t code = 0;
    while (code < Format::kMaxCode and
           decode<Format>(static_cast<typename Format::Code>(code + 1)) <= magnitude) {
      ++code;
    }
    low = decode<Format>(static_cast<typename Format::Code>(code));
    const bool top = code == Format::kMaxCode;
    high = top ? low : decode<Format>(static_cast<typename Format::Code>(code + 1));
    probability = top ? 0 : (magnitude - low) / (high - low);
  }
};

TYPED_TEST(Stochastic, CodeEqualAtTheThreshold) {
  using Format = TypeParam;
  int checked = 0;
  for (const float x : testing_support::format_inputs<Format>(20'000)) {
    if (not std::isfinite(x)) continue;
    const Neighbours<Format> near(x);
    const double threshold = std::floor(near.probability * 0x1p32);  // u below it goes up
    const auto is = [&](std::uint32_t uniform, double magnitude) {
      return this->rounded(x, uniform) == std::copysign(magnitude, double{x});
    };
    ASSERT_TRUE(is(0xFFFFFFFFu, near.low)) << std::hexfloat << x;
    if (threshold > 0) {
      const auto first_low = static_cast<std::uint32_t>(threshold);
      ASSERT_TRUE(is(0, near.high)) << std::hexfloat << x;
      ASSERT_TRUE(is(first_low - 1, near.high)) << std::hexfloat << x;
      ASSERT_TRUE(is(first_low, near.low)) << std::hexfloat << x;
      ++checked;
    } else {
      ASSERT_TRUE(is(0, near.low)) << std::hexfloat << x;
    }
  }
  EXPECT_GT(checked, 4'000);
}

TYPED_TEST(Stochastic, BoundedMean) {
  using Format = TypeParam;
  constexpr int kDraws = 40'000;
  std::uint32_t tensor = 0;
  for (const float x : {0.3f * Format::kMinSubnormal, 1.7f * Format::kMinSubnormal, 1.01f, -1.3f,
                        2.9f, 0.9f * Format::kMax}) {
    const Neighbours<Format> near(x);
    double sum = 0;
    std::set<float> seen;
    for (std::uint32_t i = 0; i < kDraws; ++i) {
      const float y = this->rounded(x, draw(kKey, tensor, 1, i / 64, i % 64));
      seen.insert(std::abs(y));
      sum += y;
    }
    for (const float y : seen) EXPECT_TRUE(y == near.low or y == near.high) << x << " gave " << y;
    EXPECT_EQ(seen.size(), 2u) << x;
    // Six standard deviations of the mean of kDraws coins of this probability and step.
    const double deviation =
        (near.high - near.low) * std::sqrt(near.probability * (1 - near.probability) / kDraws);
    EXPECT_NEAR(sum / kDraws, x, 6 * deviation) << x;
    ++tensor;
  }
}

TYPED_TEST(Stochastic, CodeEqualWhereNothingIsDrawn) {
  using Format = TypeParam;
  constexpr std::uint32_t kSign = Format::kMagnitudeMask + 1u;
  for (const std::uint32_t uniform : {0u, 0x80000000u, 0xFFFFFFFFu}) {
    const RoundStochastic rounding{uniform};
    for (std::uint32_t code = 0; code <= Format::kMaxCode; ++code) {
      const float x = decode<Format>(static_cast<typename Format::Code>(code));
      ASSERT_EQ(encode<Format>(x, rounding), code);
      ASSERT_EQ(encode<Format>(-x, rounding), code | kSign);
    }
    EXPECT_EQ(encode<Format>(1.01f * Format::kMax, rounding), Format::kMaxCode);
    EXPECT_EQ(encode<Format>(-kInfinity, rounding), Format::kMaxCode | kSign);
    EXPECT_EQ(encode<Format>(kNan, rounding), Format::kMagnitudeMask);
    EXPECT_EQ(encode<Format>(0x1p-149f, rounding), 0);
  }
}

TEST(Draw, BitEqualWhateverTheOrder) {
  std::vector<std::uint32_t> ascending;
  std::vector<std::uint32_t> descending;
  for (std::uint32_t channel = 0; channel < 128; ++channel) {
    ascending.push_back(draw(kKey, 2, 3, 99, channel));
  }
  for (std::uint32_t channel = 128; channel-- > 0;) {
    descending.push_back(draw(kKey, 2, 3, 99, channel));
  }
  for (std::uint32_t channel = 0; channel < 128; ++channel) {
    EXPECT_EQ(ascending[channel], descending[127 - channel]);
    EXPECT_EQ(ascending[channel], draw_channels(kKey, 2, 3, 99, channel / 4).word[channel % 4]);
  }
}

TEST(Draw, EveryPositionHasItsOwn) {
  // 32-bit values of 6 x 128 draws collide with probability 7e-5; these do not.
  std::set<std::uint32_t> seen;
  for (std::uint32_t channel = 0; channel < 128; ++channel) {
    seen.insert(draw({1, 1}, 1, 1, 1, channel));
    seen.insert(draw({2, 1}, 1, 1, 1, channel));
    seen.insert(draw({1, 2}, 1, 1, 1, channel));
    seen.insert(draw({1, 1}, 2, 1, 1, channel));
    seen.insert(draw({1, 1}, 1, 2, 1, channel));
    seen.insert(draw({1, 1}, 1, 1, 2, channel));
  }
  EXPECT_EQ(seen.size(), 6u * 128);
}

}  // namespace
}  // namespace mxattn
