#include "kernels/cpu/faithful_gradient.h"

#include <omp.h>

#include <algorithm>

#include "base/numeric.h"
#include "formats/bf16.h"
#include "quantize/quantize.h"

namespace mxattn::kernels::cpu {
namespace {

static_assert(GradientRows::fit(7) and not GradientRows::fit(6));

/// The queries of one tile of a document and head.
struct QueryTile {
  const Document& document;
  int head;
  Range queries;

  std::int64_t token() const { return document.q_token + queries.begin; }
};

/// A tile's rows on their way to where they stay.
struct TileScratch {
  TileScratch(Carver& carver, int dim) {
    state.g = {.codes = carver.take<std::uint8_t>(static_cast<std::size_t>(kTile) * dim),
               .exponents = carver.take<std::int8_t>(kTile),
               .norms = carver.take<std::int8_t>(kTile),
               .slots = kTile,
               .heads = 1,
               .dim = dim};
    state.output_norms = carver.take<std::int8_t>(kTile);
    state.delta = carver.take<float>(kTile);
  }

  GradientState state;
};

QueryTileMaxima maxima_of(const GradientState& gradient, const std::int8_t* eq, int count) {
  QueryTileMaxima tile;
  const Operand& g = gradient.g;
  tile.live = std::any_of(g.codes, g.codes + static_cast<std::ptrdiff_t>(count) * g.dim,
                          [](std::uint8_t code) { return (code & 0x7F) != 0; });
  for (int i = 0; i < count; ++i) {
    const Exponent bound = Exponent::stored(g.norms[i]) + Exponent::stored(eq[i]);
    tile.scales.c = max(tile.scales.c, Exponent::stored(g.exponents[i]));
    tile.scales.b = max(tile.scales.b, bound);
    // The norm exponent of a row O = 0.
    if (gradient.output_norms[i] == stages::kNormExponentMin) continue;
    tile.scales.a = max(tile.scales.a, bound + Exponent::stored(gradient.output_norms[i]));
  }
  return tile;
}

/// Codes and statistics of a tile; returns its maxima.
QueryTileMaxima prepare_codes(const Problem& problem, const BackwardArgs& args,
                              const QueryTile& tile, const GradientState& scratch,
                              const GradientRows& rows) {
  prepare_gradient_rows(problem.recipe, problem.mask, args.out, args.dout, args.state.row_sum,
                        tile.document, tile.head, tile.queries, scratch);
  const Operand& g = scratch.g;
  for (int i = 0; i < tile.queries.size(); ++i) {
    const std::int64_t token = tile.token() + i;
    std::copy_n(g.row(0, i), g.dim, rows.codes(token, tile.head));
    rows.set_statistics(token, tile.head,
                        {scratch.delta[i], g.exponents[i], g.norms[i], scratch.output_norms[i]});
  }
  const std::int8_t* const eq = args.state.q.exponents_of(tile.head) + tile.document.q_slot;
  return maxima_of(scratch, eq + tile.queries.begin, tile.queries.size());
}

/// D of a recipe that keeps dO plain: sums over channels in the order of the quantiser.
float plain_delta(const Bf16Bits* out, const Bf16Bits* dout, int dim) {
  float chain[4] = {0, 0, 0, 0};
  for (int c = 0; c < dim; ++c) {
    chain[c % 4] = fma_rn(bf16_to_float(dout[c]), bf16_to_float(out[c]), chain[c % 4]);
  }
  return add_rn(add_rn(chain[0], chain[1]), add_rn(chain[2], chain[3]));
}

void prepare_plain(const BackwardArgs& args, const QueryTile& tile, const GradientRows& rows) {
  for (int i = 0; i < tile.queries.size(); ++i) {
    const std::int64_t token = tile.token() + i;
    rows.set_statistics(token, tile.head,
                        {.delta = plain_delta(args.out.row(token, tile.head),
                                              args.dout.row(token, tile.head), args.out.dim)});
  }
}

}  // namespace

std::vector<std::int64_t> first_tiles(const Pack& pack) {
  std::vector<std::int64_t> first{0};
  first.reserve(pack.documents.size() + 1);
  for (const Document& document : pack.documents) {
    first.push_back(first.back() + (document.q_len + kTile - 1) / kTile);
  }
  return first;
}

Gradient::Gradient(const Problem& problem, const BackwardArgs& args) {
  const Pack& pack = *problem.pack;
  const int heads = problem.heads_q;
  const int dim = problem.dim;
  if (GradientRows::fit(dim)) {
    constexpr std::int64_t kElement = sizeof(Bf16Bits);
    rows_ = {reinterpret_cast<std::byte*>(args.dq.data), args.dq.token_stride * kElement,
             args.dq.head_stride * kElement, dim};
  } else {
    const std::int64_t bytes = GradientRows::row_bytes(dim);
    memory_ = Buffer<std::byte>(static_cast<std::size_t>(pack.total_q * heads * bytes));
    rows_ = {memory_.get(), heads * bytes, bytes, dim};
  }

  const std::vector<std::int64_t> first = first_tiles(pack);
  tiles_ = first.back();
  const bool plain = problem.recipe.gradient == GradientOperand::kPlain;
  if (plain) {
    plain_ = args.dout;
  } else {
    maxima_.resize(static_cast<std::size_t>(tiles_ * heads));
  }

  Carver measure(nullptr);
  TileScratch(measure, dim);
  const int threads =
      static_cast<int>(std::clamp<std::int64_t>(tiles_, 1, std::max(problem.threads, 1)));
  const auto bytes = static_cast<std::size_t>(measure.bytes());  // of a thread
  const Buffer<std::byte> scratch(bytes * static_cast<std::size_t>(threads));
  // Heads run innermost: their rows share pages.
#pragma omp parallel for num_threads(threads) schedule(dynamic, heads) if (threads > 1)
  for (std::int64_t item = 0; item < tiles_ * heads; ++item) {
    const int head = static_cast<int>(item % heads);
    const std::int64_t tile = item / heads;
    // The last document that begins at the tile or before: those without queries begin there too.
    const auto after = std::upper_bound(first.begin(), first.end(), tile);
    const Document& document = pack.documents[static_cast<std::size_t>(after - first.begin()) - 1];
    const int begin = static_cast<int>(tile - *(after - 1)) * kTile;
    const QueryTile work{document, head, {begin, std::min(begin + kTile, document.q_len)}};
    if (plain) {
      prepare_plain(args, work, rows_);
      continue;
    }
    Carver carver(scratch.get() + bytes * static_cast<std::size_t>(omp_get_thread_num()));
    maxima_[static_cast<std::size_t>(head * tiles_ + tile)] =
        prepare_codes(problem, args, work, TileScratch(carver, dim).state, rows_);
  }
}

HeadRows Gradient::rows(const Document& document, int head) const {
  if (plain_.data != nullptr) {
    return head_rows(Operand{}, plain_, head, document.q_slot, document.q_token, document.q_len);
  }
  return {.codes = rows_.codes(document.q_token, head),
          .exponents = rows_.exponent(document.q_token, head),
          .stride = rows_.token_stride(),
          .exponent_stride = rows_.token_stride(),
          .length = document.q_len,
          .dim = rows_.dim()};
}

}  // namespace mxattn::kernels::cpu
