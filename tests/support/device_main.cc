// The main of device tests. A run in which cases skipped, as all do without a device, must not read
// as one that passed: it ends with the code that ctest shows as skipped (cmake/MxattnCuda.cmake).
#include <gtest/gtest.h>

#include <cstdio>

namespace {
constexpr int kSkipped = 77;
}

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  const int status = RUN_ALL_TESTS();
  const int skipped = testing::UnitTest::GetInstance()->skipped_test_count();
  if (status != 0 or skipped == 0) return status;
  std::printf("%d tests were skipped\n", skipped);
  return kSkipped;
}
