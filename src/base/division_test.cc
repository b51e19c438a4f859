#include "base/division.h"

#include <gtest/gtest.h>

#include <random>

namespace mxattn {
namespace {

TEST(Division, BitEqualToIeeeDivision) {
  std::mt19937 random(1);
  std::uniform_int_distribution<std::uint32_t> mantissa(0, 0x7FFFFF), sign(0, 1);
  std::uniform_int_distribution<int> x_exponent(-120, Divisor::kLimit - 1),
      divisor_exponent(-30, 30);
  const auto draw = [&](int exponent, bool special) {
    const std::uint32_t bits =
        special ? (random() % 2 ? 0x7FFFFFu : random() % 4) : mantissa(random);
    return float_of(sign(random) << 31 | static_cast<std::uint32_t>(exponent + 127) << 23 | bits);
  };
  int compared = 0;
  for (int i = 0; i < 4000; ++i) {
    const float d = draw(divisor_exponent(random), i % 3 == 0);
    const Divisor divisor(d);
    for (int j = 0; j < 1000; ++j) {
      const float x = draw(x_exponent(random), j % 3 == 0);
      const float expected = x / d;
      if (std::fabs(expected) < pow2(-126)) continue;  // outside what the class promises
      if (std::fabs(expected) >= pow2(Divisor::kLimit)) continue;
      ++compared;
      ASSERT_EQ(bits_of(divisor.divide(x)), bits_of(expected)) << x << " / " << d;
    }
    for (const float zero : {0.0f, -0.0f}) {
      ASSERT_EQ(bits_of(Divisor(std::fabs(d)).divide(zero)), bits_of(zero)) << zero << " / " << d;
    }
  }
  EXPECT_GT(compared, 3000000);
}

TEST(Division, BitEqualWhereTheQuotientIsNearATie) {
  // (k + 1/2 ulp) d, rounded, divided by d: as near to a border as FP32 comes.
  std::mt19937 random(2);
  std::uniform_real_distribution<float> one_to_two(1.0f, 2.0f);
  for (int i = 0; i < 2000000; ++i) {
    const float d = one_to_two(random);
    const double middle = double{one_to_two(random)} + 0x1p-24;
    const float x = static_cast<float>(middle * d);
    ASSERT_EQ(bits_of(Divisor(d).divide(x)), bits_of(x / d)) << x << " / " << d;
  }
}

TEST(Division, NanComesOut) {
  EXPECT_TRUE(is_nan(Divisor(kNan).divide(1.0f)));
  EXPECT_TRUE(is_nan(Divisor(1.0f).divide(kNan)));
}

std::uint32_t to_bf16(float x) {
  const std::uint32_t bits = bits_of(x);
  return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

TEST(Division, QuickQuotientHasTheBf16OfTheExactOne) {
  // Quotients every half ulp around ties, and any others.
  std::mt19937 random(3);
  std::uniform_int_distribution<std::uint32_t> mantissa(0, 0x7FFFFF), sign(0, 1), off(0, 2);
  std::uniform_int_distribution<int> exponent(-60, 40), x_exponent(-20, 40), halves(-10, 10),
      divisor_exponent(0, 39), significand(128, 255);
  int quick = 0, close = 0;
  for (int i = 0; i < 200000; ++i) {
    const float d = pow2(divisor_exponent(random)) * float_of(bits_of(1.0f) | mantissa(random));
    // As far from 1 / d as it may be.
    const float one = 1.0f / d;
    const float away = float_of(bits_of(one) + off(random) - 1);
    const RoundedDivisor by(d, exponent(random), fma_rn(fma_rn(-d, away, 1.0f), away, away));
    ASSERT_TRUE(by.is_ordinary());
    for (int j = 0; j < 20; ++j) {
      const float any = pow2(x_exponent(random)) *
                        float_of(sign(random) << 31 | bits_of(1.0f) | mantissa(random));
      const double tie = significand(random) * 0x1p16 + 0x8000 + 0.5 * halves(random);
      const float x = j % 2 ? any : static_cast<float>(tie * d);
      const float result = by.quick(x);
      const std::uint32_t from_tie = (bits_of(result) + RoundedDivisor::kTieOffset) & 0xFFFF;
      if (from_tie < RoundedDivisor::kNearTie) {
        ++close;
      } else if (std::fabs(result) >= pow2(RoundedDivisor::kSmall)) {
        ++quick;
        ASSERT_EQ(to_bf16(result), to_bf16(by.exact(x))) << x << " / " << d;
      }
    }
  }
  EXPECT_GT(quick, 2000000);
  EXPECT_GT(close, 200000);
}

TEST(Division, NotEveryDivisorIsOrdinary) {
  EXPECT_TRUE(RoundedDivisor(1.0f, 0, 1.0f).is_ordinary());
  for (const float d : {0.0f, 0.5f, -2.0f, pow2(41), kInfinity, kNan}) {
    EXPECT_FALSE(RoundedDivisor(d, 0, 1.0f / d).is_ordinary()) << d;
  }
  EXPECT_FALSE(RoundedDivisor(2.0f, -61, 0.5f).is_ordinary());
  EXPECT_FALSE(RoundedDivisor(2.0f, 41, 0.5f).is_ordinary());
}

}  // namespace
}  // namespace mxattn
