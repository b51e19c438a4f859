// What quantisation makes of a tensor, and the state that the backward takes over from the forward.
#pragma once

#include <cstdint>

namespace mxattn {

/// A tensor in E4M3, head-major, documents at multiples of 16 slots. Gap slots hold code 0.
/// Restored value = code 2^exponent; an exponent of 127 means NaN. With ScaleGroup::kTensor the
/// exponents are 0 and the restored value is code times *scale.
struct Operand {
  std::uint8_t* codes = nullptr;     // (heads, slots, dim)
  std::int8_t* exponents = nullptr;  // (heads, slots)
  std::int8_t* norms = nullptr;  // (heads, slots): least n with ||restored row|| <= 2^n, or null
  float* scale = nullptr;        // (1), ScaleGroup::kTensor only
  std::int64_t slots = 0;
  int heads = 0;
  int dim = 0;

  std::uint8_t* row(int head, std::int64_t slot) const {
    return codes + (head * slots + slot) * dim;
  }
  std::int8_t* exponents_of(int head) const { return exponents + head * slots; }
  std::int8_t* norms_of(int head) const { return norms + head * slots; }
};

/// Everything the backward needs besides O, LSE and the gradient. Buffers are the caller's.
struct State {
  Operand q, k, v;  // null codes with unquantised recipes: the kernels then read the BF16 tensors
  // Row statistics, (heads_q, total_q).
  // GradientOperand::kDividedByL: mu = ceil(m) as int32 and L = l 2^(m - mu).
  // GradientOperand::kPlain: m as the bits of a float and l.
  std::int32_t* row_reference = nullptr;
  float* row_sum = nullptr;
};

}  // namespace mxattn
