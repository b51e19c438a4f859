// Where scales lie: the dense table in memory and the 128x4 atom that block-scaled MMAs read.
//
// Dense table: [head][token][column], one row a token, so that a tile may start at any token.
// Columns: 1 for an exponent per token, dim / 16 for NVFP4, dim / 32 for MX along the channels.
// Atom: 128 rows x 4 columns, 512 bytes; atoms lie row-major over (row tiles, column tiles).
#pragma once

#include <cstdint>

#include "base/portability.h"

namespace mxattn {

/// Dense table of scale bytes.
struct ScaleTable {
  std::int64_t tokens = 0;
  int heads = 0;
  int columns = 1;

  MXATTN_HOST_DEVICE constexpr std::int64_t offset(int head, std::int64_t token,
                                                   int column = 0) const {
    return (head * tokens + token) * columns + column;
  }
  MXATTN_HOST_DEVICE constexpr std::int64_t size() const { return heads * tokens * columns; }
};

inline constexpr int kAtomRows = 128;
inline constexpr int kAtomColumns = 4;
inline constexpr int kAtomBytes = kAtomRows * kAtomColumns;
inline constexpr int kAtomAlignment = 16;  // bytes, of the first atom's address

struct AtomPosition {
  int row;
  int column;
  constexpr bool operator==(const AtomPosition&) const = default;
};

/// Byte of (row, column) inside an atom: rows r, r + 32, r + 64, r + 96 share 16 bytes.
MXATTN_HOST_DEVICE constexpr int atom_offset(int row, int column) {
  return row % 32 * 16 + row / 32 * 4 + column;
}

MXATTN_HOST_DEVICE constexpr AtomPosition atom_position(int offset) {
  return {offset % 16 / 4 * 32 + offset / 16, offset % 4};
}

/// A matrix of scales cut into atoms; the rows and columns of padding hold 0.
struct AtomGrid {
  std::int64_t rows = 0;
  int columns = 0;

  MXATTN_HOST_DEVICE constexpr std::int64_t padded_rows() const {
    return (rows + kAtomRows - 1) / kAtomRows * kAtomRows;
  }
  MXATTN_HOST_DEVICE constexpr int padded_columns() const {
    return (columns + kAtomColumns - 1) / kAtomColumns * kAtomColumns;
  }
  MXATTN_HOST_DEVICE constexpr std::int64_t size() const {
    return padded_rows() * padded_columns();
  }
  MXATTN_HOST_DEVICE constexpr std::int64_t offset(std::int64_t row, int column) const {
    const std::int64_t atom =
        row / kAtomRows * (padded_columns() / kAtomColumns) + column / kAtomColumns;
    return atom * kAtomBytes +
           atom_offset(static_cast<int>(row % kAtomRows), column % kAtomColumns);
  }
};

/// The byte that an atom holds at `offset`. `first_row` is the atom's first row in a dense table of
/// `columns` columns, of which `rows` rows and `columns - first_column` columns belong to the tile
/// (rows: up to the document's end). Outside them the byte is 0 and nothing is read, so the next
/// document cannot enter.
MXATTN_HOST_DEVICE constexpr std::uint8_t gather_atom_byte(const std::uint8_t* first_row,
                                                           int columns, int first_column, int rows,
                                                           int offset) {
  const AtomPosition at = atom_position(offset);
  const int column = first_column + at.column;
  if (at.row >= rows or column >= columns) return 0;
  return first_row[static_cast<std::int64_t>(at.row) * columns + column];
}

/// Fills one atom; the arguments are those of gather_atom_byte. `rows` may exceed 128.
MXATTN_HOST_DEVICE constexpr void gather_atom(const std::uint8_t* first_row, int columns,
                                              int first_column, int rows, std::uint8_t* atom) {
  for (int offset = 0; offset < kAtomBytes; ++offset) {
    atom[offset] = gather_atom_byte(first_row, columns, first_column, rows, offset);
  }
}

}  // namespace mxattn
