// What a plan takes on M equal workers, by its own costs: makespans and lower bounds.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "plan/plan.h"

namespace mxattn::plan {

/// Who does each item of a list, and when it starts.
struct Schedule {
  std::vector<std::int32_t> worker;
  std::vector<std::uint64_t> start;
  std::uint64_t makespan = 0;
};

/// Static: each worker does its items of the list one after the other. Dynamic: the worker that is
/// free first, among equals the one with the smallest number, takes the next item.
Schedule simulate(std::span<const std::uint32_t> costs, Assignment assignment, int workers);

/// No schedule ends before max(total / workers, largest cost).
double lower_bound(std::span<const std::uint32_t> costs, int workers);

/// A bound at least as high, which also knows that items cannot be cut: with M workers and one more
/// item than M, somebody does two. The sorted dynamic order ends within 4/3 of it, always.
double packing_bound(std::span<const std::uint32_t> costs, int workers);

/// One order of compare_orders.
struct OrderResult {
  Order order = Order::kInput;
  std::uint64_t makespan = 0;
  double over_bound = 1;  // makespan / lower_bound; 1 when there is nothing to do
};

/// The simulated orders, all of kAllOrders in their order, and the one to take.
struct Choice {
  std::vector<OrderResult> orders;
  Order chosen = Order::kInput;
  std::string reason;  // one sentence

  std::size_t items = 0;
  std::uint64_t total_cost = 0;
  std::uint32_t largest_cost = 0;
  double lower_bound = 0;
  double packing_bound = 0;
};

/// Simulates every order on `workers` workers and chooses one that is never worse than the input
/// order and at most 1 % worse than the best. Among those, dynamic orders come first where work is
/// uneven (causal, or the longest document at least 4 times the mean), since they also even out
/// what costs do not tell; else the order that needs neither counter nor sorting comes first.
/// The spec's order is not read.
Choice choose_order(const Pack& pack, const Mask& mask, const PlanSpec& spec, int workers);

}  // namespace mxattn::plan
