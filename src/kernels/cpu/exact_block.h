// One block of the backward: output rows against a tile of the contracted axis. In the dK/dV pass
// rows are keys and the contracted axis queries; in the dQ pass the other way round.
#pragma once

#include <algorithm>
#include <vector>

#include "kernels/cpu/exact_tile.h"

namespace mxattn::kernels::exact {

/// What turns the two sums of an element into p and dS: p = 2^(acc a + addend) and
/// dS = p (acc' gradient - delta). Where scales are folded, both carry powers of two.
struct Terms {
  double a = 0;
  double addend = 0;
  double gradient = 0;
  double delta = 0;
};

/// How dS becomes codes: the scale of a step of the contracted axis.
struct DsRounding {
  DsScale scale = DsScale::kNone;
  Element element = Element::kNone;
  int step = kTile;   // contracted indices that share a scale
  double tensor = 1;  // DsScale::kTensor: amax / 448
};

/// An operand of a tile in both layouts.
struct Tile {
  explicit Tile(int dim)
      : dim(dim), rows(static_cast<std::size_t>(kTile * dim)), columns(rows.size()) {}
  void load(const Rows& source, int first, int count) {
    source.load(first, count, rows.data());
    source.load_transposed(first, count, columns.data());
  }
  const double* row(int n) const { return rows.data() + n * dim; }

  int dim;
  std::vector<double> rows;     // (kTile, dim)
  std::vector<double> columns;  // (dim, kTile)
};

class Block {
 public:
  Block() : p_(kTile * kTile), ds_(kTile * kTile) {}

  /// Starts a block in which row m meets the contracted indices range(m).
  template <class RangeOf>
  bool begin(int rows, RangeOf range_of) {
    rows_ = rows;
    bool any = false;
    for (int m = 0; m < rows; ++m) {
      range_[m] = range_of(m);
      any = any or not range_[m].empty();
    }
    return any;
  }

  /// p and dS of the whole block. The scores are x . x_other, dP is y . y_other; terms(m, k) gives
  /// the Terms of an element. Masked elements are never formed.
  template <class TermsOf>
  void fill(const Tile& x, const Tile& x_other, const Tile& y, const Tile& y_other,
            TermsOf terms_of) {
    double score[kTile], gradient[kTile];
    for (int m = 0; m < rows_; ++m) {
      const Range range = range_[m];
      if (range.empty()) continue;
      const Range depth{0, x.dim};
      std::fill(score + range.begin, score + range.end, 0.0);
      std::fill(gradient + range.begin, gradient + range.end, 0.0);
      multiply_add(score, x.row(m), x_other.columns.data(), kTile, depth, range);
      multiply_add(gradient, y.row(m), y_other.columns.data(), kTile, depth, range);
      for (int k = range.begin; k < range.end; ++k) {
        const Terms t = terms_of(m, k);
        const double p = stages::probability<Fp64Ops>(score[k], t.a, t.addend);
        p_[at(m, k)] = p;
        ds_[at(m, k)] = stages::dkv_ds<Fp64Ops>(p, gradient[k], t.gradient, t.delta);
      }
    }
  }

  /// Largest |dS| of the block.
  double max_ds() const;
  /// sums[m] += sum over k of dS.
  void add_row_sums(double* sums) const;

  /// out[m] += factor * sum over k of element(multiplier(k) p(m, k)) x[k]; x is (kTile, dim).
  template <class Multiplier>
  void add_weights(double* out, const double* x, int dim, Element element, double factor,
                   Multiplier multiplier) {
    for (int m = 0; m < rows_; ++m) {
      for (int k = range_[m].begin; k < range_[m].end; ++k) {
        code_[k] = round_to_element(element, multiplier(k) * p_[at(m, k)]);
      }
      add_product(out + m * dim, x, dim, range_[m], factor);
    }
  }

  /// out[m] += sum over steps of 2^(base(m, step) + b) * scale * sum over k of code(m, k) x[k],
  /// code = element(dS 2^-b) with b of the row (and, for kBlock32, of its 32 rows) and step.
  template <class Base>
  void add_ds(double* out, const double* x, int dim, const DsRounding& rounding, double scale,
              Base base) {
    find_exponents(rounding);
    for (int m = 0; m < rows_; ++m) {
      for (int s = 0; s * rounding.step < kTile; ++s) {
        const Range range = step_range(m, s, rounding.step);
        if (range.empty()) continue;
        const Exponent b = exponent_[m][s];
        const double to_code = stages::factor(-b) / rounding.tensor;
        for (int k = range.begin; k < range.end; ++k) {
          code_[k] = round_to_element(rounding.element, ds_[at(m, k)] * to_code);
        }
        const double restore = stages::factor(base(m, s * rounding.step) + b);
        add_product(out + m * dim, x, dim, range, restore * rounding.tensor * scale);
      }
    }
  }

 private:
  static std::size_t at(int m, int k) { return static_cast<std::size_t>(m) * kTile + k; }
  Range step_range(int m, int step, int size) const {
    return {std::max(range_[m].begin, step * size), std::min(range_[m].end, (step + 1) * size)};
  }
  void find_exponents(const DsRounding& rounding);
  /// out += factor * sum over k in range of code_[k] x[k]
  void add_product(double* out, const double* x, int dim, Range range, double factor);

  int rows_ = 0;
  Range range_[kTile];
  std::vector<double> p_, ds_;
  double code_[kTile] = {};
  double partial_[kMaxDim] = {};
  Exponent exponent_[kTile][kTile / stages::kBlockTokens];  // b of a row and step
};

}  // namespace mxattn::kernels::exact
