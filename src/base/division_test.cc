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

}  // namespace
}  // namespace mxattn
