#include "kernels/cpu/faithful.h"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "base/error.h"
#include "formats/bf16.h"
#include "kernels/cpu/faithful_items.h"
#include "kernels/cpu/sm90_mma.h"
#include "kernels/cpu/tile_gemm.h"
#include "plan/plan.h"
#include "quantize/quantize.h"
#include "recipe/stages.h"

namespace mxattn::kernels {
namespace {

using cpu::Gradient;
using cpu::Item;
using cpu::QueryTileMaxima;
using stages::Exponent;

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

/// Query tiles before each document, and of all.
std::vector<std::int64_t> first_tiles(const Pack& pack) {
  std::vector<std::int64_t> first{0};
  for (const Document& document : pack.documents) {
    first.push_back(first.back() + (document.q_len + cpu::kTile - 1) / cpu::kTile);
  }
  return first;
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
  const std::vector<std::int64_t> tiles = first_tiles(*problem.pack);
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

/// Maxima of a query tile for the scale of dS in the dK/dV pass.
QueryTileMaxima maxima_of(const GradientState& gradient, const Operand& q, int head,
                          std::int64_t slot, int count) {
  QueryTileMaxima tile;
  const std::uint8_t* const codes = gradient.g.row(head, slot);
  tile.live = std::any_of(codes, codes + static_cast<std::ptrdiff_t>(count) * gradient.g.dim,
                          [](std::uint8_t code) { return (code & 0x7F) != 0; });
  const std::int8_t* const eg = gradient.g.exponents_of(head) + slot;
  const std::int8_t* const ng = gradient.g.norms_of(head) + slot;
  const std::int8_t* const eq = q.exponents_of(head) + slot;
  const std::int8_t* const no = gradient.output_norms + head * gradient.g.slots + slot;
  for (int i = 0; i < count; ++i) {
    const Exponent bound = Exponent::stored(ng[i]) + Exponent::stored(eq[i]);
    tile.scales.c = max(tile.scales.c, Exponent::stored(eg[i]));
    tile.scales.b = max(tile.scales.b, bound);
    // The norm exponent of a row O = 0.
    if (no[i] == stages::kNormExponentMin) continue;
    tile.scales.a = max(tile.scales.a, bound + Exponent::stored(no[i]));
  }
  return tile;
}

/// D of a recipe that keeps dO plain: sums over channels in the order of the quantiser.
float plain_delta(const Bf16Bits* out, const Bf16Bits* dout, int dim) {
  float chain[4] = {0, 0, 0, 0};
  for (int c = 0; c < dim; ++c) {
    chain[c % 4] = fma_rn(bf16_to_float(dout[c]), bf16_to_float(out[c]), chain[c % 4]);
  }
  return add_rn(add_rn(chain[0], chain[1]), add_rn(chain[2], chain[3]));
}

void plain_deltas(const Problem& problem, const BackwardArgs& args, float* delta) {
  const Pack& pack = *problem.pack;
  const auto documents = static_cast<std::int64_t>(pack.documents.size());
#pragma omp parallel for num_threads(problem.threads) schedule(dynamic) if (problem.threads > 1)
  for (std::int64_t i = 0; i < documents * problem.heads_q; ++i) {
    const Document& document = pack.documents[static_cast<std::size_t>(i % documents)];
    const int head = static_cast<int>(i / documents);
    float* const row = delta + head * pack.q_slots + document.q_slot;
    for (int t = 0; t < document.q_len; ++t) {
      row[t] = plain_delta(args.out.row(document.q_token + t, head),
                           args.dout.row(document.q_token + t, head), problem.dim);
    }
  }
}

void backward(const Problem& problem, const BackwardArgs& args) {
  const cpu::ItemFunctions& functions = *cpu::item_functions(problem.recipe);
  const Pack& pack = *problem.pack;
  const auto rows = static_cast<std::size_t>(pack.q_slots) * problem.heads_q;
  const std::vector<std::int64_t> tiles = first_tiles(pack);

  cpu::Buffer<float> delta(rows);
  cpu::Buffer<std::uint8_t> codes;
  std::vector<std::int8_t> exponents, norms, output_norms;
  std::vector<QueryTileMaxima> maxima;
  Gradient gradient;
  gradient.state.delta = delta.get();
  gradient.tiles = tiles.back();
  if (problem.recipe.gradient == GradientOperand::kPlain) {
    plain_deltas(problem, args, delta.get());
  } else {
    codes = cpu::Buffer<std::uint8_t>(rows * problem.dim);
    exponents.resize(rows);
    norms.resize(rows);
    output_norms.resize(rows);
    gradient.state.g = {.codes = codes.get(),
                        .exponents = exponents.data(),
                        .norms = norms.data(),
                        .slots = pack.q_slots,
                        .heads = problem.heads_q,
                        .dim = problem.dim};
    gradient.state.output_norms = output_norms.data();
    prepare_gradient(problem.recipe, problem.mask, args.out, args.dout, args.state.row_sum, pack,
                     problem.threads, gradient.state);
    maxima.resize(static_cast<std::size_t>(tiles.back()) * problem.heads_q);
    gradient.maxima = maxima.data();
#pragma omp parallel for num_threads(problem.threads) if (problem.threads > 1)
    for (int head = 0; head < problem.heads_q; ++head) {
      for (std::size_t i = 0; i < pack.documents.size(); ++i) {
        const Document& document = pack.documents[i];
        QueryTileMaxima* tile = maxima.data() + head * tiles.back() + tiles[i];
        for (int first = 0; first < document.q_len; first += cpu::kTile) {
          *tile++ = maxima_of(gradient.state, args.state.q, head, document.q_slot + first,
                              std::min(cpu::kTile, document.q_len - first));
        }
      }
    }
  }

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
