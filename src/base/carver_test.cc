#include "base/carver.h"

#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdint>

namespace mxattn {
namespace {

TEST(Carver, CountsWhatItHandsOut) {
  const auto walk = [](Carver<64>& carver) {
    const auto* const bytes = carver.take<std::uint8_t>(65);
    const auto* const floats = carver.take<float>(0);
    const auto* const words = carver.take<std::uint32_t>(std::int64_t{16});
    return std::array<const void*, 3>{bytes, floats, words};
  };
  Carver<64> sizes(nullptr);
  EXPECT_EQ(walk(sizes), (std::array<const void*, 3>{}));
  EXPECT_EQ(sizes.bytes(), 128 + 0 + 64);

  alignas(64) std::array<std::byte, 192> block;
  Carver<64> carver(block.data());
  EXPECT_EQ(walk(carver), (std::array<const void*, 3>{&block[0], &block[128], &block[128]}));
  EXPECT_EQ(carver.bytes(), sizes.bytes());
}

}  // namespace
}  // namespace mxattn
