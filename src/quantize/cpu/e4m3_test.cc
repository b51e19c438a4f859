// Codecs on Highway vectors against formats/, on every SIMD target that this machine runs.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "quantize/cpu/e4m3_test.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "formats/bf16.h"
#include "formats/fp8.h"
#include "quantize/cpu/e4m3-inl.h"
#include "support/float_inputs.h"

HWY_BEFORE_NAMESPACE();
namespace mxattn {
namespace HWY_NAMESPACE {
namespace {

using Lanes = hn::CappedTag<float, 16>;

void encode_all(const std::vector<float>& x, std::uint8_t* codes) {
  const Lanes d;
  for (std::size_t i = 0; i < x.size(); i += hn::Lanes(d)) {
    store_e4m3(d, hn::LoadU(d, x.data() + i), codes + i);
  }
}

void decode_all(const std::vector<std::uint8_t>& codes, float* x) {
  const Lanes d;
  for (std::size_t i = 0; i < codes.size(); i += hn::Lanes(d)) {
    hn::StoreU(load_e4m3(d, codes.data() + i), d, x + i);
  }
}

void widen_all(const std::vector<std::uint16_t>& values, float* x) {
  const Lanes d;
  for (std::size_t i = 0; i < values.size(); i += hn::Lanes(d)) {
    hn::StoreU(load_bf16(d, values.data() + i), d, x + i);
  }
}

void fma_all(const std::vector<float>& a, const std::vector<float>& b, float* c) {
  const Lanes d;
  for (std::size_t i = 0; i < a.size(); i += hn::Lanes(d)) {
    hn::StoreU(
        fma_rn(d, hn::LoadU(d, a.data() + i), hn::LoadU(d, b.data() + i), hn::LoadU(d, c + i)), d,
        c + i);
  }
}

const char* name() { return hwy::TargetName(HWY_TARGET); }

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace mxattn
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace mxattn {
namespace {

HWY_EXPORT(encode_all);
HWY_EXPORT(decode_all);
HWY_EXPORT(widen_all);
HWY_EXPORT(fma_all);
HWY_EXPORT(name);

template <class Body>
void on_every_target(const Body& body) {
  for (const std::int64_t target : hwy::SupportedAndGeneratedTargets()) {
    hwy::SetSupportedTargetsForTest(target);
    SCOPED_TRACE(HWY_DYNAMIC_DISPATCH(name)());
    body();
  }
  hwy::SetSupportedTargetsForTest(0);
}

TEST(SimdE4m3, CodeEqualScalarEncoder) {
  std::vector<float> x;
  for (std::uint64_t i = 0; i < 1 << 18; ++i) {
    const std::uint64_t random = testing_support::random_bits(i);
    x.push_back(float_of(static_cast<std::uint32_t>(random)));  // any bits, NaN and Inf too
    x.push_back(
        float_of(testing_support::border_bits<E4M3, std::uint32_t>(random, 23, 127, -13, 10)));
  }
  std::vector<std::uint8_t> codes(x.size());
  on_every_target([&] {
    HWY_DYNAMIC_DISPATCH(encode_all)(x, codes.data());
    int num_saturated = 0, num_subnormal = 0;
    for (std::size_t i = 0; i < x.size(); ++i) {
      ASSERT_EQ(int{codes[i]}, int{float_to_e4m3(x[i])}) << x[i];
      num_saturated += (codes[i] & E4M3::kMagnitudeMask) == E4M3::kMaxCode;
      num_subnormal += (codes[i] & E4M3::kMagnitudeMask) - 1u < 7u;
    }
    EXPECT_GT(num_saturated, 1000);
    EXPECT_GT(num_subnormal, 1000);
  });
}

TEST(SimdE4m3, CodeEqualEveryCodeAndEveryBf16) {
  std::vector<std::uint8_t> codes(256);
  for (int i = 0; i < 256; ++i) codes[static_cast<std::size_t>(i)] = static_cast<std::uint8_t>(i);
  std::vector<std::uint16_t> halves(1 << 16);
  for (int i = 0; i < 1 << 16; ++i) {
    halves[static_cast<std::size_t>(i)] = static_cast<std::uint16_t>(i);
  }
  std::vector<float> x(halves.size());
  on_every_target([&] {
    HWY_DYNAMIC_DISPATCH(decode_all)(codes, x.data());
    for (std::size_t i = 0; i < codes.size(); ++i) {
      const float expected = e4m3_to_float(codes[i]);
      if (is_nan(expected)) {
        ASSERT_TRUE(is_nan(x[i])) << i;
      } else {
        ASSERT_EQ(bits_of(x[i]), bits_of(expected)) << i;
      }
    }
    HWY_DYNAMIC_DISPATCH(widen_all)(halves, x.data());
    for (std::size_t i = 0; i < halves.size(); ++i) {
      ASSERT_EQ(bits_of(x[i]), std::uint32_t{halves[i]} << 16);
    }
  });
}

TEST(SimdFma, BitEqualOneRounding) {
  std::vector<float> a, b, c;
  int num_hard = 0;
  for (std::uint64_t i = 0; i < 1 << 14; ++i) {
    const std::uint64_t r = testing_support::random_bits(i);
    a.push_back(float_of(0x3F800000u | (r & 0x7FFFFF)));
    b.push_back(float_of(0x3F800000u | (r >> 23 & 0x7FFFFF)));
    c.push_back(-a.back() * b.back());  // all that is left is what one rounding keeps
    num_hard += fma_rn(a.back(), b.back(), c.back()) != 0;
  }
  EXPECT_GT(num_hard, 1 << 13);
  on_every_target([&] {
    std::vector<float> got = c;
    HWY_DYNAMIC_DISPATCH(fma_all)(a, b, got.data());
    for (std::size_t i = 0; i < a.size(); ++i) ASSERT_EQ(got[i], fma_rn(a[i], b[i], c[i]));
  });
}

}  // namespace
}  // namespace mxattn
#endif
