// Matrices for the tests of the tile engines.
#pragma once

#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/numeric.h"
#include "formats/bf16.h"
#include "formats/fp8.h"
#include "kernels/cpu/tile_gemm.h"

namespace mxattn::kernels::cpu {

/// A row-major matrix with `pad` unused elements behind every row.
template <class T>
struct TestMatrix {
  int rows = 0, columns = 0, stride = 0;
  std::vector<T> data;

  TestMatrix(int rows_, int columns_, int pad = 0, T fill = T{})
      : rows(rows_), columns(columns_), stride(columns_ + pad) {
    data.assign(static_cast<std::size_t>(rows) * stride, fill);
  }
  T& at(int r, int c) { return data[static_cast<std::size_t>(r) * stride + c]; }
  const T& at(int r, int c) const { return data[static_cast<std::size_t>(r) * stride + c]; }

  TestMatrix transposed() const {
    TestMatrix t(columns, rows);
    for (int r = 0; r < rows; ++r) {
      for (int c = 0; c < columns; ++c) t.at(c, r) = at(r, c);
    }
    return t;
  }
};

using Bf16Matrix = TestMatrix<std::uint16_t>;
using FloatMatrix = TestMatrix<float>;

/// The layout of a B operand, by its definition; rows are padded to `ldb` pairs.
inline std::vector<std::uint16_t> pair_rows(const Bf16Matrix& b, int ldb) {
  std::vector<std::uint16_t> pairs(static_cast<std::size_t>(b.rows) * ldb, 0x7FC0);
  for (int k = 0; k < b.rows; ++k) {
    for (int n = 0; n < b.columns; ++n) pairs[(k / 2 * ldb + n) * 2 + k % 2] = b.at(k, n);
  }
  return pairs;
}

/// c [+]= a b.
inline void run_engine(const TileGemm& engine, const Bf16Matrix& a, const Bf16Matrix& b,
                       FloatMatrix& c, bool accumulate) {
  const int ldb = b.columns + 3;
  const std::vector<std::uint16_t> pairs = pair_rows(b, ldb);
  engine.run({a.rows, b.columns, a.columns, a.data.data(), a.stride, pairs.data(), ldb,
              c.data.data(), c.stride, accumulate});
}

/// Normal numbers of many sizes, rounded to BF16; `spread` binades.
inline Bf16Matrix random_bf16(std::mt19937& random, int rows, int columns, int spread,
                              int pad = 0) {
  Bf16Matrix m(rows, columns, pad, 0x7FC0);
  std::normal_distribution<float> normal;
  for (int r = 0; r < rows; ++r) {
    for (int c = 0; c < columns; ++c) {
      const int shift = spread == 0 ? 0 : static_cast<int>(random() % spread) - spread / 2;
      m.at(r, c) = float_to_bf16(std::ldexp(normal(random), shift));
    }
  }
  return m;
}

/// Finite E4M3 values of all codes alike, as BF16.
inline Bf16Matrix random_e4m3(std::mt19937& random, int rows, int columns, int pad = 0) {
  Bf16Matrix m(rows, columns, pad, 0x7FC0);
  for (int r = 0; r < rows; ++r) {
    for (int c = 0; c < columns; ++c) {
      const auto sign = static_cast<std::uint8_t>(random() % 2 << 7);
      const auto code = static_cast<std::uint8_t>(sign | random() % (E4M3::kMaxCode + 1));
      m.at(r, c) = float_to_bf16(e4m3_to_float(code));
    }
  }
  return m;
}

/// Where two matrices first differ in bits, or "".
inline std::string first_difference(const FloatMatrix& got, const FloatMatrix& want) {
  for (int r = 0; r < want.rows; ++r) {
    for (int c = 0; c < want.columns; ++c) {
      if (bits_of(got.at(r, c)) != bits_of(want.at(r, c))) {
        return detail::concat("(", r, ", ", c, "): ", got.at(r, c), " instead of ", want.at(r, c));
      }
    }
  }
  return "";
}

}  // namespace mxattn::kernels::cpu
