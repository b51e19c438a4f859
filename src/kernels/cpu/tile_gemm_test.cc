// Every engine against scalar models of its order of sums.
#include "kernels/cpu/tile_gemm.h"

#include <gtest/gtest.h>
#include <hwy/tests/hwy_gtest.h>

#include "kernels/cpu/sm90_mma.h"
#include "kernels/cpu/tile_test.h"

namespace mxattn::kernels::cpu {
namespace {

struct Shape {
  int m, n, k;
};
constexpr Shape kShapes[] = {{128, 128, 128}, {64, 64, 64},  {1, 16, 32},   {7, 48, 64},
                             {33, 256, 32},   {100, 80, 96}, {17, 16, 256}, {128, 256, 128}};

float value(std::uint16_t bits) { return bf16_to_float(bits); }

// The chain that tile_gemm.h promises of "highway" and "avx512_bf16".
FloatMatrix chain(const Bf16Matrix& a, const Bf16Matrix& b, const FloatMatrix& c, bool accumulate,
                  bool even_first = false) {
  FloatMatrix result = c;
  for (int i = 0; i < a.rows; ++i) {
    for (int j = 0; j < b.columns; ++j) {
      float acc = accumulate ? c.at(i, j) : 0.0f;
      for (int k = 0; k < a.columns; k += 2) {
        for (const int kk : {k + (even_first ? 0 : 1), k + (even_first ? 1 : 0)}) {
          acc = std::fma(value(a.at(i, kk)), value(b.at(kk, j)), acc);
        }
      }
      result.at(i, j) = acc;
    }
  }
  return result;
}

// TDPBF16PS as Intel's manual states it: in each step of 32 elements two FMA chains from 0, one of
// even and one of odd elements; their sum is added to C. Inputs and results flush subnormals,
// which these tests do not have.
FloatMatrix tile_dot_model(const Bf16Matrix& a, const Bf16Matrix& b, const FloatMatrix& c,
                           bool accumulate) {
  FloatMatrix result = c;
  for (int i = 0; i < a.rows; ++i) {
    for (int j = 0; j < b.columns; ++j) {
      float acc = accumulate ? c.at(i, j) : 0.0f;
      for (int step = 0; step < a.columns; step += 32) {
        float sums[2] = {0.0f, 0.0f};
        for (int k = step; k < step + 32; ++k) {
          sums[k % 2] = std::fma(value(a.at(i, k)), value(b.at(k, j)), sums[k % 2]);
        }
        acc += sums[0] + sums[1];
      }
      result.at(i, j) = acc;
    }
  }
  return result;
}

using Model = FloatMatrix (*)(const Bf16Matrix&, const Bf16Matrix&, const FloatMatrix&, bool);

void expect_model(const TileGemm& engine, Model model) {
  std::mt19937 random(7);
  for (const Shape& shape : kShapes) {
    const Bf16Matrix a = random_bf16(random, shape.m, shape.k, 12, 8);
    const Bf16Matrix b = random_bf16(random, shape.k, shape.n, 12);
    FloatMatrix c(shape.m, shape.n, 5, -77.0f);
    for (float& x : c.data) x = std::ldexp(static_cast<float>(random()), -30);
    for (const bool accumulate : {false, true}) {
      const FloatMatrix want = model(a, b, c, accumulate);
      FloatMatrix got = c;
      run_engine(engine, a, b, got, accumulate);
      EXPECT_EQ(first_difference(got, want), "")
          << engine.name << " " << shape.m << " x " << shape.n << " x " << shape.k;
      // Nothing beside the tile was written.
      for (int r = 0; r < c.rows; ++r) {
        for (int x = c.columns; x < c.stride; ++x) ASSERT_EQ(got.at(r, x), c.at(r, x));
      }
    }
  }
}

FloatMatrix ordinary_chain(const Bf16Matrix& a, const Bf16Matrix& b, const FloatMatrix& c,
                           bool accumulate) {
  return chain(a, b, c, accumulate);
}

class TileGemmTest : public hwy::TestWithParamTarget {};
HWY_TARGET_INSTANTIATE_TEST_SUITE_P(TileGemmTest);

TEST_P(TileGemmTest, BitEqualChainHighway) {
  expect_model(*find_tile_gemm("highway"), ordinary_chain);
}

TEST(TileGemmX86Test, BitEqualChainAvx512Bf16) {
  const TileGemm* engine = find_tile_gemm("avx512_bf16");
  if (engine == nullptr) GTEST_SKIP() << "this CPU has no AVX-512 BF16";
  expect_model(*engine, ordinary_chain);
}

TEST(TileGemmX86Test, BitEqualTileDotAmx) {
  const TileGemm* engine = find_tile_gemm("amx");
  if (engine == nullptr) GTEST_SKIP() << "this CPU has no AMX, or its use is not granted";
  expect_model(*engine, tile_dot_model);
}

// The inputs above tell the orders apart.
TEST(TileGemmModelTest, OrdersDiffer) {
  std::mt19937 random(7);
  const Bf16Matrix a = random_bf16(random, 64, 128, 12), b = random_bf16(random, 128, 64, 12);
  const FloatMatrix c(64, 64);
  const FloatMatrix promised = chain(a, b, c, false);
  const FloatMatrix even_first = chain(a, b, c, false, true);
  const FloatMatrix tile_dot = tile_dot_model(a, b, c, false);
  int other_order = 0, other_chains = 0;
  for (int r = 0; r < 64; ++r) {
    for (int n = 0; n < 64; ++n) {
      other_order += promised.at(r, n) != even_first.at(r, n);
      other_chains += promised.at(r, n) != tile_dot.at(r, n);
    }
  }
  EXPECT_GT(other_order, 1000);
  EXPECT_GT(other_chains, 1000);
}

std::vector<const TileGemm*> all_engines() {
  std::vector<const TileGemm*> engines = tile_gemms();
  engines.push_back(&sm90_tile_gemm());
  return engines;
}

// Forward and backward form the same scores: S = Q K^T and (K Q^T)^T.
TEST(TileGemmEngineTest, BitEqualWhicheverOperandIsA) {
  std::mt19937 random(11);
  const Bf16Matrix q = random_e4m3(random, 128, 128), k = random_e4m3(random, 64, 128);
  for (const TileGemm* engine : all_engines()) {
    FloatMatrix s(128, 64), t(64, 128);
    run_engine(*engine, q, k.transposed(), s, false);
    run_engine(*engine, k, q.transposed(), t, false);
    EXPECT_EQ(first_difference(t.transposed(), s), "") << engine->name;
  }
}

// An element depends on its row and column alone, and sums may stop and go on at any step of k.
TEST(TileGemmEngineTest, BitEqualWhateverTheBlocks) {
  std::mt19937 random(13);
  const Bf16Matrix a = random_e4m3(random, 128, 128), b = random_e4m3(random, 128, 128);
  for (const TileGemm* engine : all_engines()) {
    FloatMatrix whole(128, 128);
    run_engine(*engine, a, b, whole, false);
    const std::vector<std::uint16_t> pairs = pair_rows(b, 128);
    for (const Shape& block : {Shape{1, 16, 32}, Shape{5, 48, 64}, Shape{40, 80, 128}}) {
      FloatMatrix parts(128, 128);
      for (int row = 0; row < 128; row += block.m) {
        for (int column = 0; column < 128; column += block.n) {
          for (int step = 0; step < 128; step += block.k) {
            engine->run({std::min(block.m, 128 - row), std::min(block.n, 128 - column), block.k,
                         &a.at(row, step), 128, &pairs[(step / 2 * 128 + column) * 2], 128,
                         &parts.at(row, column), 128, step > 0});
          }
        }
      }
      EXPECT_EQ(first_difference(parts, whole), "") << engine->name << " " << block.n;
    }
  }
}

// |error| <= gamma sum |a b|: k fused roundings, and two more for the split chains of AMX.
TEST(TileGemmEngineTest, BoundedAgainstFp64) {
  std::mt19937 random(17);
  const int depth = 256;
  const Bf16Matrix a = random_bf16(random, 32, depth, 4), b = random_bf16(random, depth, 32, 4);
  const double u = std::ldexp(1.0, -24);
  const double gamma = (depth + 2) * u / (1 - (depth + 2) * u);
  for (const TileGemm* engine : tile_gemms()) {
    FloatMatrix c(32, 32);
    run_engine(*engine, a, b, c, false);
    for (int i = 0; i < 32; ++i) {
      for (int j = 0; j < 32; ++j) {
        double exact = 0, magnitude = 0;
        for (int k = 0; k < depth; ++k) {
          const double product = static_cast<double>(value(a.at(i, k))) * value(b.at(k, j));
          exact += product;
          magnitude += std::abs(product);
        }
        EXPECT_LE(std::abs(c.at(i, j) - exact), gamma * magnitude) << engine->name;
      }
    }
  }
}

TEST(TileGemmEngineTest, ChosenByName) {
  EXPECT_EQ(&best_tile_gemm(), tile_gemms().front());
  EXPECT_EQ(find_tile_gemm("abacus"), nullptr);
  for (const TileGemm* engine : tile_gemms()) {
    EXPECT_EQ(find_tile_gemm(engine->name), engine);
    set_tile_gemm(engine);
    EXPECT_EQ(&best_tile_gemm(), engine);
  }
  set_tile_gemm(nullptr);
  EXPECT_EQ(&best_tile_gemm(), tile_gemms().front());
}

}  // namespace
}  // namespace mxattn::kernels::cpu
