// What the passes of the oracle share: rows of a tensor as doubles, products of tiles, items.
#pragma once

#include <atomic>
#include <cstdint>

#include "kernels/cpu/fp64_ops.h"
#include "kernels/kernel.h"
#include "plan/plan.h"

namespace mxattn::kernels::exact {

using stages::Exponent;

inline constexpr int kTile = stages::kKeyTile;
static_assert(kTile == stages::kQueryTile, "blocks are square");
inline constexpr int kMaxDim = 256;

/// One tensor of one document and head: codes (E4M3), or the BF16 values where there are none.
/// Restored value = code 2^exponent scale().
class Rows {
 public:
  Rows(const Operand& operand, const TensorView<const Bf16Bits>& tensor, int head,
       std::int64_t slot, std::int64_t token, int dim);

  /// Row-major (count, dim).
  void load(int first, int count, double* out) const;
  /// (dim, kTile): column n is row first + n.
  void load_transposed(int first, int count, double* out) const;
  /// Whether any code of the row differs from 0.
  bool any(int row) const;

  /// Exponent of a row; 0 where the recipe has none.
  Exponent exponent(int row) const {
    return exponents_ != nullptr ? Exponent::stored(exponents_[row]) : Exponent(0);
  }
  Exponent norm(int row) const { return Exponent::stored(norms_[row]); }
  double scale() const { return scale_; }

 private:
  double value(std::int64_t row, int channel) const;

  const std::uint8_t* codes_ = nullptr;
  const std::int8_t* exponents_ = nullptr;
  const std::int8_t* norms_ = nullptr;
  const Bf16Bits* values_ = nullptr;
  std::int64_t value_stride_ = 0;
  double scale_ = 1;
  int dim_ = 0;
};

/// out[n] += sum over k in `depth` of a[k] b[k * stride + n], n in `columns`. The order of the sum
/// is counted from depth.begin, so that indices outside the range cannot reach it.
void multiply_add(double* out, const double* a, const double* b, int stride, Range depth,
                  Range columns);

/// Where `range` meets [first, first + count), counted from first.
constexpr Range local(Range range, int first, int count) {
  return {range.begin > first ? range.begin - first : 0,
          range.end < first + count ? range.end - first : count};
}

/// The factor a of scores; `exact` does not even round log2(e) softmax_scale.
class ScoreScale {
 public:
  ScoreScale(const Problem& problem, const Rows& q, const Rows& k)
      : rounded_(stages::score_scale(problem.softmax_scale)),
        unrounded_(stages::kLog2E * static_cast<double>(problem.softmax_scale)),
        operands_(q.scale() * k.scale()),
        exact_(problem.recipe.operand == Element::kNone) {}

  double factor(Exponent eq, Exponent ek) const {
    return exact_ ? unrounded_ : stages::score_factor(rounded_, eq, ek) * operands_;
  }

 private:
  float rounded_;
  double unrounded_;
  double operands_;  // scales of whole tensors
  bool exact_;
};

/// P meets its element as element(2^shift multiplier p).
struct ProbabilityScale {
  int shift = 0;
  double multiplier = 1;
};

inline ProbabilityScale probability_scale(const Recipe& recipe, float tensor_multiplier) {
  if (recipe.scale_group == ScaleGroup::kTensor) return {0, tensor_multiplier};
  if (recipe.probability == Element::kE4m3) return {stages::kProbabilityShift, 1};
  return {};
}

/// Keys that a query of the document sees.
inline Range keys_of(const Problem& problem, const Document& document, int query) {
  return visible_keys(problem.mask, document.q_len, document.k_len, query);
}

inline int num_threads(const Problem& problem) { return problem.threads > 0 ? problem.threads : 1; }

/// Calls work(thread, item) for every item of a pass. Items are single tiles and write to rows of
/// their own, so that neither their order nor the number of threads is seen in a result.
template <class Work>
void for_each_item(const Problem& problem, plan::Pass pass, Work work) {
  const plan::PlanSpec spec{
      .pass = pass, .heads_q = problem.heads_q, .heads_k = problem.heads_k, .tile = kTile};
  const plan::Plan plan = plan::make_plan(*problem.pack, problem.mask, spec);
  const auto count = static_cast<std::int64_t>(plan.items.size());
  [[maybe_unused]] const int threads = num_threads(problem);
  std::atomic<int> arrived = 0;
#pragma omp parallel num_threads(threads)
  {
    const int thread = arrived.fetch_add(1);
#pragma omp for schedule(dynamic, 1)
    for (std::int64_t n = 0; n < count; ++n) work(thread, plan.items[static_cast<std::size_t>(n)]);
  }
}

}  // namespace mxattn::kernels::exact
