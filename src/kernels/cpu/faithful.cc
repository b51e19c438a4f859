#include "kernels/cpu/faithful.h"

#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "base/error.h"
#include "kernels/cpu/faithful_gradient.h"
#include "kernels/cpu/faithful_items.h"
#include "kernels/cpu/sm90_mma.h"
#include "kernels/cpu/tile_gemm.h"
#include "plan/plan.h"

namespace mxattn::kernels {
namespace {

using cpu::Item;

std::string supports(const Problem& problem) {
  if (cpu::item_functions(problem.recipe) == nullptr or
      problem.recipe.key_order != KeyOrder::kDescending or
      problem.recipe.output != Element::kBf16 or
      problem.recipe.scale_group == ScaleGroup::kTensor) {
    return "the fast CPU loops have no such recipe; the FP64 backend runs it";
  }
  if (problem.dim < 1 or problem.dim > cpu::kMaxDim) {
    return detail::concat("dim = ", problem.dim, ": expected 1 to ", cpu::kMaxDim);
  }
  if (problem.sm90_accumulator and not problem.recipe.quantised()) {
    return "the model of the FP8 accumulator takes FP8 operands only";
  }
  return {};
}

plan::Plan make_plan(const Problem& problem, plan::Pass pass) {
  plan::PlanSpec spec;
  spec.pass = pass;
  spec.heads_q = problem.heads_q;
  spec.heads_k = problem.heads_k;
  spec.tile = cpu::kMaxUnits * cpu::kTile;
  return plan::make_plan(*problem.pack, problem.mask, spec);
}

plan::Plans make_plans(const Problem& problem) {
  return {.forward = make_plan(problem, plan::Pass::kForward),
          .dq = make_plan(problem, plan::Pass::kDq),
          .dkv = make_plan(problem, plan::Pass::kDkv)};
}

/// Runs body(item, scratch) for every item of the pass, each thread with scratch of its own.
template <class Body>
void for_each_item(const Problem& problem, plan::Pass pass, const Body& body) {
  const plan::Plan own = problem.plans == nullptr ? make_plan(problem, pass) : plan::Plan{};
  const plan::Plan& plan = problem.plans == nullptr ? own : problem.plans->of(pass);
  const std::vector<std::int64_t> tiles = cpu::first_tiles(*problem.pack);
  const auto num_items = static_cast<std::int64_t>(plan.items.size());
  const int threads =
      static_cast<int>(std::clamp<std::int64_t>(num_items, 1, std::max(problem.threads, 1)));

  // Allocated here, where an exception may leave.
  const std::size_t bytes = (cpu::scratch_bytes(problem.dim) + 4095) / 4096 * 4096;
  const cpu::Buffer<std::byte> scratch(bytes * static_cast<std::size_t>(threads));
  const cpu::TileGemm& engine =
      problem.sm90_accumulator ? cpu::sm90_tile_gemm() : cpu::best_tile_gemm();
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1)
  for (std::int64_t i = 0; i < num_items; ++i) {
    const plan::WorkItem& work = plan.items[static_cast<std::size_t>(i)];
    const auto document = static_cast<std::size_t>(work.document);
    const Item item{.problem = &problem,
                    .engine = &engine,
                    .document = problem.pack->documents[document],
                    .first_tile = tiles[document],
                    .head = work.head,
                    .first = work.first,
                    .count = work.count};
    body(item, scratch.get() + bytes * static_cast<std::size_t>(omp_get_thread_num()));
  }
}

/// body(first, end) for the rows of a packed tensor that no document holds.
template <class Body>
void for_each_gap(const Pack& pack, bool query_side, const Body& body) {
  std::int64_t covered = 0;
  for (const Document& document : pack.documents) {
    const std::int64_t begin = query_side ? document.q_token : document.k_token;
    if (begin > covered) body(covered, begin);
    covered = begin + (query_side ? document.q_len : document.k_len);
  }
  const std::int64_t total = query_side ? pack.total_q : pack.total_k;
  if (total > covered) body(covered, total);
}

void clear_gaps(const Pack& pack, bool query_side, const TensorView<Bf16Bits>& x) {
  for_each_gap(pack, query_side, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t token = begin; token < end; ++token) {
      for (int head = 0; head < x.heads; ++head) std::fill_n(x.row(token, head), x.dim, 0);
    }
  });
}

void forward(const Problem& problem, const ForwardArgs& args) {
  const cpu::ItemFunctions& functions = *cpu::item_functions(problem.recipe);
  for_each_item(problem, plan::Pass::kForward, [&](const Item& item, std::byte* scratch) {
    functions.forward(item, args, scratch);
  });
  const Pack& pack = *problem.pack;
  clear_gaps(pack, true, args.out);
  for_each_gap(pack, true, [&](std::int64_t begin, std::int64_t end) {
    for (int head = 0; head < problem.heads_q; ++head) {
      const std::int64_t row = head * pack.total_q;
      std::fill(args.lse + row + begin, args.lse + row + end, -kInfinity);
      std::fill(args.state.row_reference + row + begin, args.state.row_reference + row + end, 0);
      std::fill(args.state.row_sum + row + begin, args.state.row_sum + row + end, 1.0f);
    }
  });
}

void backward(const Problem& problem, const BackwardArgs& args) {
  const cpu::ItemFunctions& functions = *cpu::item_functions(problem.recipe);
  const Pack& pack = *problem.pack;
  // NOTE: the gradient lies in dq until the dQ pass, which therefore comes last.
  const cpu::Gradient gradient(problem, args);
  for_each_item(problem, plan::Pass::kDkv, [&](const Item& item, std::byte* scratch) {
    functions.dkv(item, args, gradient, scratch);
  });
  for_each_item(problem, plan::Pass::kDq, [&](const Item& item, std::byte* scratch) {
    functions.dq(item, args, gradient, scratch);
  });
  clear_gaps(pack, true, args.dq);
  clear_gaps(pack, false, args.dk);
  clear_gaps(pack, false, args.dv);
}

}  // namespace

const Backend& faithful_backend() {
  static constexpr Backend kBackend{"faithful", supports, forward, backward, make_plans};
  return kBackend;
}

}  // namespace mxattn::kernels
