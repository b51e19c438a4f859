// What the fast backend allocates, and that the rows of dQ, which hold the prepared gradient for a
// while, come out right wherever they lie.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <vector>

#include "kernels/cpu/faithful.h"
#include "kernels/cpu/faithful_gradient.h"
#include "support/attention_case.h"
#include "support/inputs.h"

namespace {

// Bytes that were ever asked for, by anybody in this program.
std::atomic<std::int64_t> allocated{0};

void* allocate(std::size_t bytes, std::size_t alignment) {
  allocated += static_cast<std::int64_t>(bytes);
  void* const p = std::aligned_alloc(alignment, (bytes + alignment) / alignment * alignment);
  if (p == nullptr) throw std::bad_alloc();
  return p;
}

}  // namespace

// The forms for arrays and without exceptions call these. NOTE: not inlined, as GCC warns of free()
// where it sees that what it frees came from new.
void* operator new(std::size_t bytes) { return allocate(bytes, __STDCPP_DEFAULT_NEW_ALIGNMENT__); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return allocate(bytes, static_cast<std::size_t>(alignment));
}
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, std::size_t) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, std::size_t, std::align_val_t) noexcept {
  std::free(p);
}

namespace mxattn::test {
namespace {

using kernels::Backend;
using kernels::BackwardArgs;
using kernels::Bf16Bits;
using kernels::faithful_backend;
using kernels::ForwardArgs;
using kernels::Problem;

// ---- allocations ------------------------------------------------------------------------------

struct Allocated {
  std::int64_t forward = 0;
  std::int64_t backward = 0;
};
Allocated counted;

/// The fast backend with lists made beforehand, as a caller with many layers does; counts.
const Backend& counting_backend() {
  static constexpr auto kCount = [](const Problem& problem, auto&& run) {
    const plan::Plans plans = faithful_backend().make_plans(problem);
    Problem planned = problem;
    planned.plans = &plans;
    const std::int64_t before = allocated;
    run(planned);
    return allocated - before;
  };
  static constexpr Backend kBackend{
      "counting", [](const Problem& problem) { return faithful_backend().supports(problem); },
      [](const Problem& problem, const ForwardArgs& args) {
        counted.forward =
            kCount(problem, [&](const Problem& p) { faithful_backend().forward(p, args); });
      },
      [](const Problem& problem, const BackwardArgs& args) {
        counted.backward =
            kCount(problem, [&](const Problem& p) { faithful_backend().backward(p, args); });
      }};
  return kBackend;
}

Allocated bytes_of_call(const Recipe& recipe, int tokens, int heads, int dim, int threads) {
  AttentionCase test(
      {.recipe = recipe, .q_lens = {tokens}, .heads_q = heads, .heads_k = 1, .dim = dim});
  fill_normal(test, 1);
  test.run(counting_backend(), threads);
  return counted;
}

// Scratch of threads, and an entry for each query tile and head: nothing else.
TEST(FaithfulMemory, AllocatesNothingOfTheSizeOfATensor) {
  constexpr int kFew = 512, kMany = 1024, kHeads = 2;
  constexpr std::int64_t kTiles = kHeads * (kMany - kFew) / kernels::cpu::kTile;
  bytes_of_call(recipes::fp8, 1, 1, 8, 1);  // what is made once for a program is there
  for (const RecipeInfo& info : supported_recipes(faithful_backend())) {
    for (const int threads : {1, 2}) {
      for (const int dim : {7, 64}) {
        SCOPED_TRACE(testing::Message() << info.name << " threads " << threads << " d " << dim);
        const Allocated few = bytes_of_call(info.recipe, kFew, kHeads, dim, threads);
        const Allocated many = bytes_of_call(info.recipe, kMany, kHeads, dim, threads);
        EXPECT_GT(few.forward, 0);  // the count sees the backend
        EXPECT_EQ(many.forward, few.forward);
        EXPECT_GT(few.backward, 0);
        EXPECT_LE(many.backward - few.backward,
                  kTiles * static_cast<std::int64_t>(sizeof(kernels::cpu::QueryTileMaxima)));
      }
    }
  }
}

// ---- rows of dQ -------------------------------------------------------------------------------

constexpr Bf16Bits kUntouched = 0x7fab;  // a NaN that nobody computes

/// Where rows of dQ lie: at odd addresses of elements, heads outside or inside, with room between.
struct Layout {
  bool heads_outside = false;
  int before = 0;  // elements ahead of the first row
  int between = 0;
};
Layout layout;

/// The fast backend with dq laid out as `layout` says.
const Backend& strided_backend() {
  static constexpr Backend kBackend{
      "strided", [](const Problem& problem) { return faithful_backend().supports(problem); },
      [](const Problem& problem, const ForwardArgs& args) {
        faithful_backend().forward(problem, args);
      },
      [](const Problem& problem, const BackwardArgs& args) {
        TensorView<Bf16Bits> dq = args.dq;
        const std::int64_t row = dq.dim + layout.between;
        const std::int64_t rows = dq.tokens * dq.heads;
        Bf16Vector memory(static_cast<std::size_t>(layout.before + rows * row), kUntouched);
        dq.data = memory.data() + layout.before;
        dq.token_stride = layout.heads_outside ? row : row * dq.heads;
        dq.head_stride = layout.heads_outside ? row * dq.tokens : row;
        BackwardArgs moved = args;
        moved.dq = dq;
        faithful_backend().backward(problem, moved);
        for (std::int64_t token = 0; token < dq.tokens; ++token) {
          for (int head = 0; head < dq.heads; ++head) {
            Bf16Bits* const from = dq.row(token, head);
            std::copy_n(from, dq.dim, args.dq.row(token, head));
            std::fill_n(from, dq.dim, kUntouched);
          }
        }
        EXPECT_TRUE(std::all_of(memory.begin(), memory.end(), [](Bf16Bits x) {
          return x == kUntouched;
        })) << "something between the rows was written";
      }};
  return kBackend;
}

// Every head size around the borders of "the row has room" and of whole vectors; queries without
// keys, documents without queries, rows outside documents.
TEST(FaithfulMemory, BitEqualWhereverRowsOfDqLie) {
  const Layout layouts[] = {{false, 0, 0}, {false, 1, 3}, {true, 3, 1}, {true, 0, 64}};
  for (const RecipeInfo& info : supported_recipes(faithful_backend())) {
    for (const int dim : {1, 2, 5, 6, 7, 8, 9, 33, 128}) {
      AttentionCase test({.recipe = info.recipe,
                          .q_lens = {3, 0, 170, 60},
                          .k_lens = {7, 5, 140, 90},
                          .heads_q = 4,
                          .heads_k = 2,
                          .dim = dim,
                          .spare = 3});
      fill_normal(test, 4);
      layout = layouts[0];
      const Result want = test.run(strided_backend());
      for (const Layout& other : layouts) {
        SCOPED_TRACE(testing::Message() << info.name << " d " << dim << " before " << other.before
                                        << " between " << other.between);
        layout = other;
        EXPECT_EQ(test.run(strided_backend(), 3), want);
      }
    }
  }
}

}  // namespace
}  // namespace mxattn::test
