#include "kernels/cpu/tile_pack.h"

#include <cstring>

// The order of the next includes is Highway's: this file compiles itself once for every target.
// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/tile_pack.cc"
#include "hwy/foreach_target.h"
#include "kernels/cpu/simd-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace mxattn::kernels::cpu {
namespace HWY_NAMESPACE {

using Words = hn::Vec<UintTag>;

// Words of two BF16 values each.
HWY_INLINE Words load_words(const std::uint16_t* from) {
#if HWY_TARGET == HWY_SCALAR
  std::uint32_t word;
  std::memcpy(&word, from, sizeof(word));
  return hn::Set(UintTag(), word);
#else
  const hn::Repartition<std::uint16_t, UintTag> d16;
  return hn::BitCast(UintTag(), hn::LoadU(d16, from));
#endif
}

#if HWY_TARGET == HWY_SCALAR

// Transposes four rows of words: out[column * stride + row], stride in words.
HWY_INLINE void store_transposed(Words r0, Words r1, Words r2, Words r3, std::uint32_t* out,
                                 std::ptrdiff_t) {
  const Words rows[4] = {r0, r1, r2, r3};
  for (int r = 0; r < 4; ++r) hn::StoreU(rows[r], UintTag(), out + r);
}

#else

// Stores the 128-bit blocks of v at out, out + stride, ...
template <class D>
HWY_INLINE void store_blocks(D d, hn::Vec<D> v, std::uint32_t* out, std::ptrdiff_t stride) {
  if constexpr (hn::MaxLanes(d) <= 4) {
    hn::StoreU(v, d, out);
  } else {
    const hn::Half<D> half;
    constexpr std::ptrdiff_t kBlocks = hn::MaxLanes(d) / 8;
    store_blocks(half, hn::LowerHalf(half, v), out, stride);
    store_blocks(half, hn::UpperHalf(half, v), out + kBlocks * stride, stride);
  }
}

// Transposes four rows of words: out[column * stride + row], stride in words.
HWY_INLINE void store_transposed(Words r0, Words r1, Words r2, Words r3, std::uint32_t* out,
                                 std::ptrdiff_t stride) {
  const UintTag d;
  const auto low02 = hn::InterleaveLower(d, r0, r2);
  const auto low13 = hn::InterleaveLower(d, r1, r3);
  const auto high02 = hn::InterleaveUpper(d, r0, r2);
  const auto high13 = hn::InterleaveUpper(d, r1, r3);
  store_blocks(d, hn::InterleaveLower(d, low02, low13), out, 4 * stride);
  store_blocks(d, hn::InterleaveUpper(d, low02, low13), out + stride, 4 * stride);
  store_blocks(d, hn::InterleaveLower(d, high02, high13), out + 2 * stride, 4 * stride);
  store_blocks(d, hn::InterleaveUpper(d, high02, high13), out + 3 * stride, 4 * stride);
}

#endif

// The BF16 bits of one row of a source, widened with zeros to tile_columns.
class RowReader {
 public:
  RowReader(const RowSource& source, int tile_columns)
      : source_(source), tile_columns_(tile_columns) {}

  // Points into the source or into `buffer`.
  const std::uint16_t* row(int index, std::uint16_t* buffer) const {
    if (index >= source_.rows) {
      std::memset(buffer, 0, sizeof(std::uint16_t) * tile_columns_);
      return buffer;
    }
    const std::ptrdiff_t offset = index * source_.stride;
    if (source_.codes == nullptr) {
      const std::uint16_t* bits = source_.bits + offset;
      if (source_.columns >= tile_columns_) return bits;
      widen(bits, buffer);
      return buffer;
    }
    const std::uint8_t* codes = source_.codes + offset;
    std::uint8_t widened[kPackMaxColumns];
    if (source_.columns < tile_columns_) {
      widen(codes, widened);
      codes = widened;
    }
    const int lanes = static_cast<int>(float_lanes());
    for (int c = 0; c < tile_columns_; c += lanes) {
      hn::StoreU(load_e4m3(codes + c), Bf16Tag(), buffer + c);
    }
    return buffer;
  }

 private:
  template <class T>
  void widen(const T* from, T* to) const {
    std::memcpy(to, from, sizeof(T) * source_.columns);
    std::memset(to + source_.columns, 0, sizeof(T) * (tile_columns_ - source_.columns));
  }

  const RowSource& source_;
  int tile_columns_;
};

void pack_rows(const RowSource& source, int tile_rows, int tile_columns, std::uint16_t* out,
               std::ptrdiff_t stride) {
  const RowReader reader(source, tile_columns);
  for (int r = 0; r < tile_rows; ++r) {
    std::uint16_t* to = out + r * stride;
    const std::uint16_t* row = reader.row(r, to);
    if (row != to) std::memcpy(to, row, sizeof(std::uint16_t) * tile_columns);
  }
}

void pack_column_pairs(const RowSource& source, int tile_rows, int tile_columns,
                       std::uint16_t* out) {
  const RowReader reader(source, tile_columns);
  HWY_ALIGN std::uint16_t buffer[4][kPackMaxColumns];
  auto* words = reinterpret_cast<std::uint32_t*>(out);
  const int step = 2 * static_cast<int>(float_lanes());
  for (int r = 0; r < tile_rows; r += 4) {
    const std::uint16_t* row[4];
    for (int i = 0; i < 4; ++i) row[i] = reader.row(r + i, buffer[i]);
    for (int c = 0; c < tile_columns; c += step) {
      store_transposed(load_words(row[0] + c), load_words(row[1] + c), load_words(row[2] + c),
                       load_words(row[3] + c), words + (c / 2) * tile_rows + r, tile_rows);
    }
  }
}

void pack_row_pairs(const RowSource& source, int tile_rows, int tile_columns, std::uint16_t* out) {
  const RowReader reader(source, tile_columns);
  HWY_ALIGN std::uint16_t buffer[2][kPackMaxColumns];
  auto* words = reinterpret_cast<std::uint32_t*>(out);
  const UintTag d;
  const Bf16Tag d16;
  const int lanes = static_cast<int>(float_lanes());
  for (int r = 0; r < tile_rows; r += 2) {
    const std::uint16_t* even = reader.row(r, buffer[0]);
    const std::uint16_t* odd = reader.row(r + 1, buffer[1]);
    std::uint32_t* to = words + (r / 2) * tile_columns;
    for (int c = 0; c < tile_columns; c += lanes) {
      const auto low = hn::PromoteTo(d, hn::LoadU(d16, even + c));
      const auto high = hn::PromoteTo(d, hn::LoadU(d16, odd + c));
      hn::StoreU(hn::Or(low, hn::ShiftLeft<16>(high)), d, to + c);
    }
  }
}

void pack_floats(const float* x, std::ptrdiff_t ldx, int rows, int columns, std::uint16_t* out,
                 std::ptrdiff_t ld_out) {
  const int lanes = static_cast<int>(float_lanes());
  for (int r = 0; r < rows; ++r) {
    for (int c = 0; c < columns; c += lanes) {
      store_bf16(hn::LoadU(FloatTag(), x + r * ldx + c), out + r * ld_out + c);
    }
  }
}

// Words of two FP32 rows that hold BF16 values: `even` in the lower halves.
HWY_INLINE Words pair_words(const float* even, const float* odd) {
  const FloatTag d;
  const UintTag du;
  const auto low = hn::ShiftRight<16>(hn::BitCast(du, hn::LoadU(d, even)));
  const auto high = hn::And(hn::BitCast(du, hn::LoadU(d, odd)), hn::Set(du, 0xFFFF0000u));
  return hn::Or(low, high);
}

void pack_floats_transposed(const float* x, std::ptrdiff_t ldx, int rows, int columns,
                            std::uint16_t* out, std::ptrdiff_t ld_out) {
  const int lanes = static_cast<int>(float_lanes());
  for (int r = 0; r < rows; r += 8) {
    const float* row = x + r * ldx;
    for (int c = 0; c < columns; c += lanes) {
      const float* at = row + c;
      store_transposed(pair_words(at, at + ldx), pair_words(at + 2 * ldx, at + 3 * ldx),
                       pair_words(at + 4 * ldx, at + 5 * ldx),
                       pair_words(at + 6 * ldx, at + 7 * ldx),
                       reinterpret_cast<std::uint32_t*>(out + c * ld_out + r), ld_out / 2);
    }
  }
}

void pack_floats_row_pairs(const float* x, std::ptrdiff_t ldx, int rows, int columns,
                           std::uint16_t* out) {
  auto* words = reinterpret_cast<std::uint32_t*>(out);
  const int lanes = static_cast<int>(float_lanes());
  for (int r = 0; r < rows; r += 2) {
    for (int c = 0; c < columns; c += lanes) {
      const float* at = x + r * ldx + c;
      hn::StoreU(pair_words(at, at + ldx), UintTag(), words + (r / 2) * columns + c);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace mxattn::kernels::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace mxattn::kernels::cpu {

HWY_EXPORT(pack_rows);
HWY_EXPORT(pack_column_pairs);
HWY_EXPORT(pack_row_pairs);
HWY_EXPORT(pack_floats);
HWY_EXPORT(pack_floats_transposed);
HWY_EXPORT(pack_floats_row_pairs);

void pack_rows(const RowSource& source, int tile_rows, int tile_columns, std::uint16_t* out,
               std::ptrdiff_t stride) {
  HWY_DYNAMIC_DISPATCH(pack_rows)(source, tile_rows, tile_columns, out, stride);
}

void pack_column_pairs(const RowSource& source, int tile_rows, int tile_columns,
                       std::uint16_t* out) {
  HWY_DYNAMIC_DISPATCH(pack_column_pairs)(source, tile_rows, tile_columns, out);
}

void pack_row_pairs(const RowSource& source, int tile_rows, int tile_columns, std::uint16_t* out) {
  HWY_DYNAMIC_DISPATCH(pack_row_pairs)(source, tile_rows, tile_columns, out);
}

void pack_floats(const float* x, std::ptrdiff_t ldx, int rows, int columns, std::uint16_t* out,
                 std::ptrdiff_t ld_out) {
  HWY_DYNAMIC_DISPATCH(pack_floats)(x, ldx, rows, columns, out, ld_out);
}

void pack_floats_transposed(const float* x, std::ptrdiff_t ldx, int rows, int columns,
                            std::uint16_t* out, std::ptrdiff_t ld_out) {
  HWY_DYNAMIC_DISPATCH(pack_floats_transposed)(x, ldx, rows, columns, out, ld_out);
}

void pack_floats_row_pairs(const float* x, std::ptrdiff_t ldx, int rows, int columns,
                           std::uint16_t* out) {
  HWY_DYNAMIC_DISPATCH(pack_floats_row_pairs)(x, ldx, rows, columns, out);
}

}  // namespace mxattn::kernels::cpu
#endif  // HWY_ONCE
