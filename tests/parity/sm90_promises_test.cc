// The Hopper backend on a device, through the C interface: the promises of docs/numerics.md
// (section 5) bit for bit, graphs, streams, plans and errors.
#include <algorithm>
#include <cmath>
#include <string>
#include <tuple>
#include <vector>

#include "support/device_array.h"
#include "support/device_attention.h"
#include "support/random_cases.h"
#include "support/sm90_model.h"

namespace mxattn::test {
namespace {

class Sm90Promises : public HopperEach {
 protected:
  /// A case for this instance.
  static AttentionCase make(CaseSpec spec) {
    spec.recipe = GetParam().recipe;
    spec.dim = GetParam().dim;
    return AttentionCase(spec);
  }
};
MXATTN_FOR_EACH_HOPPER_INSTANCE(Sm90Promises);
class Sm90Interface : public Hopper {};

/// Bits of one document, by its own positions.
struct Part {
  Bf16Vector out, dq, dk, dv;
  std::vector<std::uint32_t> lse, row_sum;
  std::vector<std::int32_t> row_reference;

  bool operator==(const Part&) const = default;
};

/// Queries [0, rows) of a document, and all its keys if `keys`.
Part part_of(const AttentionCase& test, const Result& r, std::size_t document, int rows,
             bool keys) {
  const Document& d = test.pack().documents[document];
  Part part;
  const auto append = [](Bf16Vector& to, const Bf16Vector& from, std::size_t begin,
                         std::size_t end) {
    to.insert(to.end(), from.begin() + static_cast<std::ptrdiff_t>(begin),
              from.begin() + static_cast<std::ptrdiff_t>(end));
  };
  append(part.out, r.out, test.q_at(d.q_token), test.q_at(d.q_token + rows));
  append(part.dq, r.dq, test.q_at(d.q_token), test.q_at(d.q_token + rows));
  if (keys) {
    append(part.dk, r.dk, test.k_at(d.k_token), test.k_at(d.k_token + d.k_len));
    append(part.dv, r.dv, test.k_at(d.k_token), test.k_at(d.k_token + d.k_len));
  }
  for (int h = 0; h < test.spec().heads_q; ++h) {
    for (int i = 0; i < rows; ++i) {
      const auto at = static_cast<std::size_t>(h * test.pack().total_q + d.q_token + i);
      part.lse.push_back(bits_of(r.lse[at]));
      part.row_sum.push_back(bits_of(r.row_sum[at]));
      part.row_reference.push_back(r.row_reference[at]);
    }
  }
  return part;
}

Part whole(const AttentionCase& test, const Result& r, std::size_t document) {
  return part_of(test, r, document, test.pack().documents[document].q_len, true);
}

/// What to do to some queries and keys.
struct Perturbation {
  const char* name;
  bool query_side, key_side;
  bool values_only;
  double factor;  // 0: NaN
};

constexpr Perturbation kPerturbations[] = {
    {"all times 1000", true, true, false, 1000},
    {"all times 10", true, true, false, 10},
    {"keys and values times 10^4", false, true, false, 1e4},
    {"values times 2^-9", false, true, true, 0x1p-9},
    {"NaN", true, true, false, 0},
};

/// Changes queries [q.begin, q.end) and keys [k.begin, k.end), tokens of the pack.
void perturb(AttentionCase& test, const Perturbation& how, Range q, Range k) {
  const auto change = [&](Bf16Vector& x, std::size_t begin, std::size_t end) {
    if (how.factor != 0) {
      multiply(x, begin, end - begin, how.factor);
    } else {
      std::fill_n(x.begin() + static_cast<std::ptrdiff_t>(begin), end - begin, kNanBits);
    }
  };
  if (how.query_side) {
    change(test.q, test.q_at(q.begin), test.q_at(q.end));
    change(test.dout, test.q_at(q.begin), test.q_at(q.end));
  }
  if (how.key_side) {
    if (not how.values_only) change(test.k, test.k_at(k.begin), test.k_at(k.end));
    change(test.v, test.k_at(k.begin), test.k_at(k.end));
  }
}

TEST_P(Sm90Promises, BitEqualEarlierTokensWhateverComesLater) {
  if (not GetParam().recipe.strictly_causal()) {
    GTEST_SKIP() << "the recipe's exponents look ahead inside 32 tokens";
  }
  int changes = 0, changed_nothing = 0;
  for (const double sharpness : {1.0, 8.0}) {
    AttentionCase test = make({.q_lens = {200, 400}, .heads_q = 2});
    fill_normal(test, 21);
    multiply(test.q, sharpness);
    multiply(test.v, test.k_at(130), static_cast<std::size_t>(test.spec().dim), 8);
    DeviceAttention device(test);
    const Result before = device.run();
    for (const int t0 : {17, 100, 150, 199, 327, 328, 329, 500, 550}) {
      const std::size_t document = t0 < 200 ? 0 : 1;
      const int first = document == 0 ? t0 : t0 - 200;
      for (const Perturbation& how : kPerturbations) {
        SCOPED_TRACE(std::string(how.name) + " from " + std::to_string(t0));
        AttentionCase changed = test;
        const Range later{t0, document == 0 ? 200 : 600};
        perturb(changed, how, later, later);
        device.set_inputs(changed);
        const Result after = device.run();
        EXPECT_EQ(part_of(test, after, document, first, false),
                  part_of(test, before, document, first, false));
        EXPECT_EQ(whole(test, after, 1 - document), whole(test, before, 1 - document));
        ++changes;
        changed_nothing += whole(test, after, document) == whole(test, before, document);
        if (how.factor == 0) {
          const std::size_t row = test.q_at(test.pack().documents[document].q_token + first);
          EXPECT_TRUE(std::isnan(value_of(after.out[row])) and std::isnan(value_of(after.dq[row])));
        }
      }
    }
  }
  // The changes are hard: all but those of a last token that no row attends to are seen.
  EXPECT_LE(changed_nothing, changes / 20);
}

TEST_P(Sm90Promises, BitEqualOnRandomPacksWhateverChangesElsewhere) {
  // Exponents of a recipe that is not strictly causal look ahead up to the next multiple of 32.
  const int grain = GetParam().recipe.strictly_causal() ? 1 : 32;
  const auto aligned = [&](int x) { return (x + grain - 1) / grain * grain; };
  int cuts = 0, others = 0;
  for (std::uint64_t seed = 5000; seed < 5300; ++seed) {
    SCOPED_TRACE(seed);
    const AttentionCase test = random_case(seed, 400, GetParam().recipe, GetParam().dim);
    Normal random(seed);
    const auto& documents = test.pack().documents;
    const auto pick = [&] {
      return static_cast<std::size_t>(random.below(static_cast<int>(documents.size())));
    };
    const std::size_t document = pick(), other = pick();
    const Document& d = documents[document];
    const int rows = std::min(aligned(random.below(d.q_len + 1)), d.q_len);
    // Keys that none of the rows before sees.
    const int seen = rows == 0 ? 0 : visible_keys(test.spec().mask, d.q_len, d.k_len, rows - 1).end;
    const int keys = std::min(aligned(seen), d.k_len);
    const Perturbation& how = kPerturbations[seed % std::size(kPerturbations)];
    AttentionCase changed = test;
    const auto range = [](std::int64_t token, int begin, int end) {
      return Range{static_cast<int>(token) + begin, static_cast<int>(token) + end};
    };
    perturb(changed, how, range(d.q_token, rows, d.q_len), range(d.k_token, keys, d.k_len));
    if (other != document) {
      const Document& o = documents[other];
      perturb(changed, how, range(o.q_token, 0, o.q_len), range(o.k_token, 0, o.k_len));
    }
    DeviceAttention device(test);
    const Result before = device.run();
    device.set_inputs(changed);
    const Result after = device.run();
    ASSERT_EQ(part_of(test, after, document, rows, false),
              part_of(test, before, document, rows, false));
    for (std::size_t i = 0; i < documents.size(); ++i) {
      if (i == document or i == other) continue;
      ASSERT_EQ(whole(test, after, i), whole(test, before, i)) << "document " << i;
    }
    // What makes the packs hard, counted: keys and rows on both sides of the cut, and neighbours.
    cuts += rows > 0 and rows < d.q_len and keys < d.k_len;
    others += other != document and documents[other].k_len > 0;
  }
  EXPECT_GE(cuts, 30);
  EXPECT_GE(others, 100);
}

TEST_P(Sm90Promises, BitEqualWhereverADocumentLies) {
  const Mask masks[] = {{}, {.causal = true}, {.causal = true, .window_left = 100}};
  for (const Mask& mask : masks) {
    AttentionCase alone = make({.q_lens = {333}, .heads_q = 4, .heads_k = 2, .mask = mask});
    fill_normal(alone, 31);
    Normal random(32);
    spread_rows(alone.v, alone.spec().dim, 5, random);
    DeviceAttention single(alone);
    const Part expected = whole(alone, single.run(), 0);
    for (int round = 0; round < 6; ++round) {
      SCOPED_TRACE(round);
      std::vector<int> lens;
      for (int i = random.below(5); i > 0; --i) lens.push_back(random_length(random, 200));
      const std::size_t at = lens.size();
      lens.push_back(333);
      for (int i = random.below(5); i > 0; --i) lens.push_back(random_length(random, 200));
      AttentionCase pack =
          make({.q_lens = lens, .heads_q = 4, .heads_k = 2, .mask = mask, .spare = 50});
      fill_normal(pack, 40 + static_cast<std::uint64_t>(round));
      if (round % 2 == 1) multiply(pack.k, 1e3);
      const Document& d = pack.pack().documents[at];
      const auto put = [](const Bf16Vector& from, Bf16Vector& to, std::size_t begin) {
        std::copy(from.begin(), from.end(), to.begin() + static_cast<std::ptrdiff_t>(begin));
      };
      put(alone.q, pack.q, pack.q_at(d.q_token));
      put(alone.dout, pack.dout, pack.q_at(d.q_token));
      put(alone.k, pack.k, pack.k_at(d.k_token));
      put(alone.v, pack.v, pack.k_at(d.k_token));
      poison_tails(pack);
      DeviceAttention packed(pack);
      EXPECT_EQ(whole(pack, packed.run(), at), expected);
    }
  }
}

TEST_P(Sm90Promises, BitEqualOverAHundredRuns) {
  const AttentionCase test = [] {
    AttentionCase t =
        make({.q_lens = {300, 1, 127, 0, 450}, .heads_q = 4, .heads_k = 1, .spare = 17});
    fill_normal(t, 51);
    poison_tails(t);
    return t;
  }();
  cudaStream_t stream = nullptr;
  MXATTN_EXPECT_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  DeviceAttention device(test);
  const Result first = device.run();
  for (int i = 0; i < 100; ++i) {
    ASSERT_EQ(device.run(i % 2 == 0 ? nullptr : stream), first) << "run " << i;
  }
  DeviceAttention planned(test, {.planned = true});
  EXPECT_EQ(planned.run(), first);
  DeviceAttention unaligned(test, {.pad = 1});
  EXPECT_EQ(unaligned.run(), first);
  MXATTN_EXPECT_CUDA(cudaStreamDestroy(stream));
}

TEST_P(Sm90Promises, BitEqualOnTwoStreamsAtOnce) {
  AttentionCase a = make({.q_lens = {700, 20}, .heads_q = 8});
  AttentionCase b = make({.q_lens = {31, 500}, .heads_q = 6});
  fill_normal(a, 61);
  fill_normal(b, 62);
  DeviceAttention on_a(a), on_b(b);
  const Result alone_a = on_a.run(), alone_b = on_b.run();
  cudaStream_t streams[2];
  for (auto& stream : streams) {
    MXATTN_EXPECT_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  }
  for (int i = 0; i < 10; ++i) {
    on_a.poison(streams[0]);
    on_b.poison(streams[1]);
    on_a.forward(streams[0]);
    on_b.forward(streams[1]);
    on_a.backward(streams[0]);
    on_b.backward(streams[1]);
    MXATTN_EXPECT_CUDA(cudaDeviceSynchronize());
    ASSERT_EQ(on_a.result(), alone_a);
    ASSERT_EQ(on_b.result(), alone_b);
  }
  for (auto& stream : streams) MXATTN_EXPECT_CUDA(cudaStreamDestroy(stream));
}

/// A captured graph of one forward and backward.
class Graph {
 public:
  Graph(DeviceAttention& device, cudaStream_t stream) : stream_(stream) {
    MXATTN_EXPECT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    device.poison(stream);
    device.forward(stream);
    device.backward(stream);
    cudaGraph_t graph = nullptr;
    MXATTN_EXPECT_CUDA(cudaStreamEndCapture(stream, &graph));
    if (graph == nullptr) return;
    MXATTN_EXPECT_CUDA(cudaGraphInstantiate(&graph_, graph, 0));
    MXATTN_EXPECT_CUDA(cudaGraphDestroy(graph));
  }
  ~Graph() {
    if (graph_ != nullptr) cudaGraphExecDestroy(graph_);
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  void launch() {
    if (graph_ == nullptr) return;
    MXATTN_EXPECT_CUDA(cudaGraphLaunch(graph_, stream_));
    MXATTN_EXPECT_CUDA(cudaStreamSynchronize(stream_));
  }

 private:
  cudaStream_t stream_;
  cudaGraphExec_t graph_ = nullptr;
};

TEST_P(Sm90Promises, BitEqualInAReplayedGraphWithOtherLengths) {
  AttentionCase test = make({.q_lens = {100, 220, 30}, .heads_q = 4, .heads_k = 2});
  AttentionCase other = make({.q_lens = {257, 0, 93}, .heads_q = 4, .heads_k = 2});
  fill_normal(test, 71);
  fill_normal(other, 72);
  cudaStream_t stream = nullptr;
  MXATTN_EXPECT_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  DeviceAttention device(test), fresh(other);
  const Result expected = device.run(), expected_other = fresh.run();
  {
    Graph graph(device, stream);
    for (int i = 0; i < 3; ++i) {
      graph.launch();
      ASSERT_EQ(device.result(), expected) << "replay " << i;
    }
    device.set_lengths(other);
    device.set_inputs(other);
    graph.launch();
    EXPECT_EQ(device.result(), expected_other);
    // Lists that were built in the graph follow too.
    device.set_lengths(test);
    device.set_inputs(test);
    graph.launch();
    EXPECT_EQ(device.result(), expected);
  }
  MXATTN_EXPECT_CUDA(cudaStreamDestroy(stream));
}

TEST_P(Sm90Promises, BoundedOnesAreTheirOwnMean) {
  AttentionCase test = make({.q_lens = {1000, 77}, .heads_q = 2});
  fill_normal(test, 81);
  multiply(test.q, 4);
  const std::uint16_t one = float_to_bf16(1.0f);
  std::fill(test.v.begin(), test.v.end(), one);
  DeviceAttention device(test);
  const Result result = device.run();
  EXPECT_TRUE(std::all_of(result.out.begin(), result.out.end(),
                          [&](std::uint16_t bits) { return bits == one; }));
}

// ---- the interface ----------------------------------------------------------------------------

std::string message_of(mxattn_status status, mxattn_status expected) {
  EXPECT_EQ(status, expected);
  return mxattn_last_error();
}

void expect_message(const std::string& message, const std::string& part) {
  EXPECT_NE(message.find(part), std::string::npos) << message;
}

TEST_F(Sm90Interface, RefusesWhatItCannotRead) {
  AttentionCase test({.q_lens = {40, 9}});
  fill_normal(test, 91);
  DeviceAttention device(test);
  mxattn_forward_args good;
  mxattn_forward_args_init(&good);
  good.call = device.call(nullptr);
  good.q = device.tensor(device.q, 49, 1);
  good.k = device.tensor(device.k, 49, 1);
  good.v = device.tensor(device.v, 49, 1);
  good.out = device.tensor(device.out, 49, 1);
  good.lse = device.lse_tensor();
  const auto refuse = [&](const char* part, auto spoil) {
    mxattn_forward_args args = good;
    spoil(args);
    expect_message(message_of(mxattn_forward(device.problem(), &args), MXATTN_INVALID_ARGUMENT),
                   part);
  };
  refuse("q.data = ", [&](auto& a) { a.q.data = test.q.data(); });
  refuse("memory of CUDA device 0", [&](auto& a) { a.q.data = test.q.data(); });
  refuse("workspace_bytes = 5", [](auto& a) { a.call.workspace_bytes = 5; });
  refuse("workspace = null", [](auto& a) { a.call.workspace = nullptr; });
  refuse("workspace = ",
         [](auto& a) { a.call.workspace = static_cast<char*>(a.call.workspace) + 16; });
  refuse("cu_seqlens_q", [](auto& a) { a.call.cu_seqlens_q.data = nullptr; });
  refuse("does not share", [&](auto& a) { a.out.data = device.q; });
  EXPECT_EQ(mxattn_forward(device.problem(), &good), MXATTN_OK) << mxattn_last_error();
  MXATTN_EXPECT_CUDA(cudaDeviceSynchronize());
}

TEST_F(Sm90Interface, BitEqualRestoredValues) {
  AttentionCase test({.q_lens = {150, 0, 60}, .heads_q = 4, .heads_k = 2, .spare = 5});
  fill_normal(test, 94);
  std::fill_n(test.k.begin() + static_cast<std::ptrdiff_t>(test.k_at(170)), 3, kNanBits);
  poison_tails(test);
  DeviceAttention device(test);
  device.run();
  const Sm90Model model(test);
  const auto total = static_cast<std::int64_t>(test.pack().total_q);
  for (const auto& [operand, role, heads, host_operand] :
       {std::tuple{MXATTN_Q, Role::kQ, 4, &model.q()},
        std::tuple{MXATTN_K, Role::kK, 2, &model.k()},
        std::tuple{MXATTN_V, Role::kV, 2, &model.v()}}) {
    for (const bool rotate_back : {false, true}) {
      const auto size = static_cast<std::size_t>(total * heads * 128);
      DeviceArray<float> restored(std::vector<float>(size, -1.0f));
      mxattn_quantize_args args;
      mxattn_quantize_args_init(&args);
      args.call = device.call(nullptr);
      args.operand = operand;
      args.rotate_back = rotate_back;
      args.tensor = {restored.data(), MXATTN_F32, 3, {total, heads, 128}, {heads * 128, 128, 1}};
      EXPECT_EQ(mxattn_dequantize(device.problem(), &args), MXATTN_OK) << mxattn_last_error();
      std::vector<float> expected(size, -2.0f);
      restore(*host_operand, role, test.pack(), rotate_back and role != Role::kV, 1,
              {expected.data(), total, heads, 128, heads * 128, 128});
      const std::vector<float> values = restored.to_host();
      std::size_t different = 0, nans = 0;
      for (std::size_t i = 0; i < size; ++i) {
        nans += is_nan(expected[i]) ? 1 : 0;
        different += is_nan(expected[i]) ? not is_nan(values[i])
                                         : bits_of(values[i]) != bits_of(expected[i]);
      }
      EXPECT_EQ(different, 0u) << "operand " << operand << " rotated back " << rotate_back;
      // Exponents run: one NaN token makes all later ones of its document NaN.
      EXPECT_EQ(nans > 0, operand == MXATTN_K);
    }
  }
}

TEST_F(Sm90Interface, ChecksLengthsWhenAsked) {
  AttentionCase test({.q_lens = {40, 9}});
  fill_normal(test, 92);
  DeviceAttention device(test);
  const mxattn_tensor lengths = device.call(nullptr).cu_seqlens_q;
  EXPECT_EQ(mxattn_check_cu_seqlens(device.problem(), &lengths, nullptr, nullptr), MXATTN_OK);
  const std::int32_t wrong[] = {0, 40, 39};
  MXATTN_EXPECT_CUDA(cudaMemcpy(device.cu_seqlens_q, wrong, sizeof wrong, cudaMemcpyDefault));
  expect_message(message_of(mxattn_check_cu_seqlens(device.problem(), &lengths, nullptr, nullptr),
                            MXATTN_INVALID_ARGUMENT),
                 "cu_seqlens_q");
}

TEST_F(Sm90Interface, BitEqualWithOperandsQuantisedBefore) {
  AttentionCase test({.q_lens = {150, 60}, .heads_q = 4, .heads_k = 2, .spare = 5});
  fill_normal(test, 93);
  poison_tails(test);
  DeviceAttention device(test);
  const Result expected = device.run();
  device.poison(nullptr);
  const std::int64_t total = test.pack().total_q;
  for (const auto& [operand, tensor] : {std::pair{MXATTN_Q, device.tensor(device.q, total, 4)},
                                        std::pair{MXATTN_K, device.tensor(device.k, total, 2)},
                                        std::pair{MXATTN_V, device.tensor(device.v, total, 2)}}) {
    mxattn_quantize_args args;
    mxattn_quantize_args_init(&args);
    args.call = device.call(nullptr);
    args.operand = operand;
    args.tensor = tensor;
    EXPECT_EQ(mxattn_quantize(device.problem(), &args), MXATTN_OK) << mxattn_last_error();
  }
  mxattn_forward_args args;
  mxattn_forward_args_init(&args);
  args.call = device.call(nullptr);
  args.quantized = MXATTN_Q | MXATTN_K | MXATTN_V;
  args.out = device.tensor(device.out, total, 4);
  args.lse = device.lse_tensor();
  EXPECT_EQ(mxattn_forward(device.problem(), &args), MXATTN_OK) << mxattn_last_error();
  device.backward(nullptr);
  MXATTN_EXPECT_CUDA(cudaDeviceSynchronize());
  EXPECT_EQ(device.result(), expected);
}

TEST_F(Sm90Interface, SaysWhatItRunsAndWhyNot) {
  AttentionCase test({.q_lens = {10}});
  DeviceAttention device(test);
  const std::string explanation = mxattn_problem_explain(device.problem());
  expect_message(explanation, "Hopper");
  expect_message(explanation, "multiprocessors");
  const auto refuse = [](const char* part, auto spoil) {
    mxattn_problem_config config;
    mxattn_problem_config_init(&config);
    config.device_kind = MXATTN_DEVICE_CUDA;
    config.total_q = config.total_k = 64;
    config.num_documents = config.heads_q = config.heads_k = 1;
    config.head_dim = 128;
    spoil(config);
    std::int32_t can_run = 1;
    const char* reason = "";
    EXPECT_EQ(mxattn_can_run(&config, &can_run, &reason), MXATTN_OK);
    EXPECT_EQ(can_run, 0);
    expect_message(reason, part);
  };
  refuse("head_dim = 96", [](auto& c) { c.head_dim = 96; });
  refuse("recipe bf16", [](auto& c) { c.recipe = "bf16"; });
  refuse("device_index = 99", [](auto& c) { c.device_index = 99; });
  refuse("2^31 slots", [](auto& c) { c.total_q = 1ll << 31; });
}

}  // namespace
}  // namespace mxattn::test
