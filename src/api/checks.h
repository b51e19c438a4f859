// Checks of tensors, and whether two of them share memory.
#pragma once

#include <mxattn/mxattn.h>

#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <vector>

#include "base/view.h"

namespace mxattn::api {

enum class Access { kRead, kWrite };

/// Memory that a call touches: `outer` runs of `inner` rows of `row_bytes`, at strides in bytes
/// with inner_stride <= outer_stride unless a count is 1.
struct Region {
  std::string name;
  Access access = Access::kRead;
  std::uintptr_t begin = 0;
  std::uint64_t row_bytes = 0;
  std::uint64_t inner = 1, inner_stride = 0;
  std::uint64_t outer = 1, outer_stride = 0;

  std::uint64_t inner_span() const { return (inner - 1) * inner_stride + row_bytes; }
  std::uint64_t span() const { return (outer - 1) * outer_stride + inner_span(); }
};

/// The memory that a call reads and writes. What is written may share no byte with anything else.
class Regions {
 public:
  void add(Region region) { regions_.push_back(std::move(region)); }
  void add_bytes(std::string name, Access access, const void* data, std::uint64_t bytes);
  /// Throws kInvalidArgument with both names if a written region meets another one.
  void check() const;
  const std::vector<Region>& all() const { return regions_; }

 private:
  std::vector<Region> regions_;
};

/// Checks dtype, rank, shape, address and strides of a (tokens, heads, dim) tensor and adds it to
/// `regions`. `meaning` explains the expected shape: "(total_q, heads_q, head_dim)".
void check_rows(const char* name, const mxattn_tensor& tensor, int dtype, std::int64_t tokens,
                std::int64_t heads, std::int64_t dim, const char* meaning, Access access,
                Regions& regions);

/// The same for a contiguous tensor of any shape.
void check_contiguous(const char* name, const mxattn_tensor& tensor, int dtype,
                      std::initializer_list<std::int64_t> shape, const char* meaning, Access access,
                      Regions& regions);

/// Checks cu_seqlens, a contiguous int32 tensor of num_documents + 1 entries, and returns them.
std::span<const std::int32_t> check_lengths(const char* name, const mxattn_tensor& tensor,
                                            int num_documents, Regions& regions);

/// A view of a checked (tokens, heads, dim) tensor. Strides that no element needs were not checked:
/// those of a contiguous tensor take their place, so that offsets made of them cannot overflow.
template <class T>
TensorView<T> view_of(const mxattn_tensor& tensor) {
  const std::int64_t tokens = tensor.shape[0], heads = tensor.shape[1], dim = tensor.shape[2];
  return {static_cast<T*>(tensor.data),
          tokens,
          static_cast<int>(heads),
          static_cast<int>(dim),
          tokens > 1 ? tensor.strides[0] : heads * dim,
          tokens > 0 and heads > 1 ? tensor.strides[1] : dim};
}

}  // namespace mxattn::api
