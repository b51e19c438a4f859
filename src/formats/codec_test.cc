// The codecs against definitions in FP64: values from their fields, rounding from nearbyint.
#include "formats/codec.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "base/numeric.h"
#include "formats/bf16.h"
#include "formats/fp16.h"
#include "formats/fp4.h"
#include "formats/fp8.h"
#include "support/float_inputs.h"

namespace mxattn {
namespace {

constexpr int kFloats = 1'000'000;

/// The value of a non-negative code by the definition of the format.
template <class Format>
double defined_value(std::uint32_t code) {
  const auto mantissa = static_cast<int>(code & ((1u << Format::kMantissaBits) - 1));
  const auto field = static_cast<int>(code >> Format::kMantissaBits);
  const int implicit = field == 0 ? 0 : 1 << Format::kMantissaBits;
  return std::ldexp(implicit + mantissa,
                    std::max(field, 1) - Format::kBias - Format::kMantissaBits);
}

/// Rounding by its definition. Scaling by powers of two is exact in FP64, nearbyint breaks ties to
/// even, and the code is looked up in the sorted list of values.
template <class Format>
class Reference {
 public:
  using Code = typename Format::Code;

  Reference() {
    for (std::uint32_t code = 0; code <= Format::kMaxCode; ++code) {
      values_.push_back(defined_value<Format>(code));
    }
  }

  Code encode(double x) const {
    if (std::isnan(x)) return Format::kMagnitudeMask;
    const std::uint32_t sign = std::signbit(x) ? Format::kMagnitudeMask + 1u : 0u;
    return static_cast<Code>(sign | magnitude(std::abs(x)));
  }

 private:
  std::uint32_t magnitude(double x) const {
    constexpr std::uint32_t kOverflow = Format::kMaxCode + (Format::kSaturates ? 0u : 1u);
    if (std::isinf(x)) return kOverflow;
    if (x == 0) return 0;
    const int step =
        std::max(std::ilogb(x), 1 - Format::kBias) - Format::kMantissaBits;  // log2 of the spacing
    const double rounded = std::ldexp(std::nearbyint(std::ldexp(x, -step)), step);
    if (rounded > values_.back()) return kOverflow;
    const auto found = std::lower_bound(values_.begin(), values_.end(), rounded);
    EXPECT_EQ(*found, rounded);
    return static_cast<std::uint32_t>(found - values_.begin());
  }

  std::vector<double> values_;
};

template <class Format>
class Codec : public testing::Test {};

using Formats = testing::Types<E4M3, E5M2, E2M1, Fp16, Bf16>;
TYPED_TEST_SUITE(Codec, Formats);

TYPED_TEST(Codec, LimitsAreThoseOfTheCodes) {
  using Format = TypeParam;
  EXPECT_EQ(defined_value<Format>(Format::kMaxCode), Format::kMax);
  EXPECT_EQ(defined_value<Format>(1), Format::kMinSubnormal);
  EXPECT_EQ(defined_value<Format>(1u << Format::kMantissaBits), Format::kMinNormal);
  EXPECT_EQ(std::ilogb(Format::kMax), Format::kMaxExponent);
  EXPECT_EQ(1 << (Format::kExponentBits + Format::kMantissaBits), Format::kMagnitudeMask + 1);
}

TYPED_TEST(Codec, CodeEqualEveryCode) {
  using Format = TypeParam;
  using Code = typename Format::Code;
  constexpr std::uint32_t kSign = Format::kMagnitudeMask + 1u;
  for (std::uint32_t code = 0; code < 2 * kSign; ++code) {
    const std::uint32_t magnitude = code & Format::kMagnitudeMask;
    const float value = decode<Format>(static_cast<Code>(code));
    if (magnitude <= Format::kMaxCode) {
      ASSERT_EQ(std::abs(value), defined_value<Format>(magnitude)) << code;
      ASSERT_EQ(std::signbit(value), (code & kSign) != 0) << code;
      ASSERT_EQ(encode<Format>(value), code);
      ASSERT_EQ(encode<Format>(double{value}), code);
    } else if (Format::kHasInfinity and magnitude == Format::kMaxCode + 1u) {
      ASSERT_EQ(value, (code & kSign) != 0 ? -kInfinity : kInfinity) << code;
    } else {
      ASSERT_TRUE(is_nan(value)) << code;
      ASSERT_NE(bits_of(value) & 0x00400000u, 0u) << "a signalling NaN from " << code;
    }
  }
}

TYPED_TEST(Codec, CodeEqualMillionFloats) {
  using Format = TypeParam;
  const Reference<Format> reference;
  int inexact = 0;
  int ties = 0;
  for (const float x : testing_support::format_inputs<Format>(kFloats)) {
    const auto code = encode<Format>(x);
    ASSERT_EQ(code, reference.encode(x)) << std::hexfloat << x;
    const double error = std::abs(double{decode<Format>(code)} - x);
    if (not(error > 0)) continue;
    ++inexact;
    // A tie has a representable value at the same distance on the other side.
    const double other = x + (x - double{decode<Format>(code)});
    if (std::isfinite(other) and encode<Format>(other) != code and
        std::abs(double{decode<Format>(encode<Format>(other))}) == std::abs(other)) {
      ++ties;
    }
  }
  // The inputs are hard: most of them round, many at a tie.
  EXPECT_GT(inexact, kFloats / 2);
  EXPECT_GT(ties, kFloats / 50);
}

TYPED_TEST(Codec, CodeEqualDoublesWithOneRounding) {
  using Format = TypeParam;
  const Reference<Format> reference;
  int rounded_twice_differs = 0;
  for (const double x : testing_support::format_double_inputs<Format>(kFloats / 2)) {
    ASSERT_EQ(encode<Format>(x), reference.encode(x)) << std::hexfloat << x;
    rounded_twice_differs += encode<Format>(static_cast<float>(x)) != reference.encode(x);
  }
  EXPECT_GT(rounded_twice_differs, kFloats / 200);  // the inputs are hard
}

TYPED_TEST(Codec, CodeEqualSpecialValues) {
  using Format = TypeParam;
  constexpr std::uint32_t kSign = Format::kMagnitudeMask + 1u;
  constexpr std::uint32_t kOverflow = Format::kMaxCode + (Format::kSaturates ? 0u : 1u);
  EXPECT_EQ(encode<Format>(0.0f), 0);
  EXPECT_EQ(encode<Format>(-0.0f), kSign);
  EXPECT_EQ(encode<Format>(-1e-60), kSign);
  EXPECT_EQ(encode<Format>(kInfinity), kOverflow);
  EXPECT_EQ(encode<Format>(-kInfinity), kSign | kOverflow);
  EXPECT_EQ(encode<Format>(1e300), kOverflow);
  for (const std::uint32_t nan : {0x7FC00000u, 0xFFC00000u, 0x7F800001u, 0xFFFFFFFFu}) {
    EXPECT_EQ(encode<Format>(float_of(nan)), Format::kMagnitudeMask);
  }
  EXPECT_EQ(encode<Format>(std::numeric_limits<double>::quiet_NaN()), Format::kMagnitudeMask);
  if (Format::kHasNan) {
    EXPECT_TRUE(is_nan(round_to<Format>(kNan)));
  }
}

TEST(Fp8, CodeEqualVectors) {
  EXPECT_EQ(round_e4m3(460.0f), 448.0f);
  EXPECT_EQ(round_e4m3(464.0f), 448.0f);
  EXPECT_EQ(round_e4m3(440.0f), 448.0f);
  EXPECT_EQ(round_e4m3(433.0f), 448.0f);
  EXPECT_EQ(round_e4m3(432.0f), 448.0f);  // a tie of 416 and 448
  EXPECT_EQ(round_e4m3(431.0f), 416.0f);
  EXPECT_EQ(round_e4m3(17.0f), 16.0f);
  EXPECT_EQ(round_e4m3(18.0f), 18.0f);
  EXPECT_EQ(round_e4m3(19.0f), 20.0f);
  EXPECT_EQ(round_e4m3(1.0625f), 1.0f);
  EXPECT_EQ(round_e4m3(1.1875f), 1.25f);
  EXPECT_EQ(round_e4m3(0x1p-10f), 0.0f);  // the zero threshold
  EXPECT_EQ(round_e4m3(1.0001f * 0x1p-10f), 0x1p-9f);
  EXPECT_EQ(round_e4m3(1.5f * 0x1p-10f), 0x1p-9f);
  EXPECT_EQ(round_e4m3(3 * 0x1p-10f), 0x1p-8f);  // a tie of 1 and 2 steps
  EXPECT_EQ(round_e5m2(1e9f), 57344.0f);
  // One rounding: through FP32 the last bit is lost and the tie goes to 1.
  EXPECT_EQ(round_e4m3(1.0625 + 0x1p-40), 1.125);
  EXPECT_EQ(round_e4m3(static_cast<float>(1.0625 + 0x1p-40)), 1.0f);
}

TEST(Fp4, CodeEqualVectors) {
  constexpr float kValues[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  for (int code = 0; code < 8; ++code) {
    EXPECT_EQ(e2m1_to_float(static_cast<std::uint8_t>(code)), kValues[code]);
    EXPECT_EQ(e2m1_to_float(static_cast<std::uint8_t>(code | 8)), -kValues[code]);
  }
  constexpr float kBorders[7] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5};
  constexpr float kTies[7] = {0, 1, 1, 2, 2, 4, 4};
  for (int i = 0; i < 7; ++i) {
    EXPECT_EQ(round_e2m1(kBorders[i]), kTies[i]);
    EXPECT_EQ(round_e2m1(std::nextafter(kBorders[i], 0.0f)), kValues[i]);
    EXPECT_EQ(round_e2m1(std::nextafter(kBorders[i], 9.0f)), kValues[i + 1]);
  }
  EXPECT_EQ(float_to_e2m1(kNan), 7);  // no NaN in the format
}

TEST(Fp4, BitEqualPacking) {
  for (int even = 0; even < 16; ++even) {
    for (int odd = 0; odd < 16; ++odd) {
      const std::uint8_t byte =
          pack_e2m1(static_cast<std::uint8_t>(even), static_cast<std::uint8_t>(odd));
      EXPECT_EQ(byte, odd * 16 + even);
      EXPECT_EQ(unpack_e2m1(byte, 6), even);
      EXPECT_EQ(unpack_e2m1(byte, 7), odd);
    }
  }
}

TEST(Fp16, CodeEqualVectors) {
  EXPECT_EQ(round_fp16(65519.99f), 65504.0f);
  EXPECT_EQ(round_fp16(65520.0f), kInfinity);  // a tie, and no saturation
  EXPECT_EQ(round_fp16(0x1p-25f), 0.0f);
  EXPECT_EQ(round_fp16(std::nextafter(0x1p-25f, 1.0f)), 0x1p-24f);
  EXPECT_EQ(float_to_fp16(0x1p-14f), 0x0400);
}

TEST(Bf16, CodeEqualVectors) {
  EXPECT_EQ(float_to_bf16(1.0f), 0x3F80);
  EXPECT_EQ(round_bf16(1 + 0x1p-8f), 1.0f);
  EXPECT_EQ(round_bf16(1 + 3 * 0x1p-8f), 1 + 0x1p-6f);
  EXPECT_EQ(round_bf16(3.4e38f), kInfinity);
  EXPECT_EQ(float_to_bf16(kNan), 0x7FFF);
}

// Usable where the compiler needs a constant.
static_assert(float_to_e4m3(460.0f) == 0x7E);
static_assert(e4m3_to_float(0x38) == 1.0f);
static_assert(round_bf16(1.001) == 1.0);

}  // namespace
}  // namespace mxattn
