// The work list built on a CUDA device: the host's, bit for bit. Tests of the device skip where no
// device is found, and say so.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <limits>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "base/error.h"
#include "plan/cuda/build_plan.h"
#include "plan/test_packs.h"
#include "support/device_array.h"

namespace mxattn::plan::cuda {
namespace {

constexpr int kQueryTiles[] = {128, 192, 256};
constexpr int kKeyTiles[] = {64, 128};
constexpr Pass kPasses[] = {Pass::kForward, Pass::kDq, Pass::kDkv};
constexpr Order kSortedOrders[] = {Order::kSortedRoundRobin, Order::kSerpentine,
                                   Order::kSortedDynamic};
constexpr std::uint32_t kMostCost = std::numeric_limits<std::uint32_t>::max();
constexpr int kMostInt = std::numeric_limits<int>::max();

const Mask kMasks[] = {{},
                       {.causal = true},
                       {.causal = true, .window_left = 300},
                       {.window_left = 200, .window_right = 70},
                       {.window_left = 0, .window_right = 0},
                       {.window_left = kMostInt, .window_right = kMostInt}};

struct Offsets {
  std::vector<std::int32_t> q{0}, k{0};
};

/// Offsets of `documents` documents, which do without the lengths they have not: behind the last
/// length an offset repeats.
Offsets offsets_of(const Lengths& q_lengths, const Lengths& k_lengths, std::size_t documents) {
  Offsets offsets;
  for (std::size_t d = 0; d < documents; ++d) {
    offsets.q.push_back(offsets.q.back() + (d < q_lengths.size() ? q_lengths[d] : 0));
    offsets.k.push_back(offsets.k.back() + (d < k_lengths.size() ? k_lengths[d] : 0));
  }
  return offsets;
}

Offsets offsets_of(const Lengths& lengths) { return offsets_of(lengths, lengths, lengths.size()); }

BuildSpec build_of(const Offsets& offsets, const Mask& mask, const PlanSpec& spec) {
  return {spec, mask, static_cast<int>(offsets.q.size()) - 1, offsets.q.back(), offsets.k.back()};
}

Plan plan_of(const BuildSpec& build, const Offsets& offsets) {
  return make_plan(make_pack(offsets.q, offsets.k, build.total_q, build.total_k), build.mask,
                   build.spec);
}

/// Buffers of one build: filled with a pattern, and with more behind them that must stay.
class Buffers {
 public:
  explicit Buffers(const BuildSpec& build)
      : build_(build),
        offsets_q_(static_cast<std::size_t>(build.num_documents) + 1),
        offsets_k_(static_cast<std::size_t>(build.num_documents) + 1),
        items_(static_cast<std::size_t>(max_items(build)) + kBehind),
        count_(1),
        scratch_(static_cast<std::size_t>(scratch_bytes(build)) + kBehind) {
    items_.set(std::vector<WorkItem>(items_.size(), kPattern));
    scratch_.set(std::vector<std::uint8_t>(scratch_.size(), kPatternByte));
  }

  void set(const Offsets& offsets) {
    offsets_q_.set(offsets.q);
    offsets_k_.set(offsets.k);
  }
  void enqueue(cudaStream_t stream) {
    build_plan(build_, offsets_q_.data(), offsets_k_.data(), items_.data(), count_.data(),
               scratch_.data(), stream);
  }

  /// The list is the plan's. `fresh`: built once only, so nothing was written behind it.
  void expect_list(const Plan& plan, bool fresh) {
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    const int count = count_.to_host()[0];
    ASSERT_EQ(count, static_cast<int>(plan.items.size()));
    const std::vector<WorkItem> items = items_.to_host();
    int wrong = 0;
    for (int i = 0; i < count and wrong < 5; ++i) {
      if (items[i] == plan.items[i]) continue;
      ++wrong;
      ADD_FAILURE() << "item " << i << " of " << count << ": document " << items[i].document
                    << " head " << items[i].head << " first " << items[i].first << " count "
                    << items[i].count << ", expected document " << plan.items[i].document
                    << " head " << plan.items[i].head << " first " << plan.items[i].first
                    << " count " << plan.items[i].count;
    }
    const auto behind = fresh ? items.begin() + count : items.end() - kBehind;
    EXPECT_TRUE(std::all_of(behind, items.end(), [](WorkItem item) { return item == kPattern; }));
    const std::vector<std::uint8_t> scratch = scratch_.to_host();
    EXPECT_TRUE(std::all_of(scratch.end() - kBehind, scratch.end(),
                            [](std::uint8_t byte) { return byte == kPatternByte; }));
  }

 private:
  static constexpr int kBehind = 64;
  static constexpr std::uint8_t kPatternByte = 0xA5;
  static constexpr WorkItem kPattern{-7, -7, -7, -7};

  BuildSpec build_;
  DeviceArray<std::int32_t> offsets_q_, offsets_k_;
  DeviceArray<WorkItem> items_;
  DeviceArray<std::int32_t> count_;
  DeviceArray<std::uint8_t> scratch_;
};

void expect_built(const BuildSpec& build, const Offsets& offsets) {
  Buffers buffers(build);
  buffers.set(offsets);
  buffers.enqueue(nullptr);
  buffers.expect_list(plan_of(build, offsets), true);
}

PlanSpec random_spec(Random& random) {
  static constexpr CostModel kCosts[] = {
      {}, {7, 11}, {0, 5}, {1, kMostCost}, {1u << 30, 0}, {1u << 29, 77}, {kMostCost / 5, 3}};
  PlanSpec spec;
  spec.pass = random.pick(kPasses);
  spec.tile = spec.pass == Pass::kDkv ? random.pick(kKeyTiles) : random.pick(kQueryTiles);
  spec.heads_k = random.between(1, 4);
  spec.heads_q = spec.heads_k * random.between(1, 3);
  spec.order = random.pick(kSortedOrders);
  spec.heads_per_group = random.chance(0.4) ? random.between(1, 7) : 0;
  if (random.chance(0.5)) spec.cost = random.pick(kCosts);
  return spec;
}

// Sizes: need no device -----------------------------------------------------------------------

TEST(BuildPlanSizes, MaxItemsHoldsEveryPackAndIsReached) {
  Random random(11);
  for (int round = 0; round < 500; ++round) {
    const PlanSpec spec = random_spec(random);
    const Pack pack = random.pack(random.between(1, 40), 3000);
    BuildSpec build{spec, {}, static_cast<int>(pack.documents.size()), pack.total_q, pack.total_k};
    EXPECT_LE(count_items(pack, spec), max_items(build));

    // One token a document, and whole tiles more for the first.
    Lengths worst(static_cast<std::size_t>(random.between(1, 40)), 1);
    worst[0] += random.between(0, 20) * spec.tile;
    const Pack worst_pack = pack_of(worst);
    build.num_documents = static_cast<int>(worst.size());
    build.total_q = build.total_k = worst_pack.total_q;
    EXPECT_EQ(count_items(worst_pack, spec), max_items(build));
  }
}

TEST(BuildPlanSizes, RefusesWhatItCannotBuild) {
  BuildSpec build{PlanSpec{}, Mask{}, 4, 1000, 1000};
  EXPECT_EQ(max_items(build), 4 + (1000 - 4) / 256);
  EXPECT_GT(scratch_bytes(build), 0);
  build.spec.order = Order::kInput;
  EXPECT_THROW(max_items(build), Error);
  build.spec.order = Order::kSortedDynamic;
  build.spec.tile = 64;
  EXPECT_THROW(scratch_bytes(build), Error);
  build.spec.tile = 128;
  build.total_q = 1 << 30;
  build.spec.heads_q = 1024;
  EXPECT_THROW(max_items(build), Error);
}

// Lists ----------------------------------------------------------------------------------------

class BuildPlan : public ::testing::Test {
 protected:
  void SetUp() override {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess or devices == 0) {
      GTEST_SKIP() << "no CUDA device found: the list was not built";
    }
  }
};

TEST_F(BuildPlan, BitEqualOfRandomPacks) {
  Random random(4);
  int saturated = 0, long_runs = 0, uneven_groups = 0, many_documents = 0;
  for (int round = 0; round < 400; ++round) {
    SCOPED_TRACE(testing::Message() << "round " << round);
    const int documents = random.chance(0.1) ? random.between(1000, 3000) : random.between(1, 60);
    const int longest = documents > 60 ? 600 : (random.chance(0.1) ? 40'000 : 4000);
    Lengths q, k;
    const bool same = random.chance(0.5);
    for (int d = 0; d < documents; ++d) {
      q.push_back(random.length(longest));
      k.push_back(same ? q.back() : random.length(longest));
    }
    const auto padding = static_cast<std::size_t>(random.chance(0.3) ? random.between(1, 1500) : 0);
    const Offsets offsets = offsets_of(q, k, q.size() + padding);
    BuildSpec build = build_of(offsets, random.mask(), random_spec(random));
    if (random.chance(0.5)) {
      build.total_q += random.between(0, 2000);
      build.total_k += random.between(0, 2000);
    }
    expect_built(build, offsets);
    if (HasFatalFailure()) return;

    // What makes lists hard, counted.
    const Plan plan = plan_of(build, offsets);
    const int heads = heads_of(build.spec);
    const int group = build.spec.heads_per_group;
    std::set<std::uint32_t> costs(plan.costs.begin(), plan.costs.end());
    saturated += costs.size() > 1 and costs.contains(kMostCost);
    uneven_groups += group > 0 and group < heads and heads % group != 0;
    many_documents += build.num_documents > 1024;
    bool run = false;
    for (std::size_t i = 1; i < plan.items.size() and not run; ++i) {
      const WorkItem& a = plan.items[i - 1];
      const WorkItem& b = plan.items[i];
      run = heads > 1 and group != 1 and a.document == b.document and a.head == b.head and
            plan.costs[i - 1] == plan.costs[i];
    }
    long_runs += run;
  }
  EXPECT_GE(saturated, 5);
  EXPECT_GE(long_runs, 50);
  EXPECT_GE(uneven_groups, 10);
  EXPECT_GE(many_documents, 20);
}

TEST_F(BuildPlan, BitEqualOfHardPacks) {
  Lengths tiny, skewed(1, 8192), growing, mixed;
  for (int d = 0; d < 65'536; ++d) tiny.push_back(d * 7 % 11 % 4);
  skewed.insert(skewed.end(), 224, 256);
  for (int d = 0; d < 400; ++d) growing.push_back(d * 16);
  for (int d = 0; d < 3000; ++d) mixed.push_back(d == 1500 ? 30'000 : d % 300);
  const std::pair<const char*, Lengths> packs[] = {
      {"one empty document", {0}},
      {"one token", {1}},
      {"empty documents", Lengths(3000, 0)},
      {"one long document", {65'536}},
      {"one token too long", {65'537}},
      {"skewed", skewed},
      {"growing", growing},
      {"a long one among many", mixed},
      {"as many as a batch", Lengths(1024, 129)},
      {"one more than a batch", Lengths(1025, 129)},
      {"4096 documents", Lengths(4096, 200)},
      {"65536 documents", tiny},
  };
  for (const auto& [name, lengths] : packs) {
    const Offsets offsets = offsets_of(lengths);
    for (const Pass pass : kPasses) {
      for (const Mask& mask : kMasks) {
        SCOPED_TRACE(testing::Message() << name << ", " << name_of(pass) << ", mask " << mask.causal
                                        << " " << mask.window_left << " " << mask.window_right);
        PlanSpec spec;
        spec.pass = pass;
        spec.tile = pass == Pass::kForward ? 256 : (pass == Pass::kDq ? 192 : 64);
        spec.heads_q = 6;
        spec.heads_k = 3;
        spec.heads_per_group = mask.causal ? 2 : 0;
        expect_built(build_of(offsets, mask, spec), offsets);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(BuildPlan, BitEqualOfKeysSoLongThatVisitsTakeFourDigits) {
  const Lengths q{300, 500, 600, 300, 256, 40'000, 300};
  const Lengths k{5, 9'000'000, 1'900'000'000, 0, 9'000'000, 100'000'000, 129};
  const Offsets offsets = offsets_of(q, k, q.size());
  for (const Mask& mask : kMasks) {
    PlanSpec spec;
    spec.tile = 192;
    spec.heads_q = spec.heads_k = 2;
    const BuildSpec build = build_of(offsets, mask, spec);
    expect_built(build, offsets);
    const std::uint32_t most = plan_of(build, offsets).costs[0];
    if (mask == Mask{}) {
      EXPECT_GE(most, 1u << 24);
    }
  }
}

/// A graph that holds `builds` builds one behind the other.
class Graph {
 public:
  Graph(Buffers& buffers, int builds) {
    EXPECT_EQ(cudaStreamCreate(&stream_), cudaSuccess);
    EXPECT_EQ(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal), cudaSuccess);
    for (int i = 0; i < builds; ++i) buffers.enqueue(stream_);
    EXPECT_EQ(cudaStreamEndCapture(stream_, &graph_), cudaSuccess);
    EXPECT_EQ(cudaGraphInstantiate(&executable_, graph_, 0), cudaSuccess);
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  ~Graph() {
    cudaGraphExecDestroy(executable_);
    cudaGraphDestroy(graph_);
    cudaStreamDestroy(stream_);
  }

  void launch() { EXPECT_EQ(cudaGraphLaunch(executable_, stream_), cudaSuccess); }
  cudaStream_t stream() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
};

TEST_F(BuildPlan, BitEqualWhenAGraphIsReplayedWithOtherLengths) {
  for (const int documents : {40, 1400}) {
    for (const Pass pass : kPasses) {
      Random random(documents);
      PlanSpec spec;
      spec.pass = pass;
      spec.tile = 128;
      spec.heads_q = 4;
      spec.heads_k = 2;
      const int longest = 4000;
      const std::int64_t total = std::int64_t{documents} * longest;
      const BuildSpec build{spec, {.causal = true}, documents, total, total};
      Buffers buffers(build);
      Graph graph(buffers, 1);
      for (int replay = 0; replay < 6; ++replay) {
        SCOPED_TRACE(testing::Message() << documents << " documents, replay " << replay);
        Lengths q, k;
        const int used = replay == 3 ? 0 : random.between(1, documents);
        for (int d = 0; d < used; ++d) {
          q.push_back(random.length(longest));
          k.push_back(random.length(longest));
        }
        const Offsets offsets = offsets_of(q, k, static_cast<std::size_t>(documents));
        buffers.set(offsets);
        graph.launch();
        buffers.expect_list(plan_of(build, offsets), false);
        if (HasFatalFailure()) return;
      }
    }
  }
}

/// Median over replays of the device time of one build, in microseconds.
double median_time(Graph& graph, int builds) {
  constexpr int kReplays = 60;
  cudaEvent_t begin, end;
  EXPECT_EQ(cudaEventCreate(&begin), cudaSuccess);
  EXPECT_EQ(cudaEventCreate(&end), cudaSuccess);
  graph.launch();
  std::vector<double> times;
  for (int i = 0; i < kReplays; ++i) {
    EXPECT_EQ(cudaEventRecord(begin, graph.stream()), cudaSuccess);
    graph.launch();
    EXPECT_EQ(cudaEventRecord(end, graph.stream()), cudaSuccess);
    EXPECT_EQ(cudaEventSynchronize(end), cudaSuccess);
    float milliseconds = 0;
    EXPECT_EQ(cudaEventElapsedTime(&milliseconds, begin, end), cudaSuccess);
    times.push_back(1000.0 * milliseconds / builds);
  }
  EXPECT_EQ(cudaEventDestroy(begin), cudaSuccess);
  EXPECT_EQ(cudaEventDestroy(end), cudaSuccess);
  std::nth_element(times.begin(), times.begin() + kReplays / 2, times.end());
  return times[kReplays / 2];
}

TEST_F(BuildPlan, BitEqualAfterManyReplaysWithTheirTime) {
  constexpr int kBuilds = 20;
  Lengths skewed(1, 8192), more_skewed(1, 32'768), even, varied, tiny;
  skewed.insert(skewed.end(), 224, 256);
  more_skewed.insert(more_skewed.end(), 128, 256);
  for (int d = 0; d < 4096; ++d) varied.push_back(1 + d * 37 % 509);
  for (int d = 0; d < 65'536; ++d) tiny.push_back(d * 7 % 31);
  const std::tuple<const char*, Lengths, int> packs[] = {
      {"16x4096, 16 heads", Lengths(16, 4096), 16}, {"1x65536, 16 heads", {65'536}, 16},
      {"8192+224x256, 16 heads", skewed, 16},       {"32768+128x256, 16 heads", more_skewed, 16},
      {"4096x16, 16 heads", Lengths(4096, 16), 16}, {"4096x256, 16 heads", Lengths(4096, 256), 16},
      {"4096x(1..509), 16 heads", varied, 16},      {"65536x(0..30), 16 heads", tiny, 16},
  };
  for (const auto& [name, lengths, heads] : packs) {
    for (const bool causal : {false, true}) {
      PlanSpec spec;
      spec.heads_q = spec.heads_k = heads;
      const Offsets offsets = offsets_of(lengths);
      const BuildSpec build = build_of(offsets, {.causal = causal}, spec);
      Buffers buffers(build);
      buffers.set(offsets);
      Graph graph(buffers, kBuilds);
      const double time = median_time(graph, kBuilds);
      const Plan plan = plan_of(build, offsets);
      buffers.expect_list(plan, true);
      std::printf("  %-26s %-6s %8zu items %8.2f us\n", name, causal ? "causal" : "full",
                  plan.items.size(), time);
    }
  }
}

}  // namespace
}  // namespace mxattn::plan::cuda
