// Shared-memory layouts against the manual's description, on the CPU.
#include "tile/swizzle.h"

#include <gtest/gtest.h>

#include <set>

#include "tile/fragment.h"

namespace mxattn::tile {
namespace {

TEST(Swizzle, BitEqualPermutationOfSixteenByteUnits) {
  for (const Swizzle swizzle : {Swizzle::k128, Swizzle::k64}) {
    const int bytes = row_bytes(swizzle);
    std::set<std::uint32_t> seen;
    for (int row = 0; row < 16; ++row) {
      for (int byte = 0; byte < bytes; ++byte) {
        const std::uint32_t offset = swizzled_offset(swizzle, row, byte);
        seen.insert(offset);
        // Bytes of a unit stay together, and in their row.
        EXPECT_EQ(offset % 16, static_cast<std::uint32_t>(byte % 16));
        EXPECT_EQ(offset / bytes, static_cast<std::uint32_t>(row));
        // The unit is XORed with the row inside the pattern, which repeats every 1024 or 512 bytes.
        const int pattern_row = row * bytes / 128 % (bytes / 16);
        EXPECT_EQ(offset % bytes / 16, static_cast<std::uint32_t>(byte / 16 ^ pattern_row));
      }
    }
    EXPECT_EQ(seen.size(), static_cast<std::size_t>(16 * bytes));
  }
}

TEST(Swizzle, BitEqualDescriptorFields) {
  const std::uint64_t wide = k_major_descriptor(Swizzle::k128, 0x2400);
  EXPECT_EQ(wide & 0x3FFF, 0x240u);       // address / 16
  EXPECT_EQ((wide >> 32) & 0x3FFF, 64u);  // eight rows of 128 bytes / 16
  EXPECT_EQ(wide >> 62, 1u);              // 128-byte swizzle
  EXPECT_EQ((wide >> 49) & 7, 0u);        // base offset: tiles start at multiples of 1024
  const std::uint64_t narrow = k_major_descriptor(Swizzle::k64, 0x2400);
  EXPECT_EQ((narrow >> 32) & 0x3FFF, 32u);
  EXPECT_EQ(narrow >> 62, 2u);
  EXPECT_EQ(kDescriptorStepK32 * 16, 32u);  // bytes
}

// An accumulator's registers, packed by pack_operand, are an A operand whose position p of 16
// holds column pi(p): lane l of a quad holds A columns 4 l .. 4 l + 3 of each 16 (PTX
// ISA 9.7.15.5.1).
TEST(Swizzle, BitEqualOrderOfPackedOperands) {
  // Registers in the order in which pack_operand takes those of the first row.
  constexpr int kTaken[2][4] = {{0, 1, 4, 5}, {8, 9, 12, 13}};
  for (int lane = 0; lane < 4; ++lane) {
    for (int half = 0; half < 2; ++half) {  // columns 0-15 and 16-31
      for (int b = 0; b < 4; ++b) {
        const int position = 16 * half + 4 * lane + b;
        EXPECT_EQ(pi_order(position), fragment_column(lane, kTaken[half][b]));
      }
    }
  }
}

TEST(Fragment, BitEqualEveryElementHasOneOwner) {
  std::set<std::pair<int, int>> seen;
  for (int thread = 0; thread < 128; ++thread) {
    for (int i = 0; i < 64; ++i) {
      seen.insert({fragment_row(thread, fragment_half(i)), fragment_column(thread, i)});
    }
  }
  EXPECT_EQ(seen.size(), 64u * 128u);
  EXPECT_EQ(seen.rbegin()->first, 63);
}

}  // namespace
}  // namespace mxattn::tile
