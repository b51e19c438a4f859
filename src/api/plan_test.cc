// Work lists made in advance, and simulated, through the C interface.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <mxattn/plan.hpp>
#include <set>
#include <string>
#include <tuple>

#include "api/test_case.h"

namespace mxattn::test {
namespace {

Config config_of(const std::string& backend, const std::string& recipe = "fp8") {
  Config config = Case::default_config(recipe);
  config.backend = backend;
  return config;
}

void take(Case& c, const Plan& plan, bool keep_lengths) {
  for (mxattn_call* call : {&c.forward.call, &c.backward.call}) {
    call->plan = plan.handle();
    if (not keep_lengths) call->cu_seqlens_q = call->cu_seqlens_k = mxattn_tensor{};
  }
}

TEST(ApiPlan, BitEqualWithListsMadeInAdvance) {
  for (const char* backend : {"cpu", "cpu_exact"}) {
    for (const char* recipe : {"fp8", "mxfp8", "bf16"}) {
      SCOPED_TRACE(std::string(backend) + " " + recipe);
      const Config config = config_of(backend, recipe);
      Case want(config), without_lengths(config), with_lengths(config);
      want.run();
      // One plan, made for another problem of the same kind, for the calls of two.
      const Plan plan(want.problem, want.cu_q, want.cu_k);
      take(without_lengths, plan, false);
      without_lengths.run();
      EXPECT_EQ(without_lengths.written(), want.written());
      take(with_lengths, plan, true);
      with_lengths.run();
      EXPECT_EQ(with_lengths.written(), want.written());
    }
  }
}

TEST(ApiPlan, OutlivesTheProblemItWasMadeFor) {
  const Config config = config_of("cpu");
  Case c(config);
  std::vector<std::int32_t> lengths_q = c.cu_q, lengths_k = c.cu_k;
  auto problem = std::make_unique<Problem>(config);
  const Plan plan(*problem, lengths_q, lengths_k);
  problem.reset();
  lengths_q.assign(lengths_q.size(), -1);  // the plan has a copy
  lengths_k.assign(lengths_k.size(), -1);
  take(c, plan, true);
  c.run();
}

/// The message of a forward with a plan, which must write nothing.
std::string refusal(Case& c, const Plan& plan) {
  take(c, plan, true);
  const auto before = c.written();
  EXPECT_EQ(mxattn_forward(c.problem.handle(), &c.forward), MXATTN_INVALID_ARGUMENT);
  EXPECT_EQ(c.written(), before);
  return mxattn_last_error();
}

TEST(ApiPlan, RefusesThePlanOfAnotherProblem) {
  struct Change {
    std::function<void(Config&)> make;
    const char* message;
  };
  const Change changes[] = {
      {[](Config& x) { x.backend = "cpu_exact"; }, "made for backend = cpu_exact: expected cpu"},
      {[](Config& x) { x.total_q = 41; }, "made for total_q = 41: expected 40"},
      {[](Config& x) { x.total_k = 60; }, "made for total_k = 60: expected 50"},
      {[](Config& x) { x.heads_q = 2; }, "made for heads_q = 2: expected 4"},
      {[](Config& x) { x.heads_k = 1; }, "made for heads_k = 1: expected 2"},
      {[](Config& x) { x.head_dim = 64; }, "made for head_dim = 64: expected 32"},
      {[](Config& x) { x.causal = false; }, "made for causal = 0: expected 1"},
      {[](Config& x) { x.window_left = 5; }, "made for window_left = 5: expected -1"},
      {[](Config& x) { x.window_right = 5; }, "made for window_right = 5: expected -1"},
  };
  for (const Change& change : changes) {
    Config other = config_of("cpu");
    change.make(other);
    Case c(config_of("cpu"));
    const Plan plan(Problem(other), c.cu_q, c.cu_k);
    const std::string message = refusal(c, plan);
    EXPECT_NE(message.find(change.message), std::string::npos) << message;
  }
  Config other = config_of("cpu");
  other.num_documents = 1;
  Case c(config_of("cpu"));
  const Plan plan(Problem(other), std::vector<std::int32_t>{0, 37},
                  std::vector<std::int32_t>{0, 45});
  EXPECT_NE(refusal(c, plan).find("made for num_documents = 1: expected 3"), std::string::npos);
}

TEST(ApiPlan, RefusesOtherLengths) {
  Case c(config_of("cpu"));
  const Plan plan(c.problem, c.cu_q, c.cu_k);
  c.cu_q[1] = 19;
  EXPECT_EQ(refusal(c, plan), "cu_seqlens_q[1] = 19: expected 20, as call.plan was made with");
  c.cu_q[1] = 20;
  c.cu_k[3] = 50;
  EXPECT_EQ(refusal(c, plan), "cu_seqlens_k[3] = 50: expected 45, as call.plan was made with");
  EXPECT_THROW(Plan(c.problem, std::vector<std::int32_t>{0, 5}), Error);
  EXPECT_THROW(Plan(c.problem, std::vector<std::int32_t>{0, 5, 4, 6}), Error);
  mxattn_plan* handle = nullptr;
  const Tensor q = lengths(c.cu_q);
  EXPECT_EQ(mxattn_plan_create(nullptr, &q, nullptr, &handle), MXATTN_INVALID_ARGUMENT);
  EXPECT_EQ(mxattn_plan_create(c.problem.handle(), nullptr, nullptr, &handle),
            MXATTN_INVALID_ARGUMENT);
  EXPECT_EQ(mxattn_plan_create(c.problem.handle(), &q, nullptr, nullptr), MXATTN_INVALID_ARGUMENT);
  mxattn_plan_destroy(nullptr);
}

TEST(ApiPlan, LiesOnADeviceForProblemsOfADeviceOnly) {
  Case c(config_of("cpu"));
  EXPECT_EQ(Plan::device_bytes(c.problem), 0u);
  mxattn_device_plan_args args;
  mxattn_device_plan_args_init(&args);
  mxattn_plan* plan = nullptr;
  EXPECT_EQ(mxattn_plan_create_on_device(c.problem.handle(), &args, &plan),
            MXATTN_INVALID_ARGUMENT);
  EXPECT_EQ(plan, nullptr);
  EXPECT_STREQ(
      mxattn_last_error(),
      "problem = cpu: expected one on a device: mxattn_plan_create makes lists of the CPU");
  args.size = 3;
  EXPECT_EQ(mxattn_plan_create_on_device(c.problem.handle(), &args, &plan),
            MXATTN_INVALID_ARGUMENT);
}

TEST(ApiPlan, ChecksLengthsWhenAsked) {
  Case c(config_of("cpu"));
  const mxattn_call& call = c.forward.call;
  const auto check = [&](const mxattn_tensor* k) {
    return mxattn_check_cu_seqlens(c.problem.handle(), &call.cu_seqlens_q, k, nullptr);
  };
  EXPECT_EQ(check(&call.cu_seqlens_k), MXATTN_OK) << mxattn_last_error();
  c.cu_k.back() = 1 << 20;
  EXPECT_EQ(check(&call.cu_seqlens_k), MXATTN_INVALID_ARGUMENT);
  EXPECT_NE(std::string(mxattn_last_error()).find("cu_seqlens_k"), std::string::npos);
  EXPECT_EQ(mxattn_check_cu_seqlens(c.problem.handle(), nullptr, nullptr, nullptr),
            MXATTN_INVALID_ARGUMENT);
}

ScheduleConfig skewed() {
  ScheduleConfig config;
  config.cu_seqlens_q = {0, 8192};
  for (int i = 0; i < 224; ++i) config.cu_seqlens_q.push_back(config.cu_seqlens_q.back() + 256);
  config.heads_q = config.heads_k = 16;
  config.causal = true;
  config.workers = 132;
  return config;
}

TEST(ApiSchedule, TellsOrdersBoundsAndChoice) {
  const Schedule schedule(skewed());
  const auto orders = schedule.orders();
  const mxattn_schedule_info info = schedule.info();
  ASSERT_EQ(orders.size(), 5u);
  EXPECT_STREQ(orders[0].name, "input");
  EXPECT_NEAR(orders[0].makespan_over_bound, 1.190, 0.0005);
  ASSERT_EQ(info.chosen, 4);
  EXPECT_STREQ(orders[4].name, "sorted-dynamic");
  EXPECT_NEAR(orders[4].makespan_over_bound, 1.004, 0.0005);
  EXPECT_EQ(info.num_items, 16 * (32 + 224));
  EXPECT_EQ(info.largest_cost, 127u);
  EXPECT_DOUBLE_EQ(info.lower_bound, static_cast<double>(info.total_cost) / 132);
  EXPECT_GE(info.packing_bound, info.lower_bound);
  EXPECT_NE(std::string(info.reason).find("sorted-dynamic"), std::string::npos);
}

TEST(ApiSchedule, ItemsAreTheSameWorkInEveryOrder) {
  const Schedule schedule(skewed());
  std::set<std::tuple<int, int, int, int, unsigned>> work[5];
  for (int order = 0; order < 5; ++order) {
    std::uint64_t end = 0;
    for (const auto& item : schedule.items(order)) {
      work[order].emplace(item.document, item.head, item.first, item.count, item.cost);
      EXPECT_LT(item.worker, 132);
      end = std::max(end, item.start + item.cost);
    }
    EXPECT_EQ(end, schedule.orders()[static_cast<std::size_t>(order)].makespan);
    EXPECT_EQ(work[order], work[0]);
  }
  EXPECT_EQ(work[0].size(), 4096u);
  EXPECT_EQ(schedule.items(4)[0].first, 8192 - 256);  // the costliest first
}

TEST(ApiSchedule, RefusesBadInput) {
  const auto message = [](const std::function<void(ScheduleConfig&)>& change) -> std::string {
    ScheduleConfig config = skewed();
    change(config);
    try {
      Schedule schedule(config);
    } catch (const Error& error) {
      EXPECT_EQ(error.status(), MXATTN_INVALID_ARGUMENT);
      return error.what();
    }
    return "accepted";
  };
  EXPECT_EQ(message([](auto& c) { c.workers = 0; }), "workers = 0: expected at least 1");
  EXPECT_EQ(message([](auto& c) { c.pass = 3; }),
            "pass = 3: expected MXATTN_PASS_FORWARD, MXATTN_PASS_DQ or MXATTN_PASS_DKV");
  EXPECT_EQ(message([](auto& c) { c.heads_k = 5; }),
            "heads_k = 5: expected a divisor of heads_q = 16");
  EXPECT_EQ(message([](auto& c) { c.window_left = -2; }), "window_left = -2: expected -1 or more");
  EXPECT_NE(message([](auto& c) { c.cu_seqlens_q[3] = 1; }).find("cu_seqlens_q"),
            std::string::npos);
  EXPECT_NE(message([](auto& c) { c.cu_seqlens_q.clear(); }), "accepted");
  EXPECT_NE(message([](auto& c) { c.cu_seqlens_k = {0, 1}; }), "accepted");

  const Schedule schedule(skewed());
  EXPECT_THROW(schedule.items(5), Error);
  EXPECT_THROW(schedule.items(-1), Error);
  mxattn_schedule_config c{};
  mxattn_schedule* handle = nullptr;
  EXPECT_EQ(mxattn_schedule_create(&c, &handle), MXATTN_INVALID_ARGUMENT);  // no size
  EXPECT_EQ(handle, nullptr);
  mxattn_schedule_destroy(nullptr);
}

}  // namespace
}  // namespace mxattn::test
