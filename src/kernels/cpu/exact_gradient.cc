#include "kernels/cpu/exact_gradient.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "recipe/roles.h"

namespace mxattn::kernels::exact {
namespace {

/// ceil(-log2 l), at most 0: p <= 2^w of a normalised row. A row with one large weight has l = 1,
/// which may come out below 1 by the rounding of the reference that l was saved with.
Exponent weight_bound(double l) {
  if (not(l > 0 and std::isfinite(l))) return {0, true};
  return std::min(0, static_cast<int>(std::ceil(-std::log2(l))));
}

/// Largest minus smallest of a scale over tiles.
struct Spread {
  int low = std::numeric_limits<int>::max();
  int high = std::numeric_limits<int>::min();
  void take(Exponent e) {
    low = std::min(low, e.value);
    high = std::max(high, e.value);
  }
  bool wide() const { return low < high and high - low > stages::kChunkSpread; }
};

}  // namespace

Gradient::Gradient(const Problem& problem, const BackwardArgs& args)
    : problem_(problem),
      args_(args),
      divided_(problem.recipe.gradient == GradientOperand::kDividedByL) {
  std::int64_t tiles = 0;
  for (const Document& document : problem.pack->documents) {
    first_tile_.push_back(tiles);
    tiles += (document.q_len + kTile - 1) / kTile;
  }
  scales_.resize(static_cast<std::size_t>(tiles * problem.heads_q));
  if (not divided_) {
    delta_.resize(static_cast<std::size_t>(problem.heads_q * problem.pack->total_q));
  }
  if (problem.recipe.quantised()) quantise();

  for_each_item(problem, plan::Pass::kDq, [&](int, const plan::WorkItem& item) {
    const Document& document = problem.pack->documents[static_cast<std::size_t>(item.document)];
    for (int i = item.first; i < item.first + item.count and not divided_; ++i) {
      set_delta(document.q_token + i, item.head, plain_delta(document, item.head, i));
    }
    const int tile = item.first / kTile;
    scales_[index_of(item.document, item.head, tile)] = scales_of_tile(document, item.head, tile);
  });
  for (int document = 0; divided_ and document < static_cast<int>(first_tile_.size()); ++document) {
    for (int head = 0; head < problem.heads_q; ++head) share_in_chunks(document, head);
  }
}

void Gradient::quantise() {
  const Pack& pack = *problem_.pack;
  const auto slots = static_cast<std::size_t>(problem_.heads_q * pack.q_slots);
  codes_.resize(slots * static_cast<std::size_t>(problem_.dim));
  exponents_.resize(slots);
  state_.g = {.codes = codes_.data(),
              .exponents = exponents_.data(),
              .slots = pack.q_slots,
              .heads = problem_.heads_q,
              .dim = problem_.dim};
  const int threads = num_threads(problem_);
  if (divided_) {
    norms_.resize(slots);
    output_norms_.resize(slots);
    divided_delta_.resize(slots);
    state_.g.norms = norms_.data();
    state_.output_norms = output_norms_.data();
    state_.delta = divided_delta_.data();
    prepare_gradient(problem_.recipe, problem_.mask, args_.out, args_.dout, args_.state.row_sum,
                     pack, threads, state_);
  } else {
    if (problem_.recipe.scale_group == ScaleGroup::kTensor) state_.g.scale = &tensor_scale_;
    mxattn::quantize(problem_.recipe, Role::kGradient, args_.dout, pack, false, threads, state_.g);
  }
}

Rows Gradient::rows(const Document& document, int head) const {
  return {state_.g, args_.dout, head, document.q_slot, document.q_token, problem_.dim};
}

Rows Gradient::output(const Document& document, int head) const {
  return {Operand{}, args_.out, head, document.q_slot, document.q_token, problem_.dim};
}

// D = sum of restored dO times O; of the codes of O where O was rounded to scaled E4M3.
double Gradient::plain_delta(const Document& document, int head, int query) const {
  const Recipe& recipe = problem_.recipe;
  if (recipe.operand == Element::kNone) return 0;
  const Rows g = rows(document, head);
  double gradient[kMaxDim], out[kMaxDim];
  g.load(query, 1, gradient);
  output(document, head).load(query, 1, out);
  const bool coded = recipe.output == Element::kE4m3;
  const double scale = coded ? *args_.state.v.scale : 1.0;
  double sum = 0;
  for (int c = 0; c < problem_.dim; ++c) {
    sum += gradient[c] * (coded ? round_e4m3(out[c] / scale) * scale : out[c]);
  }
  return sum * (stages::factor(g.exponent(query)) * g.scale());
}

QueryRow Gradient::query(const Document& document, int head, int query) const {
  const std::int64_t at = head * problem_.pack->total_q + document.q_token + query;
  const std::int32_t reference = args_.state.row_reference[at];
  const double row_sum = args_.state.row_sum[at];
  const Operand& q = args_.state.q;
  const Rows g = rows(document, head);

  QueryRow row;
  if (q.exponents != nullptr) {
    row.eq = Exponent::stored(q.exponents_of(head)[document.q_slot + query]);
  }
  row.eg = g.exponent(query);
  if (divided_) {
    const std::int64_t slot = head * state_.g.slots + document.q_slot + query;
    row.mu = reference;
    row.ng = g.norm(query);
    row.no = Exponent::stored(output_norms_[static_cast<std::size_t>(slot)]);
    row.delta = divided_delta_[static_cast<std::size_t>(slot)];
  } else {
    const double m = float_of(static_cast<std::uint32_t>(reference));
    row.addend = stages::plain_addend<Fp64Ops>(m, row_sum);
    row.weight_bound = weight_bound(row_sum);
    row.delta = delta_[static_cast<std::size_t>(at)];
  }
  return row;
}

QueryTileScales Gradient::scales_of_tile(const Document& document, int head, int tile) const {
  const Recipe& recipe = problem_.recipe;
  const Rows g = rows(document, head), out = output(document, head);
  QueryTileScales result;
  const int end = std::min((tile + 1) * kTile, document.q_len);
  for (int i = tile * kTile; i < end; ++i) {
    const QueryRow row = query(document, head, i);
    result.live = result.live or g.any(i) or row.eg.nan or std::isnan(row.delta);
    stages::ChunkScales& scales = result.scales;
    if (divided_) {
      if (out.any(i)) scales.a = max(scales.a, row.ng + row.eq + row.no);
      scales.b = max(scales.b, row.ng + row.eq);
      scales.c = max(scales.c, row.eg);
    } else if (recipe.ds_scale == DsScale::kBlock32) {
      if (not keys_of(problem_, document, i).empty()) {
        scales.c = max(scales.c, row.eg + row.weight_bound);
      }
    } else {
      scales.c = 0;
    }
  }
  return result;
}

// Scales hold for a chunk where they spread little; else each tile keeps its own. Tiles without a
// gradient take no part.
void Gradient::share_in_chunks(int document, int head) {
  const int q_len = problem_.pack->documents[static_cast<std::size_t>(document)].q_len;
  for (int chunk = 0; stages::chunk_begin(chunk) < q_len; ++chunk) {
    const int first = stages::chunk_begin(chunk) / kTile;
    const int last = (std::min(stages::chunk_end(chunk), q_len) + kTile - 1) / kTile;
    stages::ChunkScales shared;
    Spread a, b, c;
    for (int tile = first; tile < last; ++tile) {
      const QueryTileScales& own = scales_[index_of(document, head, tile)];
      if (not own.live) continue;
      a.take(own.scales.a);
      b.take(own.scales.b);
      c.take(own.scales.c);
      shared = {max(shared.a, own.scales.a), max(shared.b, own.scales.b),
                max(shared.c, own.scales.c)};
    }
    if (a.wide() or b.wide() or c.wide()) continue;
    for (int tile = first; tile < last; ++tile) {
      scales_[index_of(document, head, tile)].scales = shared;
    }
  }
}

}  // namespace mxattn::kernels::exact
