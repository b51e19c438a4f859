// What may not change the bits of an operand: later tokens, other documents, threads, strides, rows
// outside documents.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>

#include "quantize/quantize.h"
#include "recipe/roles.h"
#include "support/operands.h"

namespace mxattn::quantize_test {
namespace {

/// Codes, exponents and norms of one document's tokens, head by head.
std::vector<int> bits_of_document(const Case& c, const Buffers& buffers, int document, int begin,
                                  int end) {
  std::vector<int> bits;
  const Operand& operand = buffers.operand;
  const std::int64_t slot = c.slot(c.pack.documents[static_cast<std::size_t>(document)]);
  for (int head = 0; head < operand.heads; ++head) {
    for (int t = begin; t < end; ++t) {
      const std::uint8_t* row = operand.row(head, slot + t);
      bits.insert(bits.end(), row, row + operand.dim);
      bits.push_back(operand.exponents_of(head)[slot + t]);
      if (operand.norms != nullptr) bits.push_back(operand.norms_of(head)[slot + t]);
    }
  }
  return bits;
}

TEST(Quantize, BitEqualCausality) {
  Random random(11);
  const std::vector<int> lengths{200, 400};
  const Recipe kinds[] = {recipes::fp8, recipes::mxfp8_token, recipes::mxfp8, recipes::mxfp8_floor,
                          recipes::fp8_tensor};
  for (const Recipe& recipe : kinds) {
    int num_leaks = 0;
    for (const Role role : {Role::kQ, Role::kV}) {
      const Case c{.recipe = recipe, .role = role, .pack = pack_of(lengths), .rotate = true};
      const Tensor x = heavy_tailed(random, 600, 2, 128, 2);
      const Buffers base = library(c, x.view());
      for (const int t0 : {17, 100, 150, 199, 327, 328, 329, 500, 550}) {
        const int document = t0 < 200 ? 0 : 1, local = t0 < 200 ? t0 : t0 - 200;
        for (const int change : {0, 1, 2}) {  // louder, quieter, NaN
          Tensor y = x;
          for (int t = t0; t < 200 + 400 * document; ++t) {
            for (int head = 0; head < 2; ++head) {
              for (int i = 0; i < 128; ++i) {
                std::uint16_t& value = y.row(t, head)[i];
                const float factor = change == 0 ? std::pow(10.0f, draw(random, 1, 4)) : 0x1p-9f;
                value = change == 2 ? 0x7FC0 : nearest_bf16(value_of_bf16(value) * factor);
              }
            }
          }
          const Buffers got = library(c, y.view());
          const bool same = bits_of_document(c, got, document, 0, local) ==
                            bits_of_document(c, base, document, 0, local);
          if (recipe.strictly_causal()) {
            ASSERT_TRUE(same) << "t0 " << t0 << " change " << change;
          }
          num_leaks += not same;
          ASSERT_NE(bits_of_document(c, got, document, local, lengths[document]),
                    bits_of_document(c, base, document, local, lengths[document]));
          if (recipe.scale_group == ScaleGroup::kTensor) continue;
          ASSERT_EQ(bits_of_document(c, got, 1 - document, 0, lengths[1 - document]),
                    bits_of_document(c, base, 1 - document, 0, lengths[1 - document]));
        }
      }
    }
    // The inputs are hard: scales that look ahead do leak on them.
    if (not recipe.strictly_causal()) {
      EXPECT_GT(num_leaks, 10) << info_of(recipe).name;
    }
  }
}

TEST(Quantize, BitEqualDocumentAloneAndInAPack) {
  Random random(12);
  const std::vector<int> lengths{0, 1, 31, 32, 33, 127, 128, 129, 300};
  for (const Recipe& recipe : {recipes::fp8, recipes::mxfp8, recipes::mxfp8_token}) {
    for (const Role role : {Role::kK, Role::kV}) {
      const Case together{
          .recipe = recipe, .role = role, .pack = pack_of(lengths, 7), .rotate = true};
      const Tensor x = heavy_tailed(random, together.tokens(), 2, 128, 4);
      const Buffers all = library(together, x.view());
      for (std::size_t i = 0; i < lengths.size(); ++i) {
        const Case alone{
            .recipe = recipe, .role = role, .pack = pack_of({lengths[i]}), .rotate = true};
        TensorView<const std::uint16_t> view = x.view();
        view.data = view.row(together.token(together.pack.documents[i]), 0);
        view.tokens = lengths[i];
        const Buffers one = library(alone, view);
        ASSERT_EQ(bits_of_document(alone, one, 0, 0, lengths[i]),
                  bits_of_document(together, all, static_cast<int>(i), 0, lengths[i]));
      }
    }
  }
}

TEST(Quantize, BitEqualThreadCounts) {
  Random random(13);
  for (const Recipe& recipe :
       {recipes::fp8, recipes::mxfp8, recipes::mxfp8_token, recipes::fp8_tensor}) {
    for (int repeat = 0; repeat < 5; ++repeat) {
      const Case c{.recipe = recipe,
                   .role = repeat % 2 == 0 ? Role::kQ : Role::kV,
                   .pack = random_pack(random, 700),
                   .rotate = true};
      const Tensor x = heavy_tailed(random, c.tokens(), 3, 128, 4);
      const Buffers one = library(c, x.view(), 1);
      EXPECT_EQ(library(c, x.view(), 2), one);
      EXPECT_EQ(library(c, x.view(), 3), one);
    }
  }
}

TEST(Quantize, BitEqualViewsOfAFusedBuffer) {
  Random random(14);
  const int heads = 3, dim = 64;
  const Pack pack = pack_of({50, 77}, 4);
  // (tokens, 3, heads, dim): Q, K and V side by side.
  const Tensor fused = heavy_tailed(random, pack.total_q, 3 * heads, dim, 3);
  for (int part = 0; part < 3; ++part) {
    const Role role = part == 0 ? Role::kQ : part == 1 ? Role::kK : Role::kV;
    const Case c{.recipe = recipes::fp8, .role = role, .pack = pack, .rotate = true};
    Tensor own(pack.total_q, heads, dim);
    for (std::int64_t t = 0; t < own.tokens; ++t) {
      for (int head = 0; head < heads; ++head) {
        std::copy_n(fused.view().row(t, part * heads + head), dim, own.row(t, head));
      }
    }
    TensorView<const std::uint16_t> view = fused.view();
    view.data = view.row(0, part * heads);
    view.heads = heads;
    EXPECT_EQ(library(c, view), library(c, own.view()));
    // Heads outermost.
    std::vector<std::uint16_t> turned;
    for (int head = 0; head < heads; ++head) {
      for (std::int64_t t = 0; t < own.tokens; ++t) {
        turned.insert(turned.end(), own.row(t, head), own.row(t, head) + dim);
      }
    }
    EXPECT_EQ(library(c, {turned.data(), own.tokens, heads, dim, dim, own.tokens * dim}),
              library(c, own.view()));
  }
}

TEST(Quantize, BitEqualOffsetsBeyond31Bits) {
  // Four tokens, 2^31 + 64 elements apart, in an address range of which only some pages exist.
  constexpr std::int64_t kStride = (std::int64_t{1} << 31) + 64;
  constexpr int kTokens = 4, kDim = 32;
  constexpr std::size_t kBytes = (kStride * (kTokens - 1) + 4096) * sizeof(float);
  void* const region = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (region == MAP_FAILED) GTEST_SKIP() << "no " << kBytes << " bytes of address space";

  Random random(15);
  Tensor x = heavy_tailed(random, kTokens, 1, kDim, 3);
  auto* const far = static_cast<std::uint16_t*>(region);
  for (int t = 0; t < kTokens; ++t) std::copy_n(x.row(t, 0), kDim, far + t * kStride);
  const Case c{.recipe = recipes::fp8, .role = Role::kV, .pack = pack_of({1, 3})};
  const Buffers near = library(c, x.view());
  EXPECT_EQ(library(c, {far, kTokens, 1, kDim, kStride, kDim}), near);

  std::vector<float> restored(kTokens * kDim);
  restore(near.operand, c.role, c.pack, false, 1, {restored.data(), kTokens, 1, kDim, kDim, kDim});
  auto* const far_restored = static_cast<float*>(region);
  restore(near.operand, c.role, c.pack, false, 1, {far_restored, kTokens, 1, kDim, kStride, kDim});
  for (int t = 0; t < kTokens; ++t) {
    EXPECT_TRUE(std::equal(restored.begin() + t * kDim, restored.begin() + (t + 1) * kDim,
                           far_restored + t * kStride));
  }
  munmap(region, kBytes);
}

TEST(Quantize, BitEqualBuffersLargerThanThePack) {
  Random random(17);
  const Case c{.recipe = recipes::fp8, .role = Role::kV, .pack = pack_of({20, 40}, 3)};
  const Tensor x = heavy_tailed(random, 63, 2, 64, 3);
  const Buffers exact = library(c, x.view());
  Buffers larger(c.slots() + 48, 2, 64, true, false);
  quantize(c.recipe, c.role, x.view(), c.pack, false, 2, larger.operand);
  for (int document = 0; document < 2; ++document) {
    const int length = c.length(c.pack.documents[static_cast<std::size_t>(document)]);
    EXPECT_EQ(bits_of_document(c, larger, document, 0, length),
              bits_of_document(c, exact, document, 0, length));
  }
  for (int head = 0; head < 2; ++head) {
    for (std::int64_t slot = c.slots(); slot < c.slots() + 48; ++slot) {
      const std::uint8_t* row = larger.operand.row(head, slot);
      EXPECT_EQ(std::count(row, row + 64, 0), 64);
      EXPECT_EQ(larger.operand.exponents_of(head)[slot], -96);
      EXPECT_EQ(larger.operand.norms_of(head)[slot], -96);
    }
  }
}

TEST(Quantize, BitEqualRowsBeyondTheLastDocumentDoNotMatter) {
  Random random(16);
  const Pack pack = pack_of({60, 45}, 30);
  for (const Recipe& recipe :
       {recipes::fp8, recipes::mxfp8, recipes::mxfp8_token, recipes::fp8_tensor}) {
    for (const Role role : {Role::kQ, Role::kK, Role::kV, Role::kGradient}) {
      const Case c{.recipe = recipe, .role = role, .pack = pack, .rotate = true};
      Tensor x = heavy_tailed(random, 135, 2, 128, 3);
      const Buffers clean = library(c, x.view());
      std::fill(x.data.begin() + 105 * 2 * 128, x.data.end(), 0x7FC0);
      EXPECT_EQ(library(c, x.view()), clean);
    }
  }
}

}  // namespace
}  // namespace mxattn::quantize_test
