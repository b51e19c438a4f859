// Tensor maps for the copy engine, made on the host.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "tile/swizzle.h"

namespace mxattn::tile {

/// Map of a byte tensor (outer, middle, inner), inner contiguous, read in boxes of
/// (1, box_middle, box_inner) bytes. Boxes that reach past the middle dimension are filled with 0.
/// `data` is aligned to 16 bytes, the strides (bytes) are multiples of 16.
/// Throws Error (kCuda) if the driver refuses.
CUtensorMap make_byte_tensor_map(const void* data, std::int64_t inner, std::int64_t middle,
                                 std::int64_t outer, std::int64_t middle_stride,
                                 std::int64_t outer_stride, int box_inner, int box_middle,
                                 Swizzle swizzle);

}  // namespace mxattn::tile
