// The C interface of mxattn/plan.h: work lists, simulated.
#include <mxattn/plan.h>

#include <algorithm>
#include <span>

#include "api/abi.h"
#include "base/error.h"
#include "plan/simulate.h"

namespace mxattn::api {

/// Orders and items are recomputed when asked for: the plan is a pure function of these.
struct Schedule {
  Pack pack;
  Mask mask;
  plan::PlanSpec spec;
  int workers = 0;
  plan::Choice choice;
};

namespace {

using plan::Order;
using plan::Pass;

Pass pass_of(std::int32_t pass) {
  switch (pass) {
    case MXATTN_PASS_FORWARD:
      return Pass::kForward;
    case MXATTN_PASS_DQ:
      return Pass::kDq;
    case MXATTN_PASS_DKV:
      return Pass::kDkv;
    default:
      require(false, "pass", pass, "MXATTN_PASS_FORWARD, MXATTN_PASS_DQ or MXATTN_PASS_DKV");
      return Pass::kForward;
  }
}

const char* summary_of(Order order) {
  switch (order) {
    case Order::kInput:
      return "by head, document and position; dealt out in turn";
    case Order::kLongFirst:
      return "by head and document, the costliest first inside it; a free worker takes the next";
    case Order::kSortedRoundRobin:
      return "the costliest first; dealt out in turn";
    case Order::kSerpentine:
      return "the costliest first; dealt out in turn, every second round backwards";
    case Order::kSortedDynamic:
      return "the costliest first; a free worker takes the next";
  }
  return "";
}

std::span<const std::int32_t> cu_seqlens(const char* name, const std::int32_t* data,
                                         std::int32_t num_documents) {
  require(data != nullptr, name, "null", "an address");
  return {data, static_cast<std::size_t>(num_documents) + 1};
}

Schedule make_schedule(const mxattn_schedule_config& config) {
  require(config.num_documents >= 1, "num_documents", config.num_documents, "at least 1");
  const auto q = cu_seqlens("cu_seqlens_q", config.cu_seqlens_q, config.num_documents);
  const auto k = config.cu_seqlens_k == nullptr
                     ? q
                     : cu_seqlens("cu_seqlens_k", config.cu_seqlens_k, config.num_documents);
  require(config.causal == 0 or config.causal == 1, "causal", config.causal, "0 or 1");
  require(config.window_left >= -1, "window_left", config.window_left, "-1 or more");
  require(config.window_right >= -1, "window_right", config.window_right, "-1 or more");

  Schedule schedule;
  schedule.pack = make_pack(q, k, q.back(), k.back());
  schedule.mask = {config.causal == 1, config.window_left, config.window_right};
  schedule.spec.pass = pass_of(config.pass);
  schedule.spec.heads_q = config.heads_q;
  schedule.spec.heads_k = config.heads_k;
  schedule.spec.tile = config.tile;
  schedule.spec.heads_per_group = config.heads_per_group;
  schedule.spec.cost = {config.cost_per_tile, config.cost_per_item};
  schedule.workers = config.workers;
  schedule.choice =
      plan::choose_order(schedule.pack, schedule.mask, schedule.spec, schedule.workers);
  return schedule;
}

std::size_t order_index(const Schedule& schedule, std::int32_t index) {
  require(index >= 0 and static_cast<std::size_t>(index) < schedule.choice.orders.size(), "index",
          index, "0 to less than ", schedule.choice.orders.size());
  return static_cast<std::size_t>(index);
}

mxattn_schedule_info info_of(const Schedule& schedule) {
  const plan::Choice& choice = schedule.choice;
  const auto chosen =
      std::find_if(choice.orders.begin(), choice.orders.end(),
                   [&](const plan::OrderResult& result) { return result.order == choice.chosen; });
  return {.size = 0,
          .num_items = static_cast<std::int64_t>(choice.items),
          .total_cost = choice.total_cost,
          .largest_cost = choice.largest_cost,
          .lower_bound = choice.lower_bound,
          .packing_bound = choice.packing_bound,
          .num_orders = static_cast<std::int32_t>(choice.orders.size()),
          .chosen = static_cast<std::int32_t>(chosen - choice.orders.begin()),
          .reason = choice.reason.c_str()};
}

void write_items(const Schedule& schedule, std::int32_t index, mxattn_scheduled_item* items,
                 std::int64_t capacity) {
  require(capacity >= 0, "capacity", capacity, "0 or more");
  require(items != nullptr or capacity == 0, "items", "null", "an address");
  plan::PlanSpec spec = schedule.spec;
  spec.order = schedule.choice.orders[order_index(schedule, index)].order;
  const plan::Plan list = plan::make_plan(schedule.pack, schedule.mask, spec);
  const plan::Schedule times =
      plan::simulate(list.costs, plan::assignment_of(spec.order), schedule.workers);
  const auto count = std::min(static_cast<std::size_t>(capacity), list.items.size());
  for (std::size_t i = 0; i < count; ++i) {
    const plan::WorkItem& item = list.items[i];
    items[i] = {item.document,   item.head,     item.first,    item.count,
                times.worker[i], list.costs[i], times.start[i]};
  }
}

}  // namespace
}  // namespace mxattn::api

struct mxattn_schedule {
  mxattn::api::Schedule schedule;
};

extern "C" {

using namespace mxattn::api;

void mxattn_schedule_config_init(mxattn_schedule_config* config) {
  init_struct(config);
  if (config == nullptr) return;
  config->heads_q = config->heads_k = 1;
  config->window_left = config->window_right = -1;
  config->tile = 256;
  config->workers = 1;
  config->cost_per_tile = 1;
}

mxattn_status mxattn_schedule_create(const mxattn_schedule_config* config,
                                     mxattn_schedule** schedule) {
  return guarded([&] {
    mxattn::require(schedule != nullptr, "schedule", "null", "an address");
    *schedule = nullptr;
    *schedule = new mxattn_schedule{make_schedule(read_struct("config", config))};
  });
}

void mxattn_schedule_destroy(mxattn_schedule* schedule) { delete schedule; }

mxattn_status mxattn_schedule_get_info(const mxattn_schedule* schedule,
                                       mxattn_schedule_info* info) {
  return guarded(
      [&] { write_struct("info", info, info_of(deref("schedule", schedule).schedule)); });
}

mxattn_status mxattn_schedule_order_at(const mxattn_schedule* schedule, int32_t index,
                                       mxattn_order_info* info) {
  return guarded([&] {
    const Schedule& all = deref("schedule", schedule).schedule;
    const mxattn::plan::OrderResult& result = all.choice.orders[order_index(all, index)];
    write_struct("info", info,
                 mxattn_order_info{.size = 0,
                                   .name = mxattn::plan::name_of(result.order),
                                   .summary = summary_of(result.order),
                                   .makespan = result.makespan,
                                   .makespan_over_bound = result.over_bound});
  });
}

mxattn_status mxattn_schedule_items(const mxattn_schedule* schedule, int32_t index,
                                    mxattn_scheduled_item* items, int64_t capacity) {
  return guarded(
      [&] { write_items(deref("schedule", schedule).schedule, index, items, capacity); });
}

}  // extern "C"
