// Plain parts of the loops of the fast CPU backend: where operands lie, exponents of a tile, who
// sees whom inside a tile, scratch memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/carver.h"
#include "base/numeric.h"
#include "base/view.h"
#include "formats/bf16.h"
#include "kernels/cpu/faithful_items.h"
#include "kernels/cpu/tile_pack.h"
#include "pack/pack.h"
#include "recipe/stages.h"

namespace mxattn::kernels::cpu {

using stages::Exponent;

using Carver = mxattn::Carver<64>;  // of a thread's scratch

/// The rows of one document and head of an operand, as codes or as BF16 values.
struct HeadRows {
  const std::uint8_t* codes = nullptr;     // (length, dim), rows `stride` apart
  const std::int8_t* exponents = nullptr;  // `exponent_stride` apart
  const std::int8_t* norms = nullptr;      // of K and V
  const Bf16Bits* values = nullptr;        // (length, dim), rows `stride` apart; then no exponents
  std::ptrdiff_t stride = 0;
  std::ptrdiff_t exponent_stride = 1;
  int length = 0;
  int dim = 0;
};

/// `slot` and `token` are of the document's first row.
inline HeadRows head_rows(const Operand& operand, const TensorView<const Bf16Bits>& values,
                          int head, std::int64_t slot, std::int64_t token, int length) {
  if (operand.codes == nullptr) {
    return {.values = values.row(token, head),
            .stride = values.token_stride,
            .length = length,
            .dim = values.dim};
  }
  return {.codes = operand.row(head, slot),
          .exponents = operand.exponents_of(head) + slot,
          .norms = operand.norms == nullptr ? nullptr : operand.norms_of(head) + slot,
          .stride = operand.dim,
          .length = length,
          .dim = operand.dim};
}

/// Exponents of the slots of a tile. Slots outside the document hold that of its last token in the
/// tile. BF16 operands have exponents too: 0, or 127 for a token that holds NaN or Inf, whose
/// elements then count as 0, so that it can poison nobody who does not see it.
struct TileExponents {
  alignas(64) std::int32_t value[kTile];
  alignas(64) float nan[kTile];  // NaN where the exponent is, else 0: added to factors
  std::int8_t stored[kTile];
  bool uniform = true;  // all slots agree: the factors leave the inner loops

  Exponent at(int slot) const { return Exponent::stored(stored[slot]); }
  Exponent common() const { return at(0); }

  /// From the first `count` entries of `stored`.
  void complete(int count) {
    const std::int8_t last = count > 0 ? stored[count - 1] : 0;
    std::fill(stored + count, stored + kTile, last);
    uniform = std::all_of(stored, stored + kTile, [&](std::int8_t e) { return e == stored[0]; });
    for (int i = 0; i < kTile; ++i) {
      value[i] = stored[i];
      nan[i] = at(i).nan ? kNan : 0.0f;
    }
  }
};

/// Whether BF16 bits are NaN or Inf.
inline bool is_special(Bf16Bits x) { return (x & 0x7F80) == 0x7F80; }

/// Rows [first, first + count) of the operand as a source of tile_pack.h, and their exponents.
/// `staging` (kTile, dim) takes a copy of BF16 rows some of which hold NaN or Inf.
inline RowSource tile_rows(const HeadRows& rows, int first, int count, Bf16Bits* staging,
                           TileExponents& exponents) {
  const int dim = rows.dim;
  if (rows.codes != nullptr) {
    for (int i = 0; i < count; ++i) {
      exponents.stored[i] = rows.exponents[(first + i) * rows.exponent_stride];
    }
    exponents.complete(count);
    return RowSource::e4m3(rows.codes + first * rows.stride, rows.stride, count, dim);
  }
  const Bf16Bits* const values = rows.values + first * rows.stride;
  for (int i = 0; i < count; ++i) {
    const Bf16Bits* const row = values + i * rows.stride;
    int special = 0;
    for (int c = 0; c < dim; ++c) special |= is_special(row[c]);
    exponents.stored[i] = special ? stages::kNanExponent : 0;
  }
  exponents.complete(count);
  if (exponents.uniform and not exponents.common().nan) {
    return RowSource::bf16(values, rows.stride, count, dim);
  }
  for (int i = 0; i < count; ++i) {
    Bf16Bits* const to = staging + static_cast<std::ptrdiff_t>(i) * dim;
    if (exponents.at(i).nan) {
      std::fill_n(to, dim, Bf16Bits{0});
    } else {
      std::copy_n(values + i * rows.stride, dim, to);
    }
  }
  return RowSource::bf16(staging, dim, count, dim);
}

/// Which columns of a tile each row of a block sees.
struct BlockView {
  Range columns;       // union over the rows, widened to whole blocks; nothing else is computed
  bool masked = true;  // some row does not see some slot of `columns`
  Range row[kBlock];   // of each row, counted from the tile's first column

  bool empty() const { return columns.empty(); }
};

/// `visible(r)` gives the columns that row r of the block sees, counted from the sequence's start;
/// both ends never decrease with r (the mask is a band). Rows from `rows` >= 1 on see nothing. The
/// tile holds columns [tile_first, tile_first + kTile).
template <class Visible>
BlockView view_block(int rows, int tile_first, const Visible& visible) {
  BlockView view;
  if (visible(rows - 1).begin <= tile_first and visible(0).end >= tile_first + kTile) {
    view.columns = {0, kTile};
    view.masked = false;
    std::fill_n(view.row, kBlock, view.columns);
    return view;
  }
  Range all{kTile, 0};
  Range shared{0, kTile};
  for (int r = 0; r < kBlock; ++r) {
    Range seen{0, 0};
    if (r < rows) {
      const Range range = visible(r);
      seen = {std::clamp(range.begin - tile_first, 0, kTile),
              std::clamp(range.end - tile_first, 0, kTile)};
    }
    if (seen.empty()) seen = {0, 0};
    view.row[r] = seen;
    if (r >= rows) continue;
    shared = {std::max(shared.begin, seen.begin), std::min(shared.end, seen.end)};
    if (not seen.empty()) all = {std::min(all.begin, seen.begin), std::max(all.end, seen.end)};
  }
  if (all.empty()) return view;
  view.columns = {all.begin / kBlock * kBlock, (all.end + kBlock - 1) / kBlock * kBlock};
  view.masked = shared.begin > view.columns.begin or shared.end < view.columns.end;
  return view;
}

/// Element (row, head) of a row statistic, (heads, total).
inline std::int64_t statistic_index(const Problem& problem, int head, std::int64_t token) {
  return head * problem.pack->total_q + token;
}

}  // namespace mxattn::kernels::cpu
