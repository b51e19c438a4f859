// What a producer tells its consumers about a key tile, in one word: EK and EV in the lower half,
// what the pass itself wants to know in the upper.
#pragma once

#include <cstdint>

namespace mxattn::kernels::sm90 {

/// The lower half.
struct TileFactsBase {
  static constexpr std::uint32_t kExponents = 0xFFFFu;

  __device__ __forceinline__ static std::uint32_t exponents(std::int8_t ek, std::int8_t ev) {
    return static_cast<std::uint8_t>(ek) | static_cast<std::uint32_t>(static_cast<std::uint8_t>(ev))
                                               << 8;
  }
  __device__ __forceinline__ static std::int8_t ek(std::uint32_t facts) {
    return static_cast<std::int8_t>(facts & 0xFFu);
  }
  __device__ __forceinline__ static std::int8_t ev(std::uint32_t facts) {
    return static_cast<std::int8_t>((facts >> 8) & 0xFFu);
  }
};

}  // namespace mxattn::kernels::sm90
