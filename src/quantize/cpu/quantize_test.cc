// Codes, exponents and norms against the scalar definition of support/operands.h, on every SIMD
// target that this machine runs.
#include "quantize/quantize.h"

#include <gtest/gtest.h>

#include "base/error.h"
#include "recipe/exponents.h"
#include "recipe/roles.h"
#include "support/operands.h"

namespace mxattn::quantize_test {
namespace {

const Recipe kRecipes[] = {recipes::fp8, recipes::mxfp8, recipes::mxfp8_token, recipes::mxfp8_floor,
                           recipes::fp8_tensor};
const Role kRoles[] = {Role::kQ, Role::kK, Role::kV, Role::kGradient};

void expect_definition(const Case& c, const TensorView<const std::uint16_t>& x) {
  const Buffers got = library(c, x), expected = definition(c, x);
  ASSERT_EQ(got.exponents, expected.exponents);
  ASSERT_EQ(got.scale, expected.scale);
  ASSERT_EQ(got.norms, expected.norms);
  ASSERT_EQ(got.codes, expected.codes);
}

TEST(Quantize, CodeEqualDefinitionOverRandomPacks) {
  Random random(1);
  const int dims[] = {1, 4, 8, 20, 64, 96, 128, 256};
  int num_rotated = 0;
  for (int repeat = 0; repeat < 200; ++repeat) {
    Case c{.recipe = kRecipes[repeat % 5],
           .role = kRoles[draw(random, 0, 3)],
           .pack = random_pack(random, 150),
           .rotate = draw(random, 0, 1) == 1};
    const int dim = dims[draw(random, 0, 7)];
    num_rotated += is_rotated(c.role, dim, c.rotate);
    const Tensor x = heavy_tailed(random, c.tokens(), draw(random, 1, 3), dim, 6);
    SCOPED_TRACE(testing::Message() << "repeat " << repeat << " dim " << dim);
    expect_definition(c, x.view());
    if (testing::Test::HasFatalFailure()) return;
  }
  EXPECT_GT(num_rotated, 20);
}

TEST(Quantize, CodeEqualDefinitionOnEverySimdTarget) {
  Random random(2);
  const Pack pack = pack_of({37, 0, 130}, 5);
  for (const int dim : {2, 8, 64, 100, 128}) {
    for (const Recipe& recipe : {recipes::fp8, recipes::fp8_tensor}) {
      for (const Role role : {Role::kK, Role::kV}) {
        const Case c{.recipe = recipe, .role = role, .pack = pack, .rotate = true};
        const Tensor x = heavy_tailed(random, c.tokens(), 2, dim, 4);
        on_every_target([&] { expect_definition(c, x.view()); });
      }
    }
  }
}

TEST(Quantize, CodeEqualDefinitionAtEveryMagnitude) {
  // Scales whose exponents are clamped on either side, and whose products leave FP32's normal
  // range.
  Random random(3);
  const Pack pack = pack_of({40, 70});
  int num_low = 0, num_high = 0;
  for (const Recipe& recipe : kRecipes) {
    for (int scale = -120; scale <= 120; scale += 12) {
      const Case c{.recipe = recipe, .role = Role::kV, .pack = pack};
      const Tensor x = heavy_tailed(random, c.tokens(), 1, 64, 1, scale);
      SCOPED_TRACE(testing::Message() << info_of(recipe).name << " 2^" << scale);
      expect_definition(c, x.view());
      if (testing::Test::HasFatalFailure()) return;
      const Buffers got = library(c, x.view());
      num_low += std::count(got.exponents.begin(), got.exponents.end(), -96) > 60;
      num_high += std::count(got.exponents.begin(), got.exponents.end(), 96) > 60;
    }
  }
  EXPECT_GT(num_low, 4);  // the clamps were reached
  EXPECT_GT(num_high, 4);
}

TEST(Quantize, CodeEqualPowersOfTwoMoveExponentsOnly) {
  Random random(4);
  const Pack pack = pack_of({33, 64});
  const Tensor x = heavy_tailed(random, 97, 2, 128, 2);
  for (const Recipe& recipe : {recipes::fp8, recipes::mxfp8, recipes::mxfp8_token}) {
    const Case c{.recipe = recipe, .role = Role::kQ, .pack = pack, .rotate = true};
    const Buffers base = library(c, x.view());
    for (const int shift : {-80, -40, -4, 4, 40, 80}) {
      Tensor scaled = x;
      for (std::uint16_t& value : scaled.data) {
        value = nearest_bf16(std::ldexp(value_of_bf16(value), shift));
      }
      const Buffers got = library(c, scaled.view());
      EXPECT_EQ(got.codes, base.codes);
      for (std::size_t i = 0; i < got.exponents.size(); ++i) {
        const bool zero = base.exponents[i] == -96;  // zero tokens and gaps stay where they are
        ASSERT_EQ(got.exponents[i], zero ? -96 : base.exponents[i] + shift);
      }
    }
  }
}

TEST(Quantize, CodeEqualEveryBf16Value) {
  // One channel, one token a value: all 2^16 of them, NaN and Inf included.
  const Pack pack = pack_of({1 << 16});
  Tensor x(1 << 16, 1, 1);
  for (int i = 0; i < 1 << 16; ++i)
    x.data[static_cast<std::size_t>(i)] = static_cast<std::uint16_t>(i);
  for (const Recipe& recipe : {recipes::mxfp8_token, recipes::fp8_tensor}) {
    const Case c{.recipe = recipe, .role = Role::kV, .pack = pack};
    on_every_target([&] { expect_definition(c, x.view()); });
  }
}

TEST(Quantize, CodeEqualNanAndInfinityRules) {
  Random random(5);
  const Pack pack = pack_of({100, 50}, 10);
  for (const std::uint16_t poison : {0x7FC0, 0xFFFF, 0x7F80, 0xFF80}) {
    for (const Recipe& recipe : kRecipes) {
      for (const Role role : {Role::kQ, Role::kV}) {
        Tensor x = heavy_tailed(random, 160, 1, 128, 3);
        x.row(40, 0)[127] = poison;
        const Case c{.recipe = recipe, .role = role, .pack = pack, .rotate = true};
        expect_definition(c, x.view());
        const Buffers got = library(c, x.view());
        const auto is_nan_code = [](std::uint8_t code) { return (code & 0x7F) == 0x7F; };
        EXPECT_TRUE(std::none_of(got.codes.begin(), got.codes.end(), is_nan_code));

        // Which tokens of the poisoned document are NaN, by scale group; no other document is.
        const auto expected_nan = [&](int t) {
          if (recipe.scale_group == ScaleGroup::kRunning) return t >= 40;
          if (recipe.scale_group == ScaleGroup::kBlock32) return t >= 32 and t < 64;
          return t == 40;
        };
        for (int t = 0; t < 100; ++t) EXPECT_EQ(got.exponents[t] == 127, expected_nan(t)) << t;
        for (std::int64_t slot = 100; slot < c.slots(); ++slot) {
          EXPECT_NE(got.exponents[slot], 127) << slot;
        }
      }
    }
  }
}

TEST(Quantize, BitEqualZeroTensor) {
  const Pack pack = pack_of({40}, 3);
  const Tensor x(43, 2, 64);
  const Case tensor{.recipe = recipes::fp8_tensor, .role = Role::kV, .pack = pack};
  EXPECT_EQ(library(tensor, x.view()).scale[0], 1.0f);
  const Case running{.recipe = recipes::fp8, .role = Role::kV, .pack = pack};
  const Buffers got = library(running, x.view());
  EXPECT_EQ(std::count(got.exponents.begin(), got.exponents.end(), -96), 2 * running.slots());
  EXPECT_EQ(std::count(got.norms.begin(), got.norms.end(), -96), 2 * running.slots());
}

TEST(Quantize, CodeEqualTensorScaleSeesDocumentsOnly) {
  Random random(6);
  const Pack pack = pack_of({20, 30}, 8);
  Tensor x = heavy_tailed(random, 58, 2, 64, 1);
  const Case c{.recipe = recipes::fp8_tensor, .role = Role::kK, .pack = pack};
  const Buffers clean = library(c, x.view());
  for (int head = 0; head < 2; ++head) std::fill_n(x.row(55, head), 64, 0x7F00);
  EXPECT_EQ(library(c, x.view()), clean);
  x.row(25, 1)[3] = 0x4800;  // inside a document, of the other head: every scale follows
  const Buffers louder = library(c, x.view());
  EXPECT_NE(louder.scale, clean.scale);
  EXPECT_FLOAT_EQ(louder.scale[0] * 448.0f, value_of_bf16(0x4800));
}

TEST(Quantize, BoundedNormExponentEnclosesTheNorm) {
  // Chains of dim / 4 FMAs and two additions, each within 2^-24: the sum of squares is relatively
  // within (dim / 4 + 2) 2^-24, its root within half of that.
  Random random(7);
  const int dim = 128;
  const Pack pack = pack_of({300});
  const Case c{.recipe = recipes::fp8, .role = Role::kV, .pack = pack};
  const Tensor x = heavy_tailed(random, 300, 1, dim, 5);
  const Buffers got = library(c, x.view());
  const double slack = 1 + (dim / 4 + 2) * 0x1p-25;
  int num_zero = 0;
  for (int t = 0; t < 300; ++t) {
    double sum = 0;
    for (int i = 0; i < dim; ++i) sum += std::pow(value_of_signed_code(got.codes[t * dim + i]), 2);
    if (sum == 0) {
      ++num_zero;
      EXPECT_EQ(got.norms[t], -96);
      continue;
    }
    const double norm = std::ldexp(std::sqrt(sum), got.exponents[t]);
    EXPECT_LE(norm, std::ldexp(slack, got.norms[t]));
    EXPECT_GT(norm * slack, std::ldexp(0.5, got.norms[t]));
  }
  EXPECT_GT(num_zero, 3);
}

TEST(Exponents, BitEqualWorkedExamples) {
  const auto up = [](float a) { return stages::token_exponent(ExponentRule::kRoundUp, a); };
  const auto floor = [](float a) { return stages::token_exponent(ExponentRule::kFloor, a); };
  EXPECT_EQ(up(448), 0);
  EXPECT_EQ(up(std::nextafter(448.0f, 500.0f)), 1);
  EXPECT_EQ(up(460), 1);
  EXPECT_EQ(up(896), 1);
  EXPECT_EQ(up(900), 2);
  EXPECT_EQ(floor(460), 0);
  EXPECT_EQ(floor(511), 0);
  EXPECT_EQ(floor(512), 1);
  EXPECT_EQ(up(0), -96);
  EXPECT_EQ(up(0x1p-149f), -96);
  EXPECT_EQ(up(0x1p127f), 96);
  EXPECT_EQ(up(kInfinity), 127);
  EXPECT_EQ(up(kNan), 127);

  for (int e = -96; e <= 96; ++e) {
    const int running = stages::running_exponent(e);
    EXPECT_EQ(running % 4, 0);
    EXPECT_GE(running, e);
    EXPECT_LT(running, e + 4);
  }
  EXPECT_EQ(stages::running_exponent(127), 127);

  EXPECT_EQ(stages::norm_exponent(1.0f, 0), 0);
  EXPECT_EQ(stages::norm_exponent(4.0f, 3), 4);
  EXPECT_EQ(stages::norm_exponent(std::nextafter(4.0f, 5.0f), 3), 5);
  EXPECT_EQ(stages::norm_exponent(2.0f, 0), 1);
  EXPECT_EQ(stages::norm_exponent(0.25f, 0), -1);
  EXPECT_EQ(stages::norm_exponent(0.5f, 0), 0);
  EXPECT_EQ(stages::norm_exponent(0.0f, 50), -96);
  EXPECT_EQ(stages::norm_exponent(0x1p60f, 120), 126);
  EXPECT_EQ(stages::norm_exponent(1.0f, 127), 126);
  EXPECT_EQ(stages::norm_exponent(0.25f, 127), 126);
  EXPECT_EQ(stages::norm_exponent(kNan, 0), 127);
  EXPECT_EQ(stages::norm_exponent(kInfinity, 0), 127);
}

TEST(Quantize, BitEqualMisuseIsRefused) {
  const Pack pack = pack_of({4});
  const Tensor x(4, 1, 8), longer(5, 1, 8);
  Buffers out(pack.k_slots, 1, 8, false, false);
  EXPECT_THROW(quantize(recipes::bf16, Role::kK, x.view(), pack, false, 1, out.operand), Error);
  EXPECT_THROW(quantize(recipes::fp8, Role::kK, longer.view(), pack, false, 1, out.operand), Error);
  EXPECT_THROW(quantize(recipes::fp8_tensor, Role::kK, x.view(), pack, false, 1, out.operand),
               Error);
  Buffers with_scale(pack.k_slots, 1, 8, false, true);
  EXPECT_THROW(quantize(recipes::fp8, Role::kK, x.view(), pack, false, 1, with_scale.operand),
               Error);
  Buffers with_both(pack.k_slots, 1, 8, true, true);
  EXPECT_THROW(quantize(recipes::fp8_tensor, Role::kK, x.view(), pack, false, 1, with_both.operand),
               Error);
  out.operand.slots -= 16;
  EXPECT_THROW(quantize(recipes::fp8, Role::kK, x.view(), pack, false, 1, out.operand), Error);
  EXPECT_EQ(out.codes, Buffers(pack.k_slots, 1, 8, false, false).codes);  // nothing was written
}

}  // namespace
}  // namespace mxattn::quantize_test
