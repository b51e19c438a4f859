// The SIMD arithmetic against its scalar twin, the codecs of formats/ and FP64, on every target.
#include <cmath>
#include <vector>

#include "formats/bf16.h"
#include "formats/fp8.h"
#include "kernels/cpu/fp32_ops.h"

// The order of the next includes is Highway's: this file compiles itself once for every target.
// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/simd_test.cc"
#include "hwy/foreach_target.h"
#include "kernels/cpu/simd-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace mxattn::kernels::cpu {
namespace HWY_NAMESPACE {

// Applies f to arrays whose length is a multiple of 16.
template <class F>
HWY_INLINE void apply(const std::vector<float>& x, std::vector<float>& y, F f) {
  const FloatTag d;
  y.resize(x.size());
  for (std::size_t i = 0; i < x.size(); i += hn::Lanes(d)) {
    hn::StoreU(f(hn::LoadU(d, &x[i])), d, &y[i]);
  }
}

void run_exp2(const std::vector<float>& x, std::vector<float>& y) {
  apply(x, y, [](Floats v) HWY_ATTR { return SimdOps::exp2(v); });
}
void run_log2(const std::vector<float>& x, std::vector<float>& y) {
  apply(x, y, [](Floats v) HWY_ATTR { return SimdOps::log2(v); });
}
void run_flush(const std::vector<float>& x, std::vector<float>& y) {
  apply(x, y, [](Floats v) HWY_ATTR { return SimdOps::flush(v); });
}
void run_probability(const std::vector<float>& x, std::vector<float>& y) {
  apply(x, y, [](Floats v) HWY_ATTR {
    return stages::probability<SimdOps>(v, SimdOps::set(0.3f), SimdOps::set(-1.7f));
  });
}
void run_fma(const std::vector<float>& x, std::vector<float>& y) {
  apply(x, y, [](Floats v) HWY_ATTR {
    const Floats w = SimdOps::fma(v, v, SimdOps::set(-1.0f));
    return SimdOps::sub_from_product(v, w, v);
  });
}
void run_round_e4m3(const std::vector<float>& x, std::vector<float>& y) {
  apply(x, y, [](Floats v) HWY_ATTR { return round_e4m3(v); });
}
void run_round_bf16(const std::vector<float>& x, std::vector<float>& y) {
  apply(x, y, [](Floats v) HWY_ATTR { return round_bf16(v); });
}
void run_load_e4m3(const std::vector<std::uint8_t>& codes, std::vector<std::uint16_t>& bits) {
  bits.resize(codes.size());
  for (std::size_t i = 0; i < codes.size(); i += float_lanes()) {
    hn::StoreU(load_e4m3(&codes[i]), Bf16Tag(), &bits[i]);
  }
}
void run_bf16_trip(const std::vector<std::uint16_t>& from, std::vector<std::uint16_t>& to) {
  to.resize(from.size());
  for (std::size_t i = 0; i < from.size(); i += float_lanes()) {
    store_bf16(load_bf16(&from[i]), &to[i]);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace mxattn::kernels::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

#include "hwy/tests/hwy_gtest.h"

namespace mxattn::kernels::cpu {
namespace {

HWY_EXPORT(run_exp2);
HWY_EXPORT(run_log2);
HWY_EXPORT(run_flush);
HWY_EXPORT(run_probability);
HWY_EXPORT(run_fma);
HWY_EXPORT(run_round_e4m3);
HWY_EXPORT(run_round_bf16);
HWY_EXPORT(run_load_e4m3);
HWY_EXPORT(run_bf16_trip);

class SimdTest : public hwy::TestWithParamTarget {};
HWY_TARGET_INSTANTIATE_TEST_SUITE_P(SimdTest);

// Every `stride`-th FP32 pattern, all special ones, and the neighbours of powers of two.
std::vector<float> sweep(std::uint32_t stride) {
  std::vector<float> x;
  for (std::uint64_t bits = 0; bits < (std::uint64_t{1} << 32); bits += stride) {
    x.push_back(float_of(static_cast<std::uint32_t>(bits)));
  }
  for (std::uint32_t field = 0; field < 512; ++field) {
    for (int offset = -2; offset <= 2; ++offset) {
      x.push_back(float_of((field << 23) + static_cast<std::uint32_t>(offset)));
    }
    x.push_back(float_of(field << 23 | 0x400000u));
  }
  for (int i = -160; i <= 160; ++i) {
    const float n = static_cast<float>(i);
    x.insert(x.end(), {n, n + 0.5f, std::nextafter(n, kInfinity), std::nextafter(n, -kInfinity)});
  }
  while (x.size() % 16 != 0) x.push_back(0.0f);
  return x;
}

// Distance from the exact value in units of the last place of an FP32 value of its size.
double ulps(float y, double exact) {
  const int exponent = std::max(std::ilogb(exact), -126);
  return std::abs(static_cast<double>(y) - exact) / std::ldexp(1.0, exponent - 23);
}

void expect_same_bits(const std::vector<float>& x, const std::vector<float>& y,
                      float (*expected)(float)) {
  ASSERT_EQ(x.size(), y.size());
  int shown = 0;
  for (std::size_t i = 0; i < x.size() and shown < 5; ++i) {
    const float e = expected(x[i]);
    if (is_nan(e) and is_nan(y[i])) continue;
    if (bits_of(e) != bits_of(y[i])) {
      ++shown;
      ADD_FAILURE() << "x = " << x[i] << ": " << y[i] << " instead of " << e;
    }
  }
}

TEST_P(SimdTest, BitEqualExp2OfScalarTwin) {
  const std::vector<float> x = sweep(4999);
  std::vector<float> y;
  HWY_DYNAMIC_DISPATCH(run_exp2)(x, y);
  expect_same_bits(x, y, [](float v) { return Fp32Ops::exp2(v); });
}

TEST_P(SimdTest, BitEqualLog2OfScalarTwin) {
  const std::vector<float> x = sweep(4999);
  std::vector<float> y;
  HWY_DYNAMIC_DISPATCH(run_log2)(x, y);
  expect_same_bits(x, y, [](float v) { return Fp32Ops::log2(v); });
}

TEST_P(SimdTest, BitEqualFlush) {
  const std::vector<float> x = sweep(4999);
  std::vector<float> y;
  HWY_DYNAMIC_DISPATCH(run_flush)(x, y);
  expect_same_bits(x, y, [](float v) {
    return std::fpclassify(v) == FP_SUBNORMAL ? std::copysign(0.0f, v) : v;
  });
  expect_same_bits(x, y, [](float v) { return Fp32Ops::flush(v); });
}

TEST_P(SimdTest, BitEqualStageOfScalarTwin) {
  const std::vector<float> x = sweep(9973);
  std::vector<float> y;
  HWY_DYNAMIC_DISPATCH(run_probability)(x, y);
  expect_same_bits(x, y, [](float v) { return stages::probability<Fp32Ops>(v, 0.3f, -1.7f); });
}

TEST_P(SimdTest, BitEqualFusedMultiplyAdd) {
  const std::vector<float> x = sweep(9973);
  std::vector<float> y;
  HWY_DYNAMIC_DISPATCH(run_fma)(x, y);
  const auto fused = [](float v) { return std::fma(v, std::fma(v, v, -1.0f), -v); };
  expect_same_bits(x, y, fused);
  // The sweep tells one rounding from two.
  int different = 0;
  for (const float v : x) different += bits_of(fused(v)) != bits_of(v * (v * v - 1.0f) - v);
  EXPECT_GT(different, 1000);
}

// Zero counts as +0: the sign of a zero product never matters to a sum.
TEST_P(SimdTest, CodeEqualRoundE4m3) {
  std::vector<float> x = sweep(4999);
  for (int code = 0; code < 0x7E; ++code) {  // values, and ties with their neighbours
    const float low = e4m3_to_float(static_cast<std::uint8_t>(code));
    const float high = e4m3_to_float(static_cast<std::uint8_t>(code + 1));
    const float middle = (low + high) / 2;
    for (const float v :
         {low, middle, std::nextafter(middle, 0.0f), std::nextafter(middle, high)}) {
      x.insert(x.end(), {v, -v});
    }
  }
  while (x.size() % 16 != 0) x.push_back(0.0f);
  std::vector<float> y;
  HWY_DYNAMIC_DISPATCH(run_round_e4m3)(x, y);
  expect_same_bits(x, y, [](float v) { return mxattn::round_e4m3(v) + 0.0f; });
}

TEST_P(SimdTest, CodeEqualRoundBf16) {
  const std::vector<float> x = sweep(4999);
  std::vector<float> y;
  HWY_DYNAMIC_DISPATCH(run_round_bf16)(x, y);
  expect_same_bits(x, y, [](float v) { return mxattn::round_bf16(v); });
}

TEST_P(SimdTest, CodeEqualE4m3ToBf16) {
  std::vector<std::uint8_t> codes(256);
  for (int i = 0; i < 256; ++i) codes[i] = static_cast<std::uint8_t>(i);
  std::vector<std::uint16_t> bits;
  HWY_DYNAMIC_DISPATCH(run_load_e4m3)(codes, bits);
  for (int i = 0; i < 256; ++i) {
    const float value = e4m3_to_float(codes[i]);
    if (is_nan(value)) {
      EXPECT_TRUE(is_nan(bf16_to_float(bits[i]))) << "code " << i;
    } else {
      EXPECT_EQ(bits[i], float_to_bf16(value)) << "code " << i;
    }
  }
}

TEST_P(SimdTest, BitEqualBf16RoundTrip) {
  std::vector<std::uint16_t> from(65536), to;
  for (int i = 0; i < 65536; ++i) from[i] = static_cast<std::uint16_t>(i);
  HWY_DYNAMIC_DISPATCH(run_bf16_trip)(from, to);
  EXPECT_EQ(from, to);
}

// Both functions promise at most 2 ulp. (Over every FP32 value exp2 is within 0.952 ulp, and log2
// on [1/8, 8), where it is worst, within 1.036.)
TEST(ElementaryTest, BoundedExp2) {
  double worst = 0;
  for (const float x : sweep(997)) {
    const float y = Fp32Ops::exp2(x);
    if (is_nan(x)) {
      EXPECT_TRUE(is_nan(y));
    } else if (x < -126.0f) {
      EXPECT_EQ(bits_of(y), 0u) << x;
    } else if (x >= 128.0f) {
      EXPECT_EQ(y, kInfinity) << x;
    } else {
      worst = std::max(worst, ulps(y, std::exp2(static_cast<double>(x))));
      if (x == std::floor(x)) {
        EXPECT_EQ(y, pow2(static_cast<int>(x)));
      }
    }
  }
  EXPECT_LE(worst, 2.0);
  EXPECT_GT(worst, 0.5);
}

TEST(ElementaryTest, BoundedLog2) {
  double worst = 0;
  for (const float x : sweep(997)) {
    const float y = Fp32Ops::log2(x);
    if (is_nan(x) or x < 0.0f) {
      EXPECT_TRUE(is_nan(y)) << x;
    } else if (x == 0.0f) {
      EXPECT_EQ(y, -kInfinity);
    } else if (x == kInfinity) {
      EXPECT_EQ(y, kInfinity);
    } else {
      const double exact = std::log2(static_cast<double>(x));
      if (exact == std::floor(exact) and std::exp2(exact) == x) {
        EXPECT_EQ(y, exact) << x;
      } else {
        worst = std::max(worst, ulps(y, exact));
      }
    }
  }
  EXPECT_LE(worst, 2.0);
  EXPECT_GT(worst, 0.5);
}

}  // namespace
}  // namespace mxattn::kernels::cpu
#endif  // HWY_ONCE
