// The model of the H200's FP8 accumulator against a scalar form of it and vectors worked by hand.
#include "kernels/cpu/sm90_mma.h"

#include <gtest/gtest.h>
#include <hwy/tests/hwy_gtest.h>

#include "kernels/cpu/tile_test.h"

namespace mxattn::kernels::cpu {
namespace {

constexpr int kFractionBits = 13;

// Toward zero to a multiple of 2^grid.
double truncate(double x, int grid) { return std::ldexp(std::trunc(std::ldexp(x, -grid)), grid); }

int e4m3_exponent(double x) { return std::max(std::ilogb(x), 1 - E4M3::kBias); }

// One step for one element, in doubles: all values here are exact in them.
float step_model(const double* a, const double* b, float accumulator) {
  int largest = accumulator != 0 ? std::ilogb(accumulator) : -1000;
  bool nan = is_nan(accumulator);
  for (int k = 0; k < 32; ++k) {
    nan = nan or std::isnan(a[k]) or std::isnan(b[k]);
    if (a[k] == 0 or b[k] == 0 or nan) continue;
    largest = std::max(largest, e4m3_exponent(a[k]) + e4m3_exponent(b[k]));
  }
  if (nan) return float_of(0x7FFFFFFF);
  if (std::isinf(accumulator)) return accumulator;
  if (largest == -1000) return 0.0f;
  double sum = truncate(accumulator, largest - kFractionBits);
  for (int k = 0; k < 32; ++k) sum += truncate(a[k] * b[k], largest - kFractionBits);
  if (sum == 0) return 0.0f;
  const double result = truncate(sum, std::max(std::ilogb(sum), -126) - kFractionBits);
  return static_cast<float>(result) + 0.0f;
}

FloatMatrix model(const Bf16Matrix& a, const Bf16Matrix& b, const FloatMatrix& c, bool accumulate) {
  FloatMatrix result = c;
  for (int i = 0; i < a.rows; ++i) {
    for (int j = 0; j < b.columns; ++j) {
      float acc = accumulate ? c.at(i, j) : 0.0f;
      for (int step = 0; step < a.columns; step += 32) {
        double x[32], y[32];
        for (int k = 0; k < 32; ++k) {
          x[k] = bf16_to_float(a.at(i, step + k));
          y[k] = bf16_to_float(b.at(step + k, j));
        }
        acc = step_model(x, y, acc);
      }
      result.at(i, j) = acc;
    }
  }
  return result;
}

class Sm90MmaTest : public hwy::TestWithParamTarget {
 protected:
  static void expect_model(const Bf16Matrix& a, const Bf16Matrix& b, const FloatMatrix& c) {
    for (const bool accumulate : {false, true}) {
      FloatMatrix got = c;
      run_engine(sm90_tile_gemm(), a, b, got, accumulate);
      EXPECT_EQ(first_difference(got, model(a, b, c, accumulate)), "")
          << "accumulate " << accumulate;
    }
  }
};
HWY_TARGET_INSTANTIATE_TEST_SUITE_P(Sm90MmaTest);

FloatMatrix random_floats(std::mt19937& random, int rows, int columns, int low, int high) {
  FloatMatrix c(rows, columns, 3);
  for (float& x : c.data) {
    const int e = low + static_cast<int>(random() % static_cast<unsigned>(high - low + 1));
    x = std::ldexp(1.0f + static_cast<float>(random() % (1u << 23)) * 0x1p-23f, e);
    if (random() % 2 == 0) x = -x;
  }
  return c;
}

TEST_P(Sm90MmaTest, BitEqualUniformCodes) {
  std::mt19937 random(3);
  for (const int depth : {32, 128, 256}) {
    const Bf16Matrix a = random_e4m3(random, 21, depth, 4), b = random_e4m3(random, depth, 48);
    expect_model(a, b, random_floats(random, 21, 48, -30, 30));
  }
}

TEST_P(Sm90MmaTest, BitEqualNormalValues) {
  std::mt19937 random(4);
  const auto rounded = [&](int rows, int columns, int spread) {
    Bf16Matrix m = random_bf16(random, rows, columns, spread);
    for (auto& x : m.data) x = float_to_bf16(round_e4m3(bf16_to_float(x)));
    return m;
  };
  for (const int spread : {0, 8, 20}) {
    expect_model(rounded(16, 64, spread), rounded(64, 32, spread),
                 random_floats(random, 16, 32, -20, 10));
  }
}

TEST_P(Sm90MmaTest, BitEqualSubnormalsZerosAndCancellation) {
  std::mt19937 random(5);
  Bf16Matrix a(16, 64), b(64, 16);
  for (auto& x : a.data) {
    const float magnitude = static_cast<float>(random() % 16) * E4M3::kMinSubnormal;
    x = float_to_bf16(random() % 2 == 0 ? magnitude : -magnitude);
  }
  for (auto& x : b.data)
    x = random() % 3 == 0 ? 0 : float_to_bf16(random() % 2 == 0 ? 0x1p-9f : 448);
  // Halves of k cancel.
  for (int r = 0; r < 16; ++r) {
    for (int k = 0; k < 16; ++k) a.at(r, k + 16) = a.at(r, k) ^ 0x8000;
  }
  for (int k = 0; k < 16; ++k) {
    for (int n = 0; n < 8; ++n) b.at(k + 16, n) = b.at(k, n);
  }
  expect_model(a, b, random_floats(random, 16, 16, -30, 0));
}

TEST_P(Sm90MmaTest, BitEqualForeignAccumulators) {
  std::mt19937 random(6);
  Bf16Matrix a = random_e4m3(random, 32, 32), b = random_e4m3(random, 32, 32);
  for (int n = 0; n < 16; ++n) {
    for (int k = 0; k < 32; ++k) b.at(k, n) = 0;  // no product at all in half of the columns
  }
  FloatMatrix c = random_floats(random, 32, 32, -126, 127);
  const float special[] = {0.0f,      -0.0f,      kInfinity, -kInfinity,      kNan,
                           0x1p-149f, -0x1p-130f, 0x1p-126f, 0x1.fffffep127f, 0x1.fffp-140f};
  for (int n = 0; n < 32; ++n) {
    for (int r = 0; r < 10; ++r) c.at(r, n) = special[r];
  }
  expect_model(a, b, c);
}

TEST_P(Sm90MmaTest, BitEqualNan) {
  std::mt19937 random(8);
  Bf16Matrix a = random_e4m3(random, 8, 64);
  const Bf16Matrix b(64, 16);  // also a zero times NaN is NaN
  a.at(3, 40) = 0x7FC0;
  FloatMatrix c(8, 16);
  run_engine(sm90_tile_gemm(), a, b, c, false);
  for (int r = 0; r < 8; ++r) {
    for (int n = 0; n < 16; ++n) EXPECT_EQ(bits_of(c.at(r, n)), r == 3 ? 0x7FFFFFFFu : 0u);
  }
}

// Worked by hand from the rule; each fails if the rule is bent in the way named.
TEST_P(Sm90MmaTest, BitEqualWorkedExamples) {
  struct Example {
    const char* why;
    std::vector<std::pair<float, float>> products;
    float accumulator;
    float result;
  };
  const std::vector<Example> examples = {
      // 256 = 2^8 sets the grid 2^-5: 3/64 is one and a half of it.
      {"truncated to 13 fraction bits", {{16, 16}, {0.125f, 0.375f}}, 0, 256.03125f},
      {"toward zero, not down", {{16, 16}, {-0.125f, 0.375f}}, 0, 255.96875f},
      // 1.5 x 1.5 = 2.25 has the exponent 0: grid 2^-13 keeps 2^-13. With 2^1 it would be lost.
      {"products not normalised", {{1.5f, 1.5f}, {-1.5f, 1.5f}, {0x1p-6f, 0x1p-7f}}, 0, 0x1p-13f},
      // 2^-9 counts as 2^-6: 2^8 2^-6 = 2^2 sets the grid 2^-11. 2^-12 is lost.
      {"subnormals not normalised", {{256, 0x1p-9f}, {0x1p-6f, 0x1p-6f}}, 0, 0.5f},
      {"zero products do not align", {{448, 0}, {0x1p-9f, 0x1p-9f}}, 0, 0x1p-18f},
      {"the accumulator aligns", {{0x1p-6f, 0x1p-6f}}, 4, 4},
      {"the accumulator is truncated", {{16, 16}}, 0.046875f, 256.03125f},
      {"terms truncated, not their sum", {{16, 16}, {0.125f, 0.125f}, {0.125f, 0.125f}}, 0, 256},
      // The grid of 448 x 448 is 2^(16 - 13), so 8 enters the sum; the sum is above 2^17.
      {"result truncated", {{448, 448}, {16, 16}, {4, 2}}, 0, 200960},
      {"minus zero", {{0, 1}}, -0.0f, 0.0f},
  };
  for (const Example& example : examples) {
    Bf16Matrix a(1, 32), b(32, 16);
    for (std::size_t k = 0; k < example.products.size(); ++k) {
      a.at(0, static_cast<int>(k)) = float_to_bf16(example.products[k].first);
      b.at(static_cast<int>(k), 5) = float_to_bf16(example.products[k].second);
    }
    FloatMatrix c(1, 16);
    c.at(0, 5) = example.accumulator;
    run_engine(sm90_tile_gemm(), a, b, c, true);
    EXPECT_EQ(bits_of(c.at(0, 5)), bits_of(example.result)) << example.why << ": " << c.at(0, 5);
  }
}

// Inside a step the order does not matter; across steps it does (else the test above were soft).
TEST_P(Sm90MmaTest, BitEqualWithinAStep) {
  std::mt19937 random(9);
  Bf16Matrix a = random_e4m3(random, 64, 64), b = random_e4m3(random, 64, 64);
  FloatMatrix straight(64, 64), within(64, 64), across(64, 64);
  run_engine(sm90_tile_gemm(), a, b, straight, false);
  const auto permuted = [&](auto order) {
    Bf16Matrix x = a, y = b;
    for (int k = 0; k < 64; ++k) {
      for (int i = 0; i < 64; ++i) {
        x.at(i, k) = a.at(i, order(k));
        y.at(k, i) = b.at(order(k), i);
      }
    }
    return std::pair{x, y};
  };
  const auto [x, y] = permuted([](int k) { return k ^ 21; });
  run_engine(sm90_tile_gemm(), x, y, within, false);
  EXPECT_EQ(first_difference(within, straight), "");
  const auto [u, v] = permuted([](int k) { return 63 - k; });
  run_engine(sm90_tile_gemm(), u, v, across, false);
  int different = 0;
  for (std::size_t i = 0; i < straight.data.size(); ++i)
    different += straight.data[i] != across.data[i];
  EXPECT_GT(different, 1000);
}

}  // namespace
}  // namespace mxattn::kernels::cpu
