// mxattn/plan.h in C++20: work lists of packed documents, made in advance or simulated.
//
//   const mxattn::Plan plan(problem, cu_seqlens);  // once for a microbatch
//   problem.forward({.call = {.state = state.buffers(), .plan = plan.handle()}, ...});
//
//   mxattn::ScheduleConfig config;
//   config.cu_seqlens_q = {0, 8192, 8448};
//   config.causal = true;
//   config.workers = 132;
//   mxattn::Schedule schedule(config);
//   schedule.orders()[schedule.info().chosen].name
#pragma once

#include <mxattn/plan.h>

#include <mxattn/mxattn.hpp>

namespace mxattn {
inline namespace public_api {

/// Lengths and work lists for Call::plan, made once and read by the calls of all layers.
class Plan {
 public:
  /// An empty cu_seqlens_k means that of the queries.
  explicit Plan(const Problem& problem, std::span<const std::int32_t> cu_seqlens_q,
                std::span<const std::int32_t> cu_seqlens_k = {}) {
    const Tensor q = lengths(cu_seqlens_q), k = lengths(cu_seqlens_k);
    mxattn_plan* handle = nullptr;
    detail::check(mxattn_plan_create(problem.handle(), &q, &k, &handle));
    handle_.reset(handle);
  }

  /// On a device: args as in mxattn_device_plan_args, whose memory and lengths the caller keeps.
  static std::uint64_t device_bytes(const Problem& problem) {
    std::uint64_t bytes = 0;
    detail::check(mxattn_plan_bytes(problem.handle(), &bytes));
    return bytes;
  }
  Plan(const Problem& problem, const mxattn_device_plan_args& args) {
    mxattn_plan* handle = nullptr;
    detail::check(mxattn_plan_create_on_device(problem.handle(), &args, &handle));
    handle_.reset(handle);
  }

  const mxattn_plan* handle() const { return handle_.get(); }

 private:
  struct Destroy {
    void operator()(mxattn_plan* plan) const { mxattn_plan_destroy(plan); }
  };
  std::unique_ptr<mxattn_plan, Destroy> handle_;
};

/// See mxattn_schedule_config for the meaning of every field.
struct ScheduleConfig {
  std::vector<std::int32_t> cu_seqlens_q;
  std::vector<std::int32_t> cu_seqlens_k;  // empty: that of the queries
  int heads_q = 1;
  int heads_k = 1;
  bool causal = false;
  int window_left = -1;
  int window_right = -1;
  int pass = MXATTN_PASS_FORWARD;
  int tile = 256;
  int heads_per_group = 0;
  int workers = 1;
  std::uint32_t cost_per_tile = 1;
  std::uint32_t cost_per_item = 0;
};

class Schedule {
 public:
  explicit Schedule(const ScheduleConfig& config) {
    if (config.cu_seqlens_q.empty() or (not config.cu_seqlens_k.empty() and
                                        config.cu_seqlens_k.size() != config.cu_seqlens_q.size())) {
      throw Error(MXATTN_INVALID_ARGUMENT,
                  "cu_seqlens: expected a first entry 0, and as many for keys as for queries");
    }
    mxattn_schedule_config c;
    mxattn_schedule_config_init(&c);
    c.cu_seqlens_q = config.cu_seqlens_q.data();
    c.cu_seqlens_k = config.cu_seqlens_k.empty() ? nullptr : config.cu_seqlens_k.data();
    c.num_documents = static_cast<std::int32_t>(config.cu_seqlens_q.size()) - 1;
    c.heads_q = config.heads_q;
    c.heads_k = config.heads_k;
    c.causal = config.causal ? 1 : 0;
    c.window_left = config.window_left;
    c.window_right = config.window_right;
    c.pass = config.pass;
    c.tile = config.tile;
    c.heads_per_group = config.heads_per_group;
    c.workers = config.workers;
    c.cost_per_tile = config.cost_per_tile;
    c.cost_per_item = config.cost_per_item;
    mxattn_schedule* handle = nullptr;
    detail::check(mxattn_schedule_create(&c, &handle));
    handle_.reset(handle);
  }

  mxattn_schedule_info info() const {
    mxattn_schedule_info info{};
    info.size = sizeof info;
    detail::check(mxattn_schedule_get_info(handle_.get(), &info));
    return info;
  }

  std::vector<mxattn_order_info> orders() const {
    std::vector<mxattn_order_info> list(static_cast<std::size_t>(info().num_orders));
    for (std::size_t i = 0; i < list.size(); ++i) {
      list[i].size = sizeof list[i];
      detail::check(
          mxattn_schedule_order_at(handle_.get(), static_cast<std::int32_t>(i), &list[i]));
    }
    return list;
  }

  /// The items of an order, in the order of its list.
  std::vector<mxattn_scheduled_item> items(int order) const {
    std::vector<mxattn_scheduled_item> list(static_cast<std::size_t>(info().num_items));
    detail::check(mxattn_schedule_items(handle_.get(), order, list.data(),
                                        static_cast<std::int64_t>(list.size())));
    return list;
  }

 private:
  struct Destroy {
    void operator()(mxattn_schedule* schedule) const { mxattn_schedule_destroy(schedule); }
  };
  std::unique_ptr<mxattn_schedule, Destroy> handle_;
};

}  // namespace public_api
}  // namespace mxattn
