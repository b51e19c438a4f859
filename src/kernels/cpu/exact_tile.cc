#include "kernels/cpu/exact_tile.h"

#include <array>

namespace mxattn::kernels::exact {
namespace {

// Decoding is a table: codes are read once a tile.
const std::array<double, 256> kE4m3Values = [] {
  std::array<double, 256> values{};
  for (int code = 0; code < 256; ++code) {
    values[static_cast<std::size_t>(code)] = e4m3_to_float(static_cast<std::uint8_t>(code));
  }
  return values;
}();

}  // namespace

Rows::Rows(const Operand& operand, const TensorView<const Bf16Bits>& tensor, int head,
           std::int64_t slot, std::int64_t token, int dim)
    : dim_(dim) {
  if (operand.codes == nullptr) {
    values_ = tensor.row(token, head);
    value_stride_ = tensor.token_stride;
    return;
  }
  codes_ = operand.row(head, slot);
  if (operand.exponents != nullptr) exponents_ = operand.exponents_of(head) + slot;
  if (operand.norms != nullptr) norms_ = operand.norms_of(head) + slot;
  if (operand.scale != nullptr) scale_ = *operand.scale;
}

double Rows::value(std::int64_t row, int channel) const {
  return codes_ != nullptr ? kE4m3Values[codes_[row * dim_ + channel]]
                           : bf16_to_float(values_[row * value_stride_ + channel]);
}

void Rows::load(int first, int count, double* out) const {
  for (int n = 0; n < count; ++n) {
    for (int c = 0; c < dim_; ++c) out[n * dim_ + c] = value(first + n, c);
  }
}

void Rows::load_transposed(int first, int count, double* out) const {
  for (int n = 0; n < count; ++n) {
    for (int c = 0; c < dim_; ++c) out[c * kTile + n] = value(first + n, c);
  }
}

bool Rows::any(int row) const {
  for (int c = 0; c < dim_; ++c) {
    if (value(row, c) != 0) return true;
  }
  return false;
}

void multiply_add(double* out, const double* a, const double* b, int stride, Range depth,
                  Range columns) {
  constexpr int kUnroll = 4;  // fewer loads and stores of `out`
  int k = depth.begin;
  for (; k + kUnroll <= depth.end; k += kUnroll) {
    const double* b0 = b + k * stride;
    const double* b1 = b0 + stride;
    const double* b2 = b1 + stride;
    const double* b3 = b2 + stride;
    const double a0 = a[k], a1 = a[k + 1], a2 = a[k + 2], a3 = a[k + 3];
    for (int n = columns.begin; n < columns.end; ++n) {
      out[n] += (a0 * b0[n] + a1 * b1[n]) + (a2 * b2[n] + a3 * b3[n]);
    }
  }
  for (; k < depth.end; ++k) {
    const double* row = b + k * stride;
    for (int n = columns.begin; n < columns.end; ++n) out[n] += a[k] * row[n];
  }
}

}  // namespace mxattn::kernels::exact
