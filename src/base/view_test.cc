#include "base/view.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>

namespace mxattn {
namespace {

TEST(TensorView, SaysWhetherEveryRowIsAligned) {
  alignas(16) std::array<std::uint16_t, 64> data{};
  const auto aligned = [&](int offset, int token_stride, int head_stride) {
    return TensorView<std::uint16_t>{data.data() + offset, 2, 2, 8, token_stride, head_stride}
        .has_aligned_rows();
  };
  EXPECT_TRUE(aligned(0, 16, 8));
  EXPECT_TRUE(aligned(8, 16, 8));
  EXPECT_FALSE(aligned(1, 16, 8));
  EXPECT_FALSE(aligned(4, 16, 8));
  EXPECT_FALSE(aligned(0, 20, 8));
  EXPECT_FALSE(aligned(0, 16, 12));
  // Strides count elements: four floats are 16 bytes.
  alignas(16) std::array<float, 8> floats{};
  EXPECT_TRUE((TensorView<float>{floats.data(), 2, 1, 4, 4, 4}.has_aligned_rows()));
  EXPECT_FALSE((TensorView<float>{floats.data(), 2, 1, 4, 6, 4}.has_aligned_rows()));
}

}  // namespace
}  // namespace mxattn
