// Packing of operands for TileGemm: rows of A, column and row pairs of B, FP32 tiles to A.
//
// A source holds rows x columns elements, as E4M3 codes or BF16 bits. What is written is a tile of
// tile_rows x tile_columns, zero outside the source, of which nothing is read beyond its rows and
// columns. tile_rows is a multiple of 8, tile_columns of 32, at most kPackMaxColumns.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mxattn::kernels::cpu {

inline constexpr int kPackMaxColumns = 256;

/// Rows of E4M3 codes or of BF16 bits: one of the two pointers is set.
struct RowSource {
  const std::uint8_t* codes = nullptr;
  const std::uint16_t* bits = nullptr;
  std::ptrdiff_t stride = 0;  // elements from row to row
  int rows = 0;
  int columns = 0;

  static RowSource e4m3(const std::uint8_t* codes, std::ptrdiff_t stride, int rows, int columns) {
    return {codes, nullptr, stride, rows, columns};
  }
  static RowSource bf16(const std::uint16_t* bits, std::ptrdiff_t stride, int rows, int columns) {
    return {nullptr, bits, stride, rows, columns};
  }
};

/// A operand: out (tile_rows, tile_columns), rows `stride` elements apart.
void pack_rows(const RowSource& source, int tile_rows, int tile_columns, std::uint16_t* out,
               std::ptrdiff_t stride);

/// B operand that contracts over columns (k = tile_columns, n = tile_rows), a transposition:
/// out (tile_columns / 2, tile_rows, 2), ldb = tile_rows.
void pack_column_pairs(const RowSource& source, int tile_rows, int tile_columns,
                       std::uint16_t* out);

/// B operand that contracts over rows (k = tile_rows, n = tile_columns):
/// out (tile_rows / 2, tile_columns, 2), ldb = tile_columns.
void pack_row_pairs(const RowSource& source, int tile_rows, int tile_columns, std::uint16_t* out);

/// A operand of an FP32 tile x (rows, columns) whose elements are BF16 values: out (rows, columns).
void pack_floats(const float* x, std::ptrdiff_t ldx, int rows, int columns, std::uint16_t* out,
                 std::ptrdiff_t ld_out);

/// The transpose of that: out (columns, rows). rows is a multiple of 8, columns of 16, ld_out even.
void pack_floats_transposed(const float* x, std::ptrdiff_t ldx, int rows, int columns,
                            std::uint16_t* out, std::ptrdiff_t ld_out);

/// B operand of an FP32 tile that contracts over its rows: out (rows / 2, columns, 2),
/// ldb = columns. rows is even, columns a multiple of 16.
void pack_floats_row_pairs(const float* x, std::ptrdiff_t ldx, int rows, int columns,
                           std::uint16_t* out);

}  // namespace mxattn::kernels::cpu
