// The codecs against the host conversions of the CUDA toolkit, where its headers are found.
#include <gtest/gtest.h>

#if defined(MXATTN_HAS_CUDA_TOOLKIT)

#include <cmath>
#include <cstdint>

#include "base/numeric.h"
#include "formats/codec.h"
#include "formats/e8m0.h"
#include "support/float_inputs.h"
#include "support/toolkit_conversions.h"

namespace mxattn {
namespace {

constexpr int kFloats = 1'000'000;

template <class Format>
class Toolkit : public testing::Test {};
using Formats = testing::Types<E4M3, E5M2, E2M1, Fp16, Bf16>;
TYPED_TEST_SUITE(Toolkit, Formats);

TYPED_TEST(Toolkit, CodeEqualMillionFloats) {
  for (const float x : testing_support::format_inputs<TypeParam>(kFloats)) {
    ASSERT_EQ(encode<TypeParam>(x), toolkit::Conversion<TypeParam>::encode(x))
        << std::hexfloat << x;
  }
}

TYPED_TEST(Toolkit, BitEqualEveryCode) {
  using Code = typename TypeParam::Code;
  for (std::uint32_t code = 0; code < 2 * (TypeParam::kMagnitudeMask + 1u); ++code) {
    const float ours = decode<TypeParam>(static_cast<Code>(code));
    const float theirs = toolkit::Conversion<TypeParam>::decode(static_cast<Code>(code));
    ASSERT_EQ(is_nan(ours), is_nan(theirs)) << code;
    if (not is_nan(ours)) {
      ASSERT_EQ(bits_of(ours), bits_of(theirs)) << code;
    }
  }
}

TEST(ToolkitE8m0, CodeEqualMillionFloatsAndEveryCode) {
  using Scale = toolkit::Conversion<E8M0>;
  for (const float x : testing_support::format_inputs<Bf16>(kFloats)) {
    ASSERT_EQ(float_to_e8m0_up(x), Scale::encode_up(x)) << std::hexfloat << x;
    ASSERT_EQ(float_to_e8m0_down(x), Scale::encode_down(x)) << std::hexfloat << x;
  }
  for (int code = 0; code < E8M0::kNanCode; ++code) {
    const auto byte = static_cast<std::uint8_t>(code);
    ASSERT_EQ(e8m0_to_float(byte), Scale::decode(byte)) << code;
  }
  EXPECT_TRUE(is_nan(Scale::decode(E8M0::kNanCode)));
}

}  // namespace
}  // namespace mxattn

#else

TEST(Toolkit, CodeEqualMillionFloats) {
  GTEST_SKIP() << "the headers of the CUDA toolkit were not found; golden_test has its results";
}

#endif
