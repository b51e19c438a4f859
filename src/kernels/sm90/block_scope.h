// Which tiles of the other axis the 64 rows of a warpgroup see: keys for queries, queries for keys.
#pragma once

#include "base/portability.h"
#include "pack/pack.h"

namespace mxattn::kernels::sm90 {

inline constexpr int kBlockRows = 64;

struct BlockScope {
  Range whole{0, 0};  // tiles of which all rows of the block that the document has see everything
  Range some{0, 0};   // tiles of which any of them may see anything
  int end = 0;        // behind the last that any of them sees
  bool full = false;  // the document has all rows of the block

  /// Tiles of which all 64 rows see everything.
  MXATTN_HOST_DEVICE constexpr Range whole_of_full() const { return full ? whole : Range{0, 0}; }
};

/// kKeys: the rows are keys. `first`: row of the document.
template <bool kKeys, int kTile>
MXATTN_HOST_DEVICE constexpr BlockScope block_scope(const Mask& mask, const Document& d,
                                                    int first) {
  const int rows = kKeys ? d.k_len : d.q_len;
  BlockScope scope;
  if (first >= rows) return scope;
  const auto seen = [&](int row) {
    return kKeys ? visible_queries(mask, d.q_len, d.k_len, row)
                 : visible_keys(mask, d.q_len, d.k_len, row);
  };
  scope.full = first + kBlockRows <= rows;
  // The mask is a band: its ends never decrease with the row.
  const Range from = seen(first), to = seen(scope.full ? first + kBlockRows - 1 : rows - 1);
  scope.whole = {(to.begin + kTile - 1) / kTile, from.end / kTile};
  scope.end = to.end;
  if (from.begin < to.end) scope.some = {from.begin / kTile, (to.end - 1) / kTile + 1};
  return scope;
}

}  // namespace mxattn::kernels::sm90
