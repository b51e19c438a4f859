#include "base/rng.h"

#include <gtest/gtest.h>

#include <vector>

namespace mxattn {
namespace {

std::vector<std::uint32_t> words(PhiloxBlock block) {
  return {block.word[0], block.word[1], block.word[2], block.word[3]};
}

// The known answers that the generator's authors published.
TEST(Philox, BitEqualKnownAnswers) {
  EXPECT_EQ(words(philox4x32({{0, 0}}, {{0, 0, 0, 0}})),
            (std::vector<std::uint32_t>{0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8}));
  EXPECT_EQ(words(philox4x32({{~0u, ~0u}}, {{~0u, ~0u, ~0u, ~0u}})),
            (std::vector<std::uint32_t>{0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD}));
  EXPECT_EQ(words(philox4x32({{0xA4093822, 0x299F31D0}},
                             {{0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344}})),
            (std::vector<std::uint32_t>{0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1}));
}

static_assert(philox4x32({{0, 0}}, {{0, 0, 0, 0}}).word[0] == 0x6627E8D5);

}  // namespace
}  // namespace mxattn
