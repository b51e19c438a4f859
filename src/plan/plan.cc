#include "plan/plan.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <sstream>

#include "base/error.h"

namespace mxattn::plan {
namespace {

struct Entry {
  WorkItem item;
  std::uint32_t cost = 0;
};

int length_of(const Document& document, Pass pass) {
  return pass == Pass::kDkv ? document.k_len : document.q_len;
}

/// The costs of one document's items: the same for each of its heads.
std::vector<std::uint32_t> costs_of(const Document& document, const Mask& mask,
                                    const PlanSpec& spec) {
  const int length = length_of(document, spec.pass);
  const int group = spec.pass == Pass::kDkv ? spec.heads_q / spec.heads_k : 1;
  std::vector<std::uint32_t> costs;
  for (std::int64_t first = 0; first < length; first += spec.tile) {
    const int count = static_cast<int>(std::min<std::int64_t>(spec.tile, length - first));
    const std::int64_t tiles = visited_tiles(mask, document.q_len, document.k_len, spec.pass,
                                             spec.tile, static_cast<int>(first), count);
    costs.push_back(item_cost(spec.cost, tiles, group));
  }
  return costs;
}

/// Items in input order: head, document, first ascending.
std::vector<Entry> list_items(const Pack& pack, const Mask& mask, const PlanSpec& spec) {
  std::vector<std::vector<std::uint32_t>> costs;
  costs.reserve(pack.documents.size());
  for (const Document& document : pack.documents) {
    costs.push_back(costs_of(document, mask, spec));
  }
  std::vector<Entry> entries;
  entries.reserve(static_cast<std::size_t>(count_items(pack, spec)));
  for (int head = 0; head < heads_of(spec); ++head) {
    for (std::size_t d = 0; d < pack.documents.size(); ++d) {
      const int length = length_of(pack.documents[d], spec.pass);
      for (std::size_t i = 0; i < costs[d].size(); ++i) {
        const int first = static_cast<int>(i) * spec.tile;
        entries.push_back(
            {{static_cast<std::int32_t>(d), head, first, std::min(spec.tile, length - first)},
             costs[d][i]});
      }
    }
  }
  return entries;
}

/// The order inside a document that "long first" asks for; heads and documents keep their places.
bool long_first_before(const Entry& a, const Entry& b) {
  if (a.item.head != b.item.head) return a.item.head < b.item.head;
  if (a.item.document != b.item.document) return a.item.document < b.item.document;
  if (a.cost != b.cost) return a.cost > b.cost;
  return a.item.first < b.item.first;
}

}  // namespace

const char* name_of(Order order) {
  switch (order) {
    case Order::kInput:
      return "input";
    case Order::kLongFirst:
      return "long-first";
    case Order::kSortedRoundRobin:
      return "sorted-round-robin";
    case Order::kSerpentine:
      return "serpentine";
    case Order::kSortedDynamic:
      return "sorted-dynamic";
  }
  return "unknown";
}

const char* name_of(Pass pass) {
  switch (pass) {
    case Pass::kForward:
      return "forward";
    case Pass::kDq:
      return "dq";
    case Pass::kDkv:
      return "dkv";
  }
  return "unknown";
}

Assignment assignment_of(Order order) {
  switch (order) {
    case Order::kInput:
    case Order::kSortedRoundRobin:
      return Assignment::kRoundRobin;
    case Order::kSerpentine:
      return Assignment::kSerpentine;
    case Order::kLongFirst:
    case Order::kSortedDynamic:
      break;
  }
  return Assignment::kDynamic;
}

void check_spec(const PlanSpec& spec) {
  require(spec.heads_q > 0, "heads_q", spec.heads_q, "at least 1");
  require(spec.heads_k > 0 and spec.heads_q % spec.heads_k == 0, "heads_k", spec.heads_k,
          "a divisor of heads_q = ", spec.heads_q);
  if (spec.pass == Pass::kDkv) {
    require(spec.tile == 64 or spec.tile == 128 or spec.tile == 256, "tile", spec.tile,
            "64, 128 or 256 keys for dkv");
  } else {
    require(spec.tile == 128 or spec.tile == 192 or spec.tile == 256, "tile", spec.tile,
            "128, 192 or 256 queries for ", name_of(spec.pass));
  }
  require(spec.heads_per_group >= 0, "heads_per_group", spec.heads_per_group, "0 or more");
}

std::int64_t count_items(const Pack& pack, const PlanSpec& spec) {
  std::int64_t per_head = 0;
  for (const Document& document : pack.documents) {
    per_head += (std::int64_t{length_of(document, spec.pass)} + spec.tile - 1) / spec.tile;
  }
  return per_head * heads_of(spec);
}

Plan make_plan(const Pack& pack, const Mask& mask, const PlanSpec& spec) {
  check_spec(spec);
  // Devices index items with 32 bits.
  const std::int64_t items = count_items(pack, spec);
  require(items <= std::numeric_limits<std::int32_t>::max(), "pack", items,
          "at most 2^31 - 1 work items");

  std::vector<Entry> entries = list_items(pack, mask, spec);
  if (spec.order == Order::kLongFirst) {
    std::sort(entries.begin(), entries.end(), long_first_before);
  } else if (spec.order != Order::kInput) {
    const HeadGroups groups(heads_of(spec), spec.heads_per_group);
    std::sort(entries.begin(), entries.end(), [&](const Entry& a, const Entry& b) {
      return sorted_before(a.item, a.cost, b.item, b.cost, groups);
    });
  }

  Plan plan{spec, mask, {}, {}};
  plan.items.reserve(entries.size());
  plan.costs.reserve(entries.size());
  for (const Entry& entry : entries) {
    plan.items.push_back(entry.item);
    plan.costs.push_back(entry.cost);
  }
  return plan;
}

int heads_per_group_for_l2(const PlanSpec& spec, std::int64_t bytes_per_key_head,
                           std::int64_t l2_bytes) {
  check_spec(spec);
  const std::int64_t fit = l2_bytes / std::max<std::int64_t>(1, bytes_per_key_head);
  const auto key_heads = static_cast<int>(std::clamp<std::int64_t>(fit, 1, spec.heads_k));
  return spec.pass == Pass::kDkv ? key_heads : key_heads * (spec.heads_q / spec.heads_k);
}

std::string to_string(const Plan& plan, std::size_t max_items) {
  std::ostringstream text;
  text << "plan " << name_of(plan.spec.pass) << ": " << plan.items.size() << " items of "
       << plan.spec.tile << ", heads " << plan.spec.heads_q << "/" << plan.spec.heads_k
       << ", order " << name_of(plan.spec.order) << ", cost "
       << std::accumulate(plan.costs.begin(), plan.costs.end(), std::uint64_t{0}) << "\n";
  const std::size_t shown = std::min(max_items, plan.items.size());
  for (std::size_t i = 0; i < shown; ++i) {
    const WorkItem& item = plan.items[i];
    text << "  " << i << ": document " << item.document << " head " << item.head << " ["
         << item.first << ", " << item.first + item.count << ") cost " << plan.costs[i] << "\n";
  }
  if (shown < plan.items.size()) text << "  ... " << plan.items.size() - shown << " more\n";
  return text.str();
}

}  // namespace mxattn::plan
