#include "plan/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <tuple>

#include "base/error.h"
#include "plan/test_packs.h"

namespace mxattn::plan {
namespace {

constexpr int kQueryTiles[] = {128, 192, 256};
constexpr int kKeyTiles[] = {64, 128};
constexpr Pass kPasses[] = {Pass::kForward, Pass::kDq, Pass::kDkv};

PlanSpec random_spec(Random& random) {
  PlanSpec spec;
  spec.pass = random.pick(kPasses);
  spec.tile = spec.pass == Pass::kDkv ? random.pick(kKeyTiles) : random.pick(kQueryTiles);
  spec.heads_k = random.between(1, 4);
  spec.heads_q = spec.heads_k * random.between(1, 3);
  spec.order = random.pick(kAllOrders);
  spec.heads_per_group = random.chance(0.3) ? random.between(1, 5) : 0;
  if (random.chance(0.3)) spec.cost = {7, 11};
  return spec;
}

/// The mask by its definition, not through pack's ranges.
bool sees(const Mask& mask, int q_len, int k_len, int i, int j) {
  const int diagonal = i + k_len - q_len;
  return (not mask.causal or j <= diagonal) and
         (mask.window_left < 0 or j >= diagonal - mask.window_left) and
         (mask.window_right < 0 or j <= diagonal + mask.window_right);
}

/// Tiles of an item, pair by pair.
std::int64_t tiles_pair_by_pair(const Mask& mask, const Document& document, const PlanSpec& spec,
                                const WorkItem& item) {
  const int rows = spec.tile % 128 == 0 ? 128 : 64;
  const bool keys = spec.pass == Pass::kDkv;
  const int others = keys ? document.q_len : document.k_len;
  std::int64_t tiles = 0;
  for (int r = item.first; r < item.first + item.count; r += rows) {
    const int r_end = std::min(r + rows, item.first + item.count);
    for (int o = 0; o < others; o += 128) {
      bool visited = false;
      for (int x = r; x < r_end and not visited; ++x) {
        for (int y = o; y < std::min(o + 128, others) and not visited; ++y) {
          visited = keys ? sees(mask, document.q_len, document.k_len, y, x)
                         : sees(mask, document.q_len, document.k_len, x, y);
        }
      }
      tiles += visited;
    }
  }
  return tiles;
}

TEST(Plan, SortedListOfASmallPack) {
  // Document 0: an item of 1 + 2 tiles and a rest that sees 3; document 1 is empty; document 2: 1.
  PlanSpec spec;
  spec.heads_q = 2;
  spec.heads_k = 1;
  const Plan plan = make_plan(pack_of({300, 0, 128}), Mask{.causal = true}, spec);
  const std::vector<WorkItem> items = {{0, 0, 0, 256},  {0, 0, 256, 44}, {0, 1, 0, 256},
                                       {0, 1, 256, 44}, {2, 0, 0, 128},  {2, 1, 0, 128}};
  EXPECT_EQ(plan.items, items);
  EXPECT_EQ(plan.costs, (std::vector<std::uint32_t>{3, 3, 3, 3, 1, 1}));
}

TEST(Plan, OrdersOfASmallPack) {
  const Pack pack = pack_of({256, 600});
  PlanSpec spec;
  spec.heads_q = spec.heads_k = 2;
  const auto firsts = [&](Order order) {
    spec.order = order;
    std::vector<std::tuple<int, int, int>> list;
    for (const WorkItem& item : make_plan(pack, Mask{.causal = true}, spec).items) {
      list.emplace_back(item.head, item.document, item.first);
    }
    return list;
  };
  using List = std::vector<std::tuple<int, int, int>>;
  // Costs: document 0: 3; document 1: 3, 7, 5.
  EXPECT_EQ(firsts(Order::kInput), (List{{0, 0, 0},
                                         {0, 1, 0},
                                         {0, 1, 256},
                                         {0, 1, 512},
                                         {1, 0, 0},
                                         {1, 1, 0},
                                         {1, 1, 256},
                                         {1, 1, 512}}));
  EXPECT_EQ(firsts(Order::kLongFirst), (List{{0, 0, 0},
                                             {0, 1, 256},
                                             {0, 1, 512},
                                             {0, 1, 0},
                                             {1, 0, 0},
                                             {1, 1, 256},
                                             {1, 1, 512},
                                             {1, 1, 0}}));
  const List sorted = {{0, 1, 256}, {1, 1, 256}, {0, 1, 512}, {1, 1, 512},
                       {0, 0, 0},   {1, 0, 0},   {0, 1, 0},   {1, 1, 0}};
  EXPECT_EQ(firsts(Order::kSortedDynamic), sorted);
  EXPECT_EQ(firsts(Order::kSortedRoundRobin), sorted);
  EXPECT_EQ(firsts(Order::kSerpentine), sorted);
}

TEST(Plan, CoversEveryPositionOnce) {
  Random random(1);
  int keyless = 0, empty = 0;
  for (int round = 0; round < 10000; ++round) {
    const Pack pack = random.pack(random.between(1, 12), 2000);
    const Mask mask = random.mask();
    const PlanSpec spec = random_spec(random);
    const Plan plan = make_plan(pack, mask, spec);
    ASSERT_EQ(static_cast<std::int64_t>(plan.items.size()), count_items(pack, spec));
    ASSERT_EQ(plan.items.size(), plan.costs.size());

    std::map<std::pair<int, int>, std::vector<std::pair<int, int>>> pieces;
    for (std::size_t i = 0; i < plan.items.size(); ++i) {
      const WorkItem& item = plan.items[i];
      ASSERT_GT(item.count, 0);
      ASSERT_LE(item.count, spec.tile);
      pieces[{item.document, item.head}].emplace_back(item.first, item.first + item.count);
      keyless += plan.costs[i] == spec.cost.per_item;
    }
    for (int d = 0; d < static_cast<int>(pack.documents.size()); ++d) {
      const Document& document = pack.documents[d];
      const int length = spec.pass == Pass::kDkv ? document.k_len : document.q_len;
      empty += length == 0;
      for (int head = 0; head < heads_of(spec); ++head) {
        auto& mine = pieces[{d, head}];
        std::sort(mine.begin(), mine.end());
        int end = 0;
        for (const auto& [first, last] : mine) {
          ASSERT_EQ(first, end);
          end = last;
        }
        ASSERT_EQ(end, length);
      }
    }
    ASSERT_EQ(pieces.size(), pack.documents.size() * heads_of(spec));
  }
  EXPECT_GT(keyless, 1000);  // the packs hold what they are meant to test
  EXPECT_GT(empty, 500);
}

TEST(Plan, CostsAreVisitedTiles) {
  Random random(2);
  int partial = 0;
  for (int round = 0; round < 600; ++round) {
    const Pack pack = random.pack(random.between(1, 3), 700);
    const Mask mask = random.mask();
    PlanSpec spec = random_spec(random);
    spec.heads_k = 1;
    const Plan plan = make_plan(pack, mask, spec);
    const int group = spec.pass == Pass::kDkv ? spec.heads_q : 1;
    for (std::size_t i = 0; i < plan.items.size(); ++i) {
      const WorkItem& item = plan.items[i];
      if (item.head > 0) continue;
      const Document& document = pack.documents[item.document];
      const std::int64_t tiles = tiles_pair_by_pair(mask, document, spec, item);
      ASSERT_EQ(plan.costs[i], tiles * group * spec.cost.per_tile + spec.cost.per_item)
          << to_string(plan) << "item " << i << " q_len " << document.q_len << " k_len "
          << document.k_len << " causal " << mask.causal << " window " << mask.window_left << " "
          << mask.window_right;
      partial += tiles > 0 and mask.window_left >= 0;
    }
  }
  EXPECT_GT(partial, 200);
}

TEST(Plan, SortedOrderIsTotalAndTheSameWhereverItStarts) {
  Random random(3);
  for (int round = 0; round < 300; ++round) {
    const Pack pack = random.pack(random.between(1, 12), 3000);
    const Mask mask = random.mask();
    PlanSpec spec = random_spec(random);
    spec.order = Order::kSortedDynamic;
    const Plan plan = make_plan(pack, mask, spec);
    ASSERT_EQ(plan, make_plan(pack, mask, spec));

    std::vector<std::size_t> places(plan.items.size());
    std::iota(places.begin(), places.end(), std::size_t{0});
    std::shuffle(places.begin(), places.end(), std::mt19937(round));
    const HeadGroups groups(heads_of(spec), spec.heads_per_group);
    const auto before = [&](std::size_t a, std::size_t b) {
      return sorted_before(plan.items[a], plan.costs[a], plan.items[b], plan.costs[b], groups);
    };
    std::sort(places.begin(), places.end(), before);
    for (std::size_t i = 0; i < places.size(); ++i) {
      ASSERT_EQ(places[i], i);
      if (i > 0) {
        ASSERT_TRUE(before(i - 1, i));
        ASSERT_FALSE(before(i, i - 1));
        if (spec.heads_per_group == 0) {
          ASSERT_GE(plan.costs[i - 1], plan.costs[i]);
        }
      }
    }
  }
}

TEST(Plan, HeadGroupsFollowOneAnother) {
  PlanSpec spec;
  spec.heads_q = spec.heads_k = 7;
  spec.heads_per_group = 2;
  const Plan plan = make_plan(pack_of({1000, 300}), Mask{.causal = true}, spec);
  // Two heads, two heads, and the rest.
  constexpr int kGroup[] = {0, 0, 1, 1, 1, 1, 1};
  int changes = 0;
  for (std::size_t i = 1; i < plan.items.size(); ++i) {
    const int group = kGroup[plan.items[i].head], last = kGroup[plan.items[i - 1].head];
    ASSERT_GE(group, last);
    changes += group != last;
    if (group == last) {
      ASSERT_GE(plan.costs[i - 1], plan.costs[i]);
    }
  }
  EXPECT_EQ(changes, 1);
}

TEST(Plan, HeadGroupsCoverAllHeads) {
  for (int heads = 1; heads < 40; ++heads) {
    for (int share = 0; share < 45; ++share) {
      const HeadGroups groups(heads, share);
      int next = 0;
      for (int group = 0; group < groups.count; ++group) {
        ASSERT_EQ(groups.first(group), next);
        ASSERT_GT(groups.size(group), 0);
        for (const int last = next + groups.size(group); next < last; ++next) {
          ASSERT_EQ(groups.of(next), group);
        }
      }
      ASSERT_EQ(next, heads);
      // The last has two shares or is alone.
      ASSERT_TRUE(groups.count == 1 or groups.size(groups.count - 1) >= 2 * share);
      ASSERT_TRUE(share > 0 or groups.count == 1);
    }
  }
}

TEST(Plan, HeadGroupsFitIntoL2) {
  PlanSpec spec;
  spec.heads_q = 16;
  spec.heads_k = 8;
  constexpr std::int64_t kBytes = 512000;
  EXPECT_EQ(heads_per_group_for_l2(spec, kBytes, 3 * kBytes), 6);
  EXPECT_EQ(heads_per_group_for_l2(spec, kBytes, 3 * kBytes - 1), 4);
  EXPECT_EQ(heads_per_group_for_l2(spec, kBytes, 1), 2);
  EXPECT_EQ(heads_per_group_for_l2(spec, kBytes, std::int64_t{1} << 40), 16);
  spec.pass = Pass::kDkv;
  spec.tile = 128;
  EXPECT_EQ(heads_per_group_for_l2(spec, kBytes, 3 * kBytes), 3);
  EXPECT_EQ(heads_per_group_for_l2(spec, 0, 0), 1);
}

TEST(Plan, RowsWithoutKeysAreItems) {
  PlanSpec spec;
  // The first 300 of 500 queries see nothing; document 1 has no key at all.
  const Plan plan = make_plan(pack_of({500, 100}, {200, 0}), Mask{.causal = true}, spec);
  ASSERT_EQ(plan.items.size(), 3u);
  EXPECT_EQ(plan.costs, (std::vector<std::uint32_t>{3, 0, 0}));
  EXPECT_EQ(plan.items[1], (WorkItem{0, 0, 0, 256}));
  EXPECT_EQ(plan.items[2], (WorkItem{1, 0, 0, 100}));
}

TEST(Plan, CostsSaturate) {
  EXPECT_EQ(item_cost({3, 5}, 10, 2), 65u);
  EXPECT_EQ(item_cost({1u << 20, 0}, 1 << 20, 1), 0xffffffffu);
  EXPECT_EQ(item_cost({1, 0xffffffffu}, 1, 1), 0xffffffffu);
  EXPECT_EQ(item_cost({0, 9}, std::int64_t{1} << 40, 8), 9u);
}

TEST(Plan, LongestDocument) {
  constexpr int kMost = std::numeric_limits<std::int32_t>::max();
  constexpr std::int64_t kTiles = (std::int64_t{kMost} + 127) / 128;
  const Mask causal{.causal = true};
  EXPECT_EQ(visited_tiles(causal, kMost, kMost, Pass::kForward, 256, kMost - 255, 255),
            2 * kTiles - 1);
  EXPECT_EQ(visited_tiles(causal, kMost, kMost, Pass::kDkv, 128, 0, 128), kTiles);
  const Mask window{.causal = true, .window_left = kMost, .window_right = kMost};
  EXPECT_EQ(visited_tiles(window, kMost, kMost, Pass::kDkv, 128, 0, 128), kTiles);
}

TEST(Plan, RefusesBadSpecs) {
  const auto message = [](PlanSpec spec) -> std::string {
    try {
      make_plan(pack_of({10}), Mask{}, spec);
    } catch (const Error& error) {
      EXPECT_EQ(error.status(), Status::kInvalidArgument);
      return error.what();
    }
    return "accepted";
  };
  EXPECT_EQ(message({.heads_q = 0}), "heads_q = 0: expected at least 1");
  EXPECT_EQ(message({.heads_q = 4, .heads_k = 3}),
            "heads_k = 3: expected a divisor of heads_q = 4");
  EXPECT_EQ(message({.tile = 100}), "tile = 100: expected 128, 192 or 256 queries for forward");
  EXPECT_EQ(message({.pass = Pass::kDkv, .tile = 192}),
            "tile = 192: expected 64, 128 or 256 keys for dkv");
  EXPECT_EQ(message({.heads_per_group = -1}), "heads_per_group = -1: expected 0 or more");
}

TEST(Plan, IsPrintable) {
  const Plan plan = make_plan(pack_of({300}), Mask{.causal = true}, PlanSpec{});
  EXPECT_EQ(to_string(plan, 1),
            "plan forward: 2 items of 256, heads 1/1, order sorted-dynamic, cost 6\n"
            "  0: document 0 head 0 [0, 256) cost 3\n"
            "  ... 1 more\n");
}

}  // namespace
}  // namespace mxattn::plan
