// What the backward of the oracle knows of queries before its passes start: the gradient operand,
// row statistics, and the scales of dK/dV per query tile.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/cpu/exact_tile.h"
#include "quantize/quantize.h"

namespace mxattn::kernels::exact {

/// A query row in the backward.
struct QueryRow {
  std::int32_t mu = 0;    // GradientOperand::kDividedByL
  double addend = 0;      // kPlain: -(m + log2 l)
  Exponent weight_bound;  // kPlain: least integer w with p <= 2^w
  Exponent eq, eg;
  Exponent ng, no;   // kDividedByL: norms of g and O
  double delta = 0;  // D
};

/// Scales of the dK/dV pass for the queries of one tile.
struct QueryTileScales {
  stages::ChunkScales scales;
  bool live = false;  // false: nothing in the tile has a gradient
};

class Gradient {
 public:
  /// Quantises the gradient as the recipe says, and finds D and the scales. D of exact attention
  /// needs O as it was before its rounding to BF16, which nobody kept: it is 0 until set_delta().
  Gradient(const Problem& problem, const BackwardArgs& args);
  void set_delta(std::int64_t token, int head, double delta) {
    delta_[static_cast<std::size_t>(head * problem_.pack->total_q + token)] = delta;
  }

  Rows rows(const Document& document, int head) const;
  QueryRow query(const Document& document, int head, int query) const;
  const QueryTileScales& tile(int document, int head, int tile) const {
    return scales_[index_of(document, head, tile)];
  }

 private:
  std::size_t index_of(int document, int head, int tile) const {
    return static_cast<std::size_t>(
        (first_tile_[static_cast<std::size_t>(document)] + tile) * problem_.heads_q + head);
  }
  void quantise();
  double plain_delta(const Document& document, int head, int query) const;
  Rows output(const Document& document, int head) const;
  QueryTileScales scales_of_tile(const Document& document, int head, int tile) const;
  void share_in_chunks(int document, int head);

  const Problem& problem_;
  const BackwardArgs& args_;
  const bool divided_;  // GradientOperand::kDividedByL

  // g and what was prepared with it, in operand slots.
  GradientState state_;
  std::vector<std::uint8_t> codes_;
  std::vector<std::int8_t> exponents_, norms_, output_norms_;
  std::vector<float> divided_delta_;
  float tensor_scale_ = 1;

  std::vector<double> delta_;             // D of plain gradients, (heads_q, total_q)
  std::vector<std::int64_t> first_tile_;  // of each document
  std::vector<QueryTileScales> scales_;
};

}  // namespace mxattn::kernels::exact
