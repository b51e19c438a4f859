// Forward: one query tile against its key tiles, in the recipe's order; a row at a time.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "kernels/cpu/exact_passes.h"
#include "kernels/cpu/exact_tile.h"

namespace mxattn::kernels::exact {
namespace {

constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

/// Buffers of a thread. K is transposed so that a row of scores is a sum of rows.
struct Scratch {
  explicit Scratch(int dim)
      : q(kTile * dim), k(dim * kTile), v(kTile * dim), out(kTile * dim), partial(dim) {}

  std::vector<double> q, k, v, out, partial;
  double score[kTile] = {};   // acc, then z
  double factor[kTile] = {};  // a
  double weight[kTile] = {};  // P as the row sum and the product meet it
  double m[kTile] = {}, l[kTile] = {};
};

double row_reference(RowReference kind, double m_old, double tile_max) {
  switch (kind) {
    case RowReference::kMax:
      break;
    case RowReference::kInteger:
      return std::max(m_old, std::ceil(tile_max));
    case RowReference::kLazy4:
      return tile_max > m_old + stages::kLazyThreshold ? tile_max : m_old;
  }
  return std::max(m_old, tile_max);
}

class ForwardItem {
 public:
  ForwardItem(const Problem& problem, const ForwardArgs& args, const plan::WorkItem& item,
              Scratch& scratch)
      : problem_(problem),
        recipe_(problem.recipe),
        args_(args),
        document_(problem.pack->documents[static_cast<std::size_t>(item.document)]),
        head_(item.head),
        first_(item.first),
        count_(item.count),
        p_scale_(probability_scale(recipe_, stages::kTensorForwardPScale)),
        q_(args.state.q, args.q, head_, document_.q_slot, document_.q_token, problem.dim),
        k_(args.state.k, args.k, key_head(), document_.k_slot, document_.k_token, problem.dim),
        v_(args.state.v, args.v, key_head(), document_.k_slot, document_.k_token, problem.dim),
        scale_(problem, q_, k_),
        s_(scratch) {}

  void run() {
    q_.load(first_, count_, s_.q.data());
    std::fill(s_.out.begin(), s_.out.end(), 0.0);
    std::fill_n(s_.m, kTile, kMinusInfinity);
    std::fill_n(s_.l, kTile, 0.0);
    const int tiles = (document_.k_len + kTile - 1) / kTile;
    for (int n = 0; n < tiles; ++n) {
      visit(recipe_.key_order == KeyOrder::kDescending ? tiles - 1 - n : n);
    }
    for (int i = 0; i < count_; ++i) store(i);
  }

 private:
  int key_head() const { return head_ / (problem_.heads_q / problem_.heads_k); }
  Range keys(int i) const { return keys_of(problem_, document_, first_ + i); }

  void visit(int tile) {
    const int first = tile * kTile;
    const int count = std::min(kTile, document_.k_len - first);
    bool loaded = false;
    for (int i = 0; i < count_; ++i) {
      const Range range = local(keys(i), first, count);
      if (range.empty()) continue;
      if (not loaded) {
        k_.load_transposed(first, count, s_.k.data());
        v_.load(first, count, s_.v.data());
        loaded = true;
      }
      visit_row(i, first, count, range);
    }
  }

  // Scores, the new reference, P, the row sum and the product with V of one row. Nothing outside
  // `range` is read: that is the mask.
  void visit_row(int i, int first, int count, Range range) {
    const int dim = problem_.dim;
    const Exponent eq = q_.exponent(first_ + i);
    std::fill(s_.score + range.begin, s_.score + range.end, 0.0);
    multiply_add(s_.score, s_.q.data() + i * dim, s_.k.data(), kTile, {0, dim}, range);
    double tile_max = kMinusInfinity;
    for (int j = range.begin; j < range.end; ++j) {
      s_.factor[j] = scale_.factor(eq, k_.exponent(first + j));
      const double z = stages::score<Fp64Ops>(s_.score[j], s_.factor[j]);
      if (z > tile_max) tile_max = z;  // false for NaN: m ignores it, P and the row sum carry it
    }
    const double m_old = s_.m[i];
    const double m = row_reference(recipe_.row_reference, m_old, tile_max);
    const double alpha = m == m_old ? 1.0 : stages::rescale<Fp64Ops>(m_old, m);
    s_.m[i] = m;

    // P, its codes, and its row sum.
    const Exponent c = value_exponent(first, count, range);
    const double addend = p_scale_.shift != 0 ? stages::forward_addend<Fp64Ops>(m) : -m;
    double sum = 0;
    for (int j = range.begin; j < range.end; ++j) {
      const double p =
          p_scale_.multiplier * stages::probability<Fp64Ops>(s_.score[j], s_.factor[j], addend);
      sum += recipe_.row_sum == RowSum::kCodes ? round_to_element(recipe_.probability, p) : p;
      const double to_common = stages::factor(v_.exponent(first + j) - c);
      s_.weight[j] = round_to_element(recipe_.probability, p * to_common);
    }
    const double undo = stages::factor(-p_scale_.shift) / p_scale_.multiplier;
    s_.l[i] = Fp64Ops::fma(s_.l[i], alpha, sum * undo);

    // T, and O = O alpha + T 2^(c - 8).
    std::fill(s_.partial.begin(), s_.partial.end(), 0.0);
    multiply_add(s_.partial.data(), s_.weight, s_.v.data(), dim, range, {0, dim});
    const double to_out = stages::factor(c - p_scale_.shift) / p_scale_.multiplier * v_.scale();
    double* out = s_.out.data() + i * dim;
    for (int n = 0; n < dim; ++n) {
      out[n] = stages::update_output<Fp64Ops>(out[n], alpha, s_.partial[n], to_out);
    }
  }

  // c: the largest exponent of V that the row sees in the tile (for running exponents the last);
  // the paper's literal form looks at all keys of the tile.
  Exponent value_exponent(int first, int count, Range range) const {
    if (recipe_.ds_scale == DsScale::kBlock32) range = {0, count};
    Exponent c = v_.exponent(first + range.begin);
    for (int j = range.begin + 1; j < range.end; ++j) c = max(c, v_.exponent(first + j));
    return c;
  }

  void store(int i) {
    const int dim = problem_.dim;
    const std::int64_t token = document_.q_token + first_ + i;
    const std::int64_t at = head_ * problem_.pack->total_q + token;
    Bf16Bits* out = args_.out.row(token, head_);
    if (keys(i).empty()) {
      std::fill_n(out, dim, Bf16Bits{0});
      args_.lse[at] = -kInfinity;
      store_statistics(at, 0, 1);
      return;
    }
    const double m = s_.m[i], l = s_.l[i];
    const double* sum = s_.out.data() + i * dim;
    for (int c = 0; c < dim; ++c) {
      double o = sum[c] / l;
      if (recipe_.output == Element::kE4m3) o = round_e4m3(o / v_.scale()) * v_.scale();
      out[c] = double_to_bf16(o);
    }
    args_.lse[at] = static_cast<float>(stages::log_sum_exp<Fp64Ops>(m, l));
    store_statistics(at, m, l);
  }

  // NOTE: the row sum is saved relative to the reference as saved, not as it was before rounding,
  // so that the pair means the same softmax.
  void store_statistics(std::int64_t at, double m, double l) {
    if (recipe_.gradient == GradientOperand::kDividedByL) {
      constexpr double kLimit = 1 << 30;  // leaves room for sums of integer exponents
      const double mu = std::isinf(m) ? 0.0 : std::clamp(std::ceil(m), -kLimit, kLimit);
      const double gap = std::isinf(m) ? 0.0 : m - mu;
      args_.state.row_reference[at] = static_cast<std::int32_t>(mu);
      args_.state.row_sum[at] = static_cast<float>(l * Fp64Ops::exp2(gap));
    } else {
      const float reference = static_cast<float>(m);
      const double gap = std::isinf(reference) ? 0.0 : m - reference;
      args_.state.row_reference[at] = static_cast<std::int32_t>(bits_of(reference));
      args_.state.row_sum[at] = static_cast<float>(l * Fp64Ops::exp2(gap));
    }
  }

  const Problem& problem_;
  const Recipe& recipe_;
  const ForwardArgs& args_;
  const Document& document_;
  const int head_, first_, count_;
  const ProbabilityScale p_scale_;
  const Rows q_, k_, v_;
  const ScoreScale scale_;
  Scratch& s_;
};

// Rows behind the last document, which no item owns.
void store_outside(const Problem& problem, const ForwardArgs& args) {
  const Pack& pack = *problem.pack;
  const std::int64_t end = pack.documents.back().q_token + pack.documents.back().q_len;
  for (int head = 0; head < problem.heads_q; ++head) {
    for (std::int64_t token = end; token < pack.total_q; ++token) {
      const std::int64_t at = head * pack.total_q + token;
      std::fill_n(args.out.row(token, head), problem.dim, Bf16Bits{0});
      args.lse[at] = -kInfinity;
      args.state.row_reference[at] = 0;  // 0 as an integer and as the bits of a float
      args.state.row_sum[at] = 1;
    }
  }
}

}  // namespace

void forward(const Problem& problem, const ForwardArgs& args) {
  std::vector<Scratch> scratch(static_cast<std::size_t>(num_threads(problem)),
                               Scratch(problem.dim));
  for_each_item(problem, plan::Pass::kForward, [&](int thread, const plan::WorkItem& item) {
    ForwardItem(problem, args, item, scratch[static_cast<std::size_t>(thread)]).run();
  });
  store_outside(problem, args);
}

}  // namespace mxattn::kernels::exact
