// Packing against its definition, on every target; the source is exactly as large as it says.
#include "kernels/cpu/tile_pack.h"

#include <gtest/gtest.h>
#include <hwy/tests/hwy_gtest.h>

#include "kernels/cpu/tile_test.h"

namespace mxattn::kernels::cpu {
namespace {

constexpr std::uint16_t kPoison = 0x7FC1;

struct Case {
  int rows, columns, tile_rows, tile_columns;
};
constexpr Case kCases[] = {{128, 128, 128, 128}, {64, 64, 64, 64}, {5, 128, 8, 128},
                           {0, 64, 8, 64},       {33, 80, 40, 96}, {7, 1, 8, 32},
                           {120, 256, 128, 256}};

// A source of random codes, as both of its forms.
struct Source {
  std::vector<std::uint8_t> codes;
  std::vector<std::uint16_t> bits;
  int stride;
  Case shape;

  explicit Source(const Case& c) : stride(c.columns + 3), shape(c) {
    std::mt19937 random(1);
    // The last row has no padding: reading past it would leave the buffer.
    const std::size_t size =
        c.rows == 0 ? 0 : static_cast<std::size_t>(c.rows - 1) * stride + c.columns;
    for (std::size_t i = 0; i < size; ++i) {
      codes.push_back(
          static_cast<std::uint8_t>(random() % 2 << 7 | random() % (E4M3::kMaxCode + 1)));
      bits.push_back(float_to_bf16(e4m3_to_float(codes.back())));
    }
  }
  std::vector<RowSource> forms() const {
    return {RowSource::e4m3(codes.data(), stride, shape.rows, shape.columns),
            RowSource::bf16(bits.data(), stride, shape.rows, shape.columns)};
  }
  std::uint16_t at(int r, int c) const {
    return r < shape.rows and c < shape.columns ? bits[static_cast<std::size_t>(r) * stride + c]
                                                : 0;
  }
};

class TilePackTest : public hwy::TestWithParamTarget {};
HWY_TARGET_INSTANTIATE_TEST_SUITE_P(TilePackTest);

TEST_P(TilePackTest, BitEqualRows) {
  for (const Case& c : kCases) {
    const Source source(c);
    for (const RowSource& form : source.forms()) {
      Bf16Matrix out(c.tile_rows, c.tile_columns, 5, kPoison);
      pack_rows(form, c.tile_rows, c.tile_columns, out.data.data(), out.stride);
      for (int r = 0; r < c.tile_rows; ++r) {
        for (int x = 0; x < c.tile_columns; ++x) ASSERT_EQ(out.at(r, x), source.at(r, x));
        for (int x = c.tile_columns; x < out.stride; ++x) ASSERT_EQ(out.at(r, x), kPoison);
      }
    }
  }
}

TEST_P(TilePackTest, BitEqualColumnPairs) {
  for (const Case& c : kCases) {
    const Source source(c);
    for (const RowSource& form : source.forms()) {
      std::vector<std::uint16_t> out(c.tile_rows * c.tile_columns + 1, kPoison);
      pack_column_pairs(form, c.tile_rows, c.tile_columns, out.data());
      for (int r = 0; r < c.tile_rows; ++r) {
        for (int x = 0; x < c.tile_columns; ++x) {
          ASSERT_EQ(out[(x / 2 * c.tile_rows + r) * 2 + x % 2], source.at(r, x));
        }
      }
      EXPECT_EQ(out.back(), kPoison);
    }
  }
}

TEST_P(TilePackTest, BitEqualRowPairs) {
  for (const Case& c : kCases) {
    const Source source(c);
    for (const RowSource& form : source.forms()) {
      std::vector<std::uint16_t> out(c.tile_rows * c.tile_columns + 1, kPoison);
      pack_row_pairs(form, c.tile_rows, c.tile_columns, out.data());
      for (int r = 0; r < c.tile_rows; ++r) {
        for (int x = 0; x < c.tile_columns; ++x) {
          ASSERT_EQ(out[(r / 2 * c.tile_columns + x) * 2 + r % 2], source.at(r, x));
        }
      }
      EXPECT_EQ(out.back(), kPoison);
    }
  }
}

TEST_P(TilePackTest, BitEqualFloats) {
  std::mt19937 random(2);
  for (const auto& [rows, columns] : {std::pair{128, 128}, {64, 128}, {8, 16}, {40, 48}}) {
    FloatMatrix x(rows, columns, 3);
    const Bf16Matrix bits = random_bf16(random, rows, columns, 20);
    for (int r = 0; r < rows; ++r) {
      for (int c = 0; c < columns; ++c) x.at(r, c) = bf16_to_float(bits.at(r, c));
    }
    Bf16Matrix straight(rows, columns, 2, kPoison), turned(columns, rows, 8, kPoison);
    std::vector<std::uint16_t> pairs(rows * columns + 1, kPoison);
    pack_floats(x.data.data(), x.stride, rows, columns, straight.data.data(), straight.stride);
    pack_floats_transposed(x.data.data(), x.stride, rows, columns, turned.data.data(),
                           turned.stride);
    pack_floats_row_pairs(x.data.data(), x.stride, rows, columns, pairs.data());
    for (int r = 0; r < rows; ++r) {
      for (int c = 0; c < columns; ++c) {
        ASSERT_EQ(straight.at(r, c), bits.at(r, c));
        ASSERT_EQ(turned.at(c, r), bits.at(r, c));
        ASSERT_EQ(pairs[(r / 2 * columns + c) * 2 + r % 2], bits.at(r, c));
      }
    }
    EXPECT_EQ(straight.data.back(), kPoison);
    EXPECT_EQ(turned.data.back(), kPoison);
    EXPECT_EQ(pairs.back(), kPoison);
  }
}

}  // namespace
}  // namespace mxattn::kernels::cpu
