// The order of work changes no bit: every order of the plan, reversed and shuffled lists, items of
// one tile or two, lists made in advance or by the backend.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>

#include "kernels/cpu/faithful.h"
#include "plan/plan.h"
#include "support/attention_case.h"
#include "support/inputs.h"

namespace mxattn::test {
namespace {

using kernels::faithful_backend;

const plan::Plans* g_plans = nullptr;  // what planned_backend() hands over

/// The fast backend with the lists of g_plans.
const kernels::Backend& planned_backend() {
  static constexpr kernels::Backend kBackend{
      "planned", nullptr,
      [](const kernels::Problem& problem, const kernels::ForwardArgs& args) {
        kernels::Problem planned = problem;
        planned.plans = g_plans;
        faithful_backend().forward(planned, args);
      },
      [](const kernels::Problem& problem, const kernels::BackwardArgs& args) {
        kernels::Problem planned = problem;
        planned.plans = g_plans;
        faithful_backend().backward(planned, args);
      }};
  return kBackend;
}

plan::Plan list_of(const AttentionCase& test, plan::Pass pass, plan::Order order, int tile) {
  plan::PlanSpec spec;
  spec.pass = pass;
  spec.heads_q = test.spec().heads_q;
  spec.heads_k = test.spec().heads_k;
  spec.tile = pass == plan::Pass::kDkv ? 128 : tile;
  spec.order = order;
  return plan::make_plan(test.pack(), test.spec().mask, spec);
}

plan::Plans lists_of(const AttentionCase& test, plan::Order order, int tile) {
  return {list_of(test, plan::Pass::kForward, order, tile),
          list_of(test, plan::Pass::kDq, order, tile),
          list_of(test, plan::Pass::kDkv, order, tile)};
}

template <class Change>
void change_all(plan::Plans& plans, const Change& change) {
  for (plan::Plan* list : {&plans.forward, &plans.dq, &plans.dkv}) change(list->items);
}

void expect_same_bits(const CaseSpec& spec) {
  AttentionCase test(spec);
  fill_normal(test, 3);
  const Result want = test.run(faithful_backend());
  const auto expect = [&](const plan::Plans& plans, int threads, const std::string& what) {
    g_plans = &plans;
    EXPECT_EQ(test.run(planned_backend(), threads), want) << what;
    g_plans = nullptr;
  };

  kernels::Problem problem = test.problem();
  expect(faithful_backend().make_plans(problem), 1, "in advance");
  for (const plan::Order order : plan::kAllOrders) {
    expect(lists_of(test, order, 256), 1, plan::name_of(order));
  }
  plan::Plans plans = lists_of(test, plan::Order::kInput, 128);
  expect(plans, 2, "items of one tile");
  change_all(plans, [](auto& items) { std::reverse(items.begin(), items.end()); });
  expect(plans, 1, "reversed");
  change_all(plans, [](auto& items) { std::shuffle(items.begin(), items.end(), std::mt19937(5)); });
  expect(plans, 3, "shuffled");

  // The lists are read: without an item of each, something stays unwritten.
  change_all(plans, [](auto& items) { items.pop_back(); });
  g_plans = &plans;
  const Result partial = test.run(planned_backend());
  g_plans = nullptr;
  EXPECT_NE(partial.out, want.out);
  EXPECT_NE(partial.dq, want.dq);
  EXPECT_NE(partial.dk, want.dk);
}

TEST(Orders, BitEqualUnderEveryOrder) {
  expect_same_bits({.recipe = recipes::fp8,
                    .q_lens = {600, 0, 1, 129, 300},
                    .heads_q = 2,
                    .heads_k = 1,
                    .dim = 64,
                    .spare = 3});
}

TEST(Orders, BitEqualWithWindowsAndOtherKeyLengths) {
  expect_same_bits({.recipe = recipes::mxfp8,
                    .q_lens = {400, 130, 70},
                    .k_lens = {300, 260, 0},
                    .heads_q = 2,
                    .heads_k = 2,
                    .dim = 64,
                    .mask = {.causal = true, .window_left = 150}});
}

TEST(Orders, BitEqualWithoutQuantisation) {
  expect_same_bits({.recipe = recipes::bf16, .q_lens = {300, 200}, .dim = 64, .mask = {}});
}

}  // namespace
}  // namespace mxattn::test
