#include "formats/scale_layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <set>
#include <vector>

namespace mxattn {
namespace {

TEST(ScaleAtom, BitEqualBijection) {
  std::set<int> seen;
  for (int row = 0; row < kAtomRows; ++row) {
    for (int column = 0; column < kAtomColumns; ++column) {
      const int offset = atom_offset(row, column);
      ASSERT_GE(offset, 0);
      ASSERT_LT(offset, kAtomBytes);
      ASSERT_EQ(atom_position(offset), (AtomPosition{row, column}));
      seen.insert(offset);
    }
  }
  EXPECT_EQ(seen.size(), static_cast<std::size_t>(kAtomBytes));
  // Spot values: one step in each direction.
  EXPECT_EQ(atom_offset(0, 1), 1);
  EXPECT_EQ(atom_offset(1, 0), 16);
  EXPECT_EQ(atom_offset(31, 0), 496);
  EXPECT_EQ(atom_offset(32, 0), 4);
  EXPECT_EQ(atom_offset(127, 3), 511);
}

TEST(ScaleTable, BitEqualOffsets) {
  const ScaleTable table{.tokens = 5, .heads = 3, .columns = 8};
  std::int64_t expected = 0;
  for (int head = 0; head < 3; ++head) {
    for (std::int64_t token = 0; token < 5; ++token) {
      for (int column = 0; column < 8; ++column) {
        ASSERT_EQ(table.offset(head, token, column), expected++);
      }
    }
  }
  EXPECT_EQ(table.size(), expected);
  const ScaleTable large{.tokens = 1'000'000'000, .heads = 16, .columns = 8};
  EXPECT_EQ(large.offset(15, 999'999'999, 7), 127'999'999'999);  // past 2^31
}

TEST(AtomGrid, BitEqualBijectionOverPaddedSizes) {
  for (const auto& [rows, columns] : {std::pair{1, 1}, {128, 4}, {129, 5}, {300, 8}, {256, 3}}) {
    const AtomGrid grid{.rows = rows, .columns = columns};
    EXPECT_EQ(grid.padded_rows() % kAtomRows, 0);
    EXPECT_GE(grid.padded_rows(), rows);
    EXPECT_LT(grid.padded_rows(), rows + kAtomRows);
    EXPECT_EQ(grid.padded_columns() % kAtomColumns, 0);
    EXPECT_LT(grid.padded_columns(), columns + kAtomColumns);
    std::vector<bool> seen(static_cast<std::size_t>(grid.size()));
    for (std::int64_t row = 0; row < grid.padded_rows(); ++row) {
      for (int column = 0; column < grid.padded_columns(); ++column) {
        const auto offset = static_cast<std::size_t>(grid.offset(row, column));
        ASSERT_LT(offset, seen.size());
        ASSERT_FALSE(seen[offset]);
        seen[offset] = true;
      }
    }
  }
  // Atoms run along the columns first.
  const AtomGrid grid{.rows = 256, .columns = 8};
  EXPECT_EQ(grid.offset(0, 4), 512);
  EXPECT_EQ(grid.offset(128, 0), 1024);
}

TEST(GatherAtom, BitEqualEveryDocumentStart) {
  // Bytes outside the document are poison: one of them in an atom is a leak.
  constexpr std::uint8_t kPoison = 0xEE;
  for (const int columns : {1, 4, 8}) {
    for (int start = 0; start < kAtomRows; ++start) {
      for (const int length : {0, 1, 31, 32, 33, 127, 128, 129, 200}) {
        std::vector<std::uint8_t> table(static_cast<std::size_t>((start + length + 300) * columns),
                                        kPoison);
        const auto value = [](int token, int column) {
          return static_cast<std::uint8_t>(1 + (token * 7 + column * 3) % 200);
        };
        const ScaleTable dense{.tokens = start + length + 300, .heads = 1, .columns = columns};
        for (int token = 0; token < length; ++token) {
          for (int column = 0; column < columns; ++column) {
            table[static_cast<std::size_t>(dense.offset(0, start + token, column))] =
                value(token, column);
          }
        }
        const AtomGrid grid{.rows = length, .columns = columns};
        for (int tile = 0; tile < grid.padded_rows(); tile += kAtomRows) {
          for (int first = 0; first < grid.padded_columns(); first += kAtomColumns) {
            std::array<std::uint8_t, kAtomBytes> atom;
            atom.fill(kPoison);
            gather_atom(table.data() + dense.offset(0, start + tile), columns, first, length - tile,
                        atom.data());
            for (int row = 0; row < kAtomRows; ++row) {
              for (int column = 0; column < kAtomColumns; ++column) {
                const bool inside = tile + row < length and first + column < columns;
                const int expected = inside ? value(tile + row, first + column) : 0;
                ASSERT_EQ(atom[static_cast<std::size_t>(atom_offset(row, column))], expected)
                    << "start " << start << " length " << length << " row " << row;
              }
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace mxattn
