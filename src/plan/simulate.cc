#include "plan/simulate.h"

#include <algorithm>
#include <functional>
#include <iomanip>
#include <numeric>
#include <queue>
#include <sstream>
#include <utility>

#include "base/error.h"

namespace mxattn::plan {
namespace {

void check_workers(int workers) { require(workers > 0, "workers", workers, "at least 1"); }

std::uint64_t total_of(std::span<const std::uint32_t> costs) {
  return std::accumulate(costs.begin(), costs.end(), std::uint64_t{0});
}

double ratio(std::uint64_t makespan, double bound) {
  return bound > 0 ? static_cast<double>(makespan) / bound : 1.0;
}

/// Whether costs alone say that workers would end at different times.
bool is_uneven(const Pack& pack, const Mask& mask, Pass pass) {
  if (mask.causal) return true;
  std::int64_t documents = 0, total = 0, longest = 0;
  for (const Document& document : pack.documents) {
    const std::int64_t length = pass == Pass::kDkv ? document.k_len : document.q_len;
    if (length == 0) continue;
    ++documents;
    total += length;
    longest = std::max(longest, length);
  }
  constexpr int kSkew = 4;
  return longest * documents >= kSkew * total and total > 0;
}

std::string fixed3(double x) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(3) << x;
  return text.str();
}

std::string reason_of(const OrderResult& chosen, const OrderResult& input, const OrderResult& best,
                      bool uneven, bool causal) {
  std::string text = detail::concat(name_of(chosen.order), " ends at ", fixed3(chosen.over_bound),
                                    " of the lower bound");
  if (chosen.order != Order::kInput) {
    text += detail::concat(", the input order at ", fixed3(input.over_bound));
  }
  if (chosen.makespan != best.makespan) {
    text += detail::concat("; ", name_of(best.order), " is less than 1 % better");
  }
  if (not uneven) return text + "; work is even, so the plainest such order is taken";
  const bool dynamic = assignment_of(chosen.order) == Assignment::kDynamic;
  text += causal ? "; causal work is uneven" : "; the longest document is 4 times the mean or more";
  return text + (dynamic ? ", so workers take items as they become free"
                         : ", but no dynamic order comes as close");
}

}  // namespace

Schedule simulate(std::span<const std::uint32_t> costs, Assignment assignment, int workers) {
  check_workers(workers);
  // Ties go to the smallest number, so n items reach the first n workers at most: memory follows
  // the list, whatever number of workers is asked for.
  workers = static_cast<int>(
      std::min(static_cast<std::size_t>(workers), std::max<std::size_t>(costs.size(), 1)));
  Schedule schedule;
  schedule.worker.resize(costs.size());
  schedule.start.resize(costs.size());
  const auto place = [&](std::size_t i, std::int32_t worker, std::uint64_t start) {
    schedule.worker[i] = worker;
    schedule.start[i] = start;
    const std::uint64_t end = start + costs[i];
    schedule.makespan = std::max(schedule.makespan, end);
    return end;
  };

  if (assignment == Assignment::kDynamic) {
    using Free = std::pair<std::uint64_t, std::int32_t>;  // when, who
    std::vector<Free> all;
    all.reserve(static_cast<std::size_t>(workers));
    for (std::int32_t w = 0; w < workers; ++w) all.emplace_back(0, w);
    std::priority_queue<Free, std::vector<Free>, std::greater<>> free(std::greater<>(),
                                                                      std::move(all));
    for (std::size_t i = 0; i < costs.size(); ++i) {
      const auto [when, who] = free.top();
      free.pop();
      free.emplace(place(i, who, when), who);
    }
  } else {
    std::vector<std::uint64_t> end(static_cast<std::size_t>(workers), 0);
    for (std::size_t i = 0; i < costs.size(); ++i) {
      const auto who = static_cast<std::int32_t>(
          static_worker(assignment, static_cast<std::int64_t>(i), workers));
      std::uint64_t& mine = end[static_cast<std::size_t>(who)];
      mine = place(i, who, mine);
    }
  }
  return schedule;
}

double lower_bound(std::span<const std::uint32_t> costs, int workers) {
  check_workers(workers);
  if (costs.empty()) return 0;
  const double mean = static_cast<double>(total_of(costs)) / workers;
  return std::max(mean, static_cast<double>(*std::max_element(costs.begin(), costs.end())));
}

// Let c_1 >= c_2 >= ... be the costs, M the workers and B the bound below.
//
// B is a lower bound. The first 2M + 1 items leave some worker with three of them, each at least
// c_{2M+1}. For j <= M look at the first M + j items. If some worker has three of them, it needs
// 3 c_{M+j} or more. If not, at most M - j workers have one item or none, so one of the M + 1 - j
// largest shares its worker with another of them, which takes c_{M+1-j} + c_{M+j} or more. So
// min(3 c_{M+j}, c_{M+1-j} + c_{M+j}) is a lower bound.
//
// The sorted dynamic order ends within 4/3 of B (Graham 1969, longest first, with B in place of
// the optimum). Let item n end last; forget the items after it, which does not raise B. It started
// when every worker was busy, so it ends by total/M + (1 - 1/M) c_n.
//   If 3 c_n <= B, that is B + B/3 at most.
//   If not, n <= 2M, for B >= 3 c_{2M+1}. With n <= M it ends at c_n <= B. Else let n = M + j.
//   Since 3 c_n > B, the minimum above is the pair, so c_{M+1-j} + c_n <= B. When n is taken, the j
//   workers of items M+1-j, ..., M have at most j - 1 second items between them, so one of them is
//   free at c_{M+1-j} or before, and n ends at c_{M+1-j} + c_n <= B.
double packing_bound(std::span<const std::uint32_t> costs, int workers) {
  check_workers(workers);
  std::vector<std::uint32_t> sorted(costs.begin(), costs.end());
  std::sort(sorted.begin(), sorted.end(), std::greater<>());
  const auto m = static_cast<std::size_t>(workers);
  double bound = lower_bound(costs, workers);
  for (std::size_t j = 1; j <= m and m + j <= sorted.size(); ++j) {
    const std::uint64_t small = sorted[m + j - 1];
    bound = std::max(bound, static_cast<double>(std::min(3 * small, sorted[m - j] + small)));
  }
  if (sorted.size() > 2 * m) bound = std::max(bound, 3.0 * sorted[2 * m]);
  return bound;
}

Choice choose_order(const Pack& pack, const Mask& mask, const PlanSpec& spec, int workers) {
  check_workers(workers);
  Choice choice;
  for (const Order order : kAllOrders) {
    PlanSpec ordered = spec;
    ordered.order = order;
    const Plan plan = make_plan(pack, mask, ordered);
    if (choice.orders.empty()) {
      choice.items = plan.items.size();
      choice.total_cost = total_of(plan.costs);
      for (const std::uint32_t cost : plan.costs) {
        choice.largest_cost = std::max(choice.largest_cost, cost);
      }
      choice.lower_bound = lower_bound(plan.costs, workers);
      choice.packing_bound = packing_bound(plan.costs, workers);
    }
    const std::uint64_t makespan = simulate(plan.costs, assignment_of(order), workers).makespan;
    choice.orders.push_back({order, makespan, ratio(makespan, choice.lower_bound)});
  }

  const auto result_of = [&](Order order) -> const OrderResult& {
    return *std::find_if(choice.orders.begin(), choice.orders.end(),
                         [&](const OrderResult& result) { return result.order == order; });
  };
  const OrderResult& input = result_of(Order::kInput);
  const OrderResult& best = *std::min_element(
      choice.orders.begin(), choice.orders.end(),
      [](const OrderResult& a, const OrderResult& b) { return a.makespan < b.makespan; });
  constexpr Order kUneven[] = {Order::kSortedDynamic, Order::kLongFirst, Order::kSerpentine,
                               Order::kSortedRoundRobin, Order::kInput};
  constexpr Order kEven[] = {Order::kInput, Order::kSerpentine, Order::kSortedRoundRobin,
                             Order::kLongFirst, Order::kSortedDynamic};
  const bool uneven = is_uneven(pack, mask, spec.pass);
  for (const Order order : uneven ? kUneven : kEven) {
    const OrderResult& result = result_of(order);
    const double within = 1.01 * static_cast<double>(best.makespan);
    if (result.makespan <= input.makespan and static_cast<double>(result.makespan) <= within) {
      choice.chosen = order;
      choice.reason = reason_of(result, input, best, uneven, mask.causal);
      break;
    }
  }
  return choice;
}

}  // namespace mxattn::plan
