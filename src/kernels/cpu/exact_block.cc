#include "kernels/cpu/exact_block.h"

#include <algorithm>
#include <cmath>

#include "recipe/exponents.h"

namespace mxattn::kernels::exact {
double Block::max_ds() const {
  double most = 0;
  for (int m = 0; m < rows_; ++m) {
    for (int k = range_[m].begin; k < range_[m].end; ++k) {
      most = std::max(most, std::abs(ds_[at(m, k)]));
    }
  }
  return most;
}

void Block::add_row_sums(double* sums) const {
  for (int m = 0; m < rows_; ++m) {
    for (int k = range_[m].begin; k < range_[m].end; ++k) sums[m] += ds_[at(m, k)];
  }
}

void Block::find_exponents(const DsRounding& rounding) {
  const bool in_block = rounding.scale == DsScale::kBlock32;
  const bool by_maximum = in_block or rounding.scale == DsScale::kRow;
  const int group = in_block ? stages::kBlockTokens : 1;  // rows that share an exponent
  for (int s = 0; s * rounding.step < kTile; ++s) {
    for (int first = 0; first < rows_; first += group) {
      const int last = std::min(first + group, rows_);
      double most = 0;
      for (int m = first; m < last and by_maximum; ++m) {
        const Range range = step_range(m, s, rounding.step);
        for (int k = range.begin; k < range.end; ++k) {
          most = std::max(most, std::abs(ds_[at(m, k)]));
        }
      }
      const int exponent =
          by_maximum ? stages::token_exponent(ExponentRule::kRoundUp, static_cast<float>(most)) : 0;
      for (int m = first; m < last; ++m) {
        exponent_[m][s] = Exponent(exponent, exponent == stages::kNanExponent);
      }
    }
  }
}

void Block::add_product(double* out, const double* x, int dim, Range range, double factor) {
  if (range.empty()) return;
  std::fill_n(partial_, dim, 0.0);
  multiply_add(partial_, code_, x, dim, range, {0, dim});
  for (int c = 0; c < dim; ++c) out[c] += partial_[c] * factor;
}

}  // namespace mxattn::kernels::exact
