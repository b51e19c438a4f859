// Strided views of (tokens, heads, dim) tensors; the last dimension is contiguous.
#pragma once

#include <cstdint>

#include "base/portability.h"

namespace mxattn {

/// A view of a tensor of shape (tokens, heads, dim). Strides count elements; offsets are 64 bits,
/// so that a view of a fused QKV buffer may span more than 2^31 elements.
template <class T>
struct TensorView {
  T* data = nullptr;
  std::int64_t tokens = 0;
  int heads = 0;
  int dim = 0;
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;

  MXATTN_HOST_DEVICE T* row(std::int64_t token, int head) const {
    return data + token * token_stride + static_cast<std::int64_t>(head) * head_stride;
  }
  /// Whether every row begins at a multiple of 16 bytes.
  MXATTN_HOST_DEVICE bool has_aligned_rows() const {
    const auto bytes = static_cast<std::uint64_t>(token_stride | head_stride) * sizeof(T);
    return (reinterpret_cast<std::uintptr_t>(data) | bytes) % 16 == 0;
  }
};

}  // namespace mxattn
