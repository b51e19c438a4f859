// What blocks of rows see of tiles, against every pair of row and position.
#include "kernels/sm90/block_scope.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace mxattn::kernels::sm90 {
namespace {

template <bool kKeys, int kTile>
void expect_as_counted(const Mask& mask, const Document& d, int first) {
  const BlockScope scope = block_scope<kKeys, kTile>(mask, d, first);
  const int rows = kKeys ? d.k_len : d.q_len;
  const int last = std::min(first + kBlockRows, rows);
  EXPECT_EQ(scope.full, first + kBlockRows <= rows);
  const auto seen = [&](int row) {
    return kKeys ? visible_queries(mask, d.q_len, d.k_len, row)
                 : visible_keys(mask, d.q_len, d.k_len, row);
  };
  const int positions = kKeys ? d.q_len : d.k_len;
  for (int tile = 0; tile <= positions / kTile; ++tile) {
    bool all = first < last, any = false;
    for (int row = first; row < last; ++row) {
      for (int at = tile * kTile; at < (tile + 1) * kTile; ++at) {
        const bool sees = seen(row).contains(at);
        all = all and sees;
        any = any or sees;
        EXPECT_TRUE(not sees or at < scope.end) << at;
      }
    }
    EXPECT_EQ(scope.whole.contains(tile), all) << "tile " << tile;
    EXPECT_EQ(scope.whole_of_full().contains(tile), all and scope.full) << "tile " << tile;
    EXPECT_TRUE(not any or scope.some.contains(tile)) << "tile " << tile;
  }
}

TEST(BlockScope, EqualToCountingPairs) {
  std::mt19937 random(1);
  const auto draw = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  for (int i = 0; i < 400; ++i) {
    Document d{};
    d.q_len = draw(0, 300);
    d.k_len = draw(0, 2) == 0 ? draw(0, 300) : d.q_len;
    Mask mask;
    mask.causal = draw(0, 2) != 0;
    if (draw(0, 2) == 0) mask.window_left = draw(0, 250);
    if (draw(0, 3) == 0) mask.window_right = draw(0, 250);
    SCOPED_TRACE(testing::Message()
                 << d.q_len << " queries, " << d.k_len << " keys, causal " << mask.causal
                 << ", window " << mask.window_left << " " << mask.window_right);
    const int first = kBlockRows * draw(0, 5);
    expect_as_counted<false, 128>(mask, d, first);
    expect_as_counted<true, 64>(mask, d, first);
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace mxattn::kernels::sm90
