// What the backend says of problems, without a device.
#include "kernels/sm90/attention.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "recipe/registry.h"

namespace mxattn::kernels::sm90 {
namespace {

DeviceProblem make_problem(std::int64_t total_q, std::int64_t total_k, int heads_q, int heads_k) {
  DeviceProblem device;
  device.problem.recipe = recipes::fp8;
  device.problem.heads_q = heads_q;
  device.problem.heads_k = heads_k;
  device.problem.dim = 128;
  device.num_documents = 1;
  device.total_q = total_q;
  device.total_k = total_k;
  device.compute_capability = 90;
  device.multiprocessors = 132;
  return device;
}

TEST(Supports, CountsThatFit32Bits) {
  const std::int64_t million = 1'000'000;
  EXPECT_EQ(backend().supports(make_problem(million, million, 128, 8)), "");
  EXPECT_EQ(backend().supports(make_problem(1000 * million, million, 64, 64)), "");
  // 2^24 steps of 64 queries for each of 128 heads: an item of keys counts 2^31 of them.
  const std::string steps = backend().supports(make_problem(std::int64_t{1} << 30, 1024, 128, 1));
  EXPECT_NE(steps.find("total_q = 1073741824"), std::string::npos) << steps;
  EXPECT_NE(steps.find("128 heads"), std::string::npos) << steps;
  // A chunk of keys that reaches past 2^31.
  EXPECT_NE(backend().supports(make_problem(1024, (std::int64_t{1} << 31) - 2000, 1, 1)), "");
}

TEST(Supports, NamesWhatItCannotRun) {
  DeviceProblem device = make_problem(1024, 1024, 16, 16);
  device.problem.dim = 96;
  EXPECT_NE(backend().supports(device).find("head_dim = 96"), std::string::npos);
  device.problem.dim = 128;
  device.problem.recipe = recipes::exact;
  EXPECT_NE(backend().supports(device).find("recipe exact"), std::string::npos);
  device.problem.recipe = recipes::fp8;
  device.compute_capability = 100;
  EXPECT_NE(backend().supports(device).find("10.0"), std::string::npos);
}

}  // namespace
}  // namespace mxattn::kernels::sm90
