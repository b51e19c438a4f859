#include "recipe/stages.h"

#include <gtest/gtest.h>

namespace mxattn::stages {
namespace {

TEST(Promotion, HappensOnceInEveryPeriodForEachSumAndHalf) {
  for (int half = 0; half < 2; ++half) {
    int dv = 0, dk = 0;
    for (int step = 5; step < 5 + kPromotionSteps; ++step) {
      dv += promotes_dv(step, half);
      dk += promotes_dk(step, half);
      // A warpgroup never promotes both at once, nor both warpgroups the same.
      EXPECT_FALSE(promotes_dv(step, half) and promotes_dk(step, half)) << step;
      EXPECT_FALSE(promotes_dv(step, 0) and promotes_dv(step, 1)) << step;
    }
    EXPECT_EQ(dv, 1);
    EXPECT_EQ(dk, 1);
  }
}

TEST(Promotion, FollowsFromTheStepWhetherASumHasBegun) {
  for (const int place : {dv_promotion(0), dv_promotion(1), dk_promotion(0), dk_promotion(1)}) {
    for (int begin = 0; begin < 2 * kPromotionSteps; ++begin) {
      for (const int steps : {1, 2, 3, 31, 32, 33, 70}) {
        for (const int heads : {1, 2, 3}) {
          bool promoted = false;
          for (int i = 0; i <= heads * steps; ++i) {
            ASSERT_EQ(was_promoted(place, begin, steps, i), promoted)
                << "place " << place << ", begin " << begin << ", " << steps << " steps, i " << i;
            const bool head_begins = i % steps == 0;
            const bool due = (begin + i % steps) % kPromotionSteps == place;
            promoted = promoted or (i > 0 and (head_begins or due));
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace mxattn::stages
