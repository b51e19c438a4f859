// Loops over rows of one head, with SIMD chosen at run time. Inner half of the CPU quantiser:
// knows channels, exponents and codes, but neither documents nor threads.
#pragma once

#include <cstdint>

#include "recipe/recipe.h"

namespace mxattn::rows {

/// Largest number of channels: rows are held on the stack.
inline constexpr int kMaxDim = 512;

/// BF16 rows of one head, `stride` elements apart; rotated on reading if `rotate`.
struct Bf16Rows {
  const std::uint16_t* data = nullptr;
  std::int64_t stride = 0;
  std::int64_t count = 0;
  int dim = 0;
  bool rotate = false;

  const std::uint16_t* row(std::int64_t i) const { return data + i * stride; }
};

/// Writes the exponent of every row; returns the largest magnitude of the rows without NaN or Inf.
float token_exponents(const Bf16Rows& x, ExponentRule rule, std::int8_t* exponents);

/// Codes of x 2^-exponent, or of x tensor_scale where that is not 0; rows whose exponent is NaN get
/// codes 0. codes: (count, dim). norms: (count), or null.
void encode_rows(const Bf16Rows& x, const std::int8_t* exponents, float tensor_scale,
                 std::uint8_t* codes, std::int8_t* norms);

/// What the backward prepares of each row. All pointers are to the first row's entry.
struct GradientRows {
  const float* row_sum;  // L
  std::uint8_t* codes;   // (count, dim)
  std::int8_t* exponents;
  std::int8_t* norms;         // nG
  std::int8_t* output_norms;  // nO
  float* delta;               // D
};

void gradient_rows(const Bf16Rows& dout, const Bf16Rows& out, ExponentRule rule,
                   const GradientRows& g);

/// y = code 2^exponent, or code *scale where scale is given; NaN where the exponent is NaN; rotated
/// if `rotate`. y: rows `stride` elements apart.
void restore_rows(const std::uint8_t* codes, const std::int8_t* exponents, const float* scale,
                  std::int64_t count, int dim, bool rotate, float* y, std::int64_t stride);

/// Rotates rows in place.
void rotate_rows(float* x, std::int64_t count, int dim, std::int64_t stride);

/// Name of the SIMD target that the loops run on.
const char* simd_target();

}  // namespace mxattn::rows
