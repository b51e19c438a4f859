// Shared-memory layouts of tiles: swizzles and MMA descriptors.
//
// A tile is rows of 128 or 64 bytes, one after the other, whose 16-byte units are permuted by the
// low bits of the row, the same way by the copy engine and by the tensor cores. Tiles start at
// multiples of 1024 bytes.
#pragma once

#include <cstdint>

#include "base/portability.h"

namespace mxattn::tile {

enum class Swizzle : std::uint8_t { k128 = 1, k64 = 2 };  // the value of the descriptor's field

/// Bytes of a row of a tile.
MXATTN_HOST_DEVICE constexpr int row_bytes(Swizzle swizzle) {
  return swizzle == Swizzle::k128 ? 128 : 64;
}

/// The layout of tiles whose rows have so many bytes.
MXATTN_HOST_DEVICE constexpr Swizzle swizzle_of(int bytes) {
  return bytes == row_bytes(Swizzle::k128) ? Swizzle::k128 : Swizzle::k64;
}

/// Offset of byte `byte` of row `row`. Address bits 4-6 are XORed with bits 7-9 (128 bytes), bits
/// 4-5 with bits 7-8 (64 bytes). PTX ISA 5.5.7.
MXATTN_HOST_DEVICE constexpr std::uint32_t swizzled_offset(Swizzle swizzle, std::uint32_t row,
                                                           std::uint32_t byte) {
  const std::uint32_t linear = row * static_cast<std::uint32_t>(row_bytes(swizzle)) + byte;
  return swizzle == Swizzle::k128 ? linear ^ ((linear >> 3) & 0x70)
                                  : linear ^ ((linear >> 3) & 0x30);
}

/// Descriptor of a K-major tile at shared address `address`. PTX ISA 9.7.15.5.1.2.2: start address
/// / 16 in bits 0-13, leading offset (ignored with a swizzle, set to 1) in 16-29, offset of the
/// next eight rows / 16 in 32-45, swizzle in 62-63.
MXATTN_HOST_DEVICE constexpr std::uint64_t k_major_descriptor(Swizzle swizzle,
                                                              std::uint32_t address) {
  const std::uint64_t eight_rows = 8u * static_cast<std::uint64_t>(row_bytes(swizzle));
  return ((address & 0x3FFFFu) >> 4) | (std::uint64_t{1} << 16) | ((eight_rows >> 4) << 32) |
         (static_cast<std::uint64_t>(swizzle) << 62);
}

/// A descriptor in halves: the upper one is a constant of the layout, the lower one moves with the
/// address.
template <Swizzle kSwizzle>
struct Descriptor {
  static constexpr std::uint32_t kHigh =
      static_cast<std::uint32_t>(k_major_descriptor(kSwizzle, 0) >> 32);

  MXATTN_HOST_DEVICE static constexpr std::uint32_t low(std::uint32_t address) {
    return static_cast<std::uint32_t>(k_major_descriptor(kSwizzle, address));
  }
  MXATTN_HOST_DEVICE static constexpr std::uint64_t whole(std::uint32_t low) {
    return std::uint64_t{kHigh} << 32 | low;
  }
};

/// Addresses in a descriptor count these many bytes: what lies n bytes behind is n / 16 further.
inline constexpr std::uint32_t kDescriptorUnit = 16;

/// What a step of 32 bytes along K adds to a descriptor.
inline constexpr std::uint64_t kDescriptorStepK32 = 2;

/// The order in which an 8-bit A operand in registers holds 16 elements of K that an accumulator
/// left there: position p holds element pi(p). B must be stored in the same order.
MXATTN_HOST_DEVICE constexpr int pi_order(int position) {
  const int p = position % 16;
  return position - p + 8 * ((p >> 1) & 1) + 2 * (p / 4) + (p & 1);
}

}  // namespace mxattn::tile
