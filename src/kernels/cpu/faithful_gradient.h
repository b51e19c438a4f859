// The gradient operand of the backward: prepared once, a row for each query and head. A row lies in
// the caller's row of dQ until the dQ pass has read it and writes dQ over it: nothing of the size
// of a tensor is allocated.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "base/view.h"
#include "kernels/cpu/faithful_items.h"
#include "kernels/cpu/faithful_tiles.h"
#include "kernels/kernel.h"
#include "pack/pack.h"
#include "recipe/stages.h"

namespace mxattn::kernels::cpu {

/// What a row holds beside its codes. With GradientOperand::kPlain D alone counts.
struct GradientStatistics {
  float delta = 0;              // D
  std::int8_t exponent = 0;     // eG
  std::int8_t norm = 0;         // nG
  std::int8_t output_norm = 0;  // nO
};

/// Rows of memory by token and head: `dim` codes, D, eG, nG, nO. NOTE: rows need no alignment.
class GradientRows {
 public:
  static constexpr int row_bytes(int dim) { return dim + kStatisticsBytes; }
  /// Whether a row of dQ has room.
  static constexpr bool fit(int dim) {
    return row_bytes(dim) <= dim * static_cast<int>(sizeof(Bf16Bits));
  }

  GradientRows() = default;
  /// Strides in bytes.
  GradientRows(std::byte* data, std::int64_t token_stride, std::int64_t head_stride, int dim)
      : data_(data), token_stride_(token_stride), head_stride_(head_stride), dim_(dim) {}

  int dim() const { return dim_; }
  std::int64_t token_stride() const { return token_stride_; }
  std::uint8_t* codes(std::int64_t token, int head) const {
    return reinterpret_cast<std::uint8_t*>(row(token, head));
  }
  const std::int8_t* exponent(std::int64_t token, int head) const {
    return reinterpret_cast<const std::int8_t*>(row(token, head) + dim_ + kExponentAt);
  }
  GradientStatistics statistics(std::int64_t token, int head) const {
    GradientStatistics x;
    const std::byte* const from = row(token, head) + dim_;
    std::memcpy(&x.delta, from, sizeof(float));
    std::memcpy(&x.exponent, from + kExponentAt, 1);
    std::memcpy(&x.norm, from + kExponentAt + 1, 1);
    std::memcpy(&x.output_norm, from + kExponentAt + 2, 1);
    return x;
  }
  void set_statistics(std::int64_t token, int head, const GradientStatistics& x) const {
    std::byte* const to = row(token, head) + dim_;
    std::memcpy(to, &x.delta, sizeof(float));
    std::memcpy(to + kExponentAt, &x.exponent, 1);
    std::memcpy(to + kExponentAt + 1, &x.norm, 1);
    std::memcpy(to + kExponentAt + 2, &x.output_norm, 1);
  }

 private:
  static constexpr int kExponentAt = sizeof(float);
  static constexpr int kStatisticsBytes = kExponentAt + 3;

  std::byte* row(std::int64_t token, int head) const {
    return data_ + token * token_stride_ + head * head_stride_;
  }

  std::byte* data_ = nullptr;
  std::int64_t token_stride_ = 0;
  std::int64_t head_stride_ = 0;
  int dim_ = 0;
};

/// Maxima over the tokens of one query tile that the scale of dS in the dK/dV pass takes.
struct QueryTileMaxima {
  stages::ChunkScales scales;
  bool live = false;  // some code of the gradient is not 0
};

/// Query tiles before each document, and of all.
std::vector<std::int64_t> first_tiles(const Pack& pack);

/// The gradient operand of one backward.
class Gradient {
 public:
  /// Prepares all rows, on problem.threads threads, and leaves them in args.dq. Heads of fewer than
  /// 7 channels have no room there: they get memory.
  Gradient(const Problem& problem, const BackwardArgs& args);

  /// The operand of a document and head: codes, or dO itself with GradientOperand::kPlain.
  HeadRows rows(const Document& document, int head) const;
  GradientStatistics statistics(std::int64_t token, int head) const {
    return rows_.statistics(token, head);
  }
  /// From a document's first tile on (first_tiles()). Not with GradientOperand::kPlain.
  const QueryTileMaxima* maxima(int head, std::int64_t first_tile) const {
    return maxima_.data() + head * tiles_ + first_tile;
  }

 private:
  GradientRows rows_;
  Buffer<std::byte> memory_;             // empty where the rows lie in dq
  TensorView<const Bf16Bits> plain_;     // dO; null where there are codes
  std::vector<QueryTileMaxima> maxima_;  // (heads_q, tiles)
  std::int64_t tiles_ = 0;               // of all documents
};

}  // namespace mxattn::kernels::cpu
