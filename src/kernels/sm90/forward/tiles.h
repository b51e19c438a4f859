// What the producer of the forward tells its consumers about a key tile.
#pragma once

#include <cstdint>

#include "base/numeric.h"
#include "kernels/sm90/block_scope.h"
#include "kernels/sm90/tile_facts.h"
#include "pack/pack.h"
#include "recipe/stages.h"

namespace mxattn::kernels::sm90::forward {

using stages::Exponent;
using stages::kKeyTile;

/// How a step goes: with exponents that all keys share or factors of each key (general), with or
/// without a mask. kLowerMasked: no row sees a key of the tile's upper half.
enum class Step : std::uint32_t { kPlain, kMasked, kLowerMasked, kGeneral, kGeneralMasked, kSkip };

constexpr bool is_masked(Step step) {
  return step == Step::kMasked or step == Step::kLowerMasked or step == Step::kGeneralMasked;
}
constexpr bool is_general(Step step) {
  return step == Step::kGeneral or step == Step::kGeneralMasked;
}

/// How the step of a block of rows goes at a tile.
MXATTN_HOST_DEVICE constexpr Step step_of(const BlockScope& scope, int tile, bool uniform) {
  if (not scope.some.contains(tile)) return Step::kSkip;
  if (scope.whole.contains(tile)) return uniform ? Step::kPlain : Step::kGeneral;
  if (not uniform) return Step::kGeneralMasked;
  return scope.end <= tile * kKeyTile + kKeyTile / 2 ? Step::kLowerMasked : Step::kMasked;
}

/// The exponents that leave the loop of a key tile's steps, and how the step of each warpgroup
/// goes. EK is 0 where factors of keys hold it; EV is the largest of the tile.
struct TileFacts : TileFactsBase {
  /// Where the step of a block of 64 rows lies.
  __device__ __forceinline__ static std::uint32_t step_shift(int block) { return 16 + 3 * block; }
  __device__ __forceinline__ static std::uint32_t step_bits(int block, Step step) {
    return static_cast<std::uint32_t>(step) << step_shift(block);
  }
  __device__ __forceinline__ static Step step(std::uint32_t facts, std::uint32_t shift) {
    return static_cast<Step>((facts >> shift) & 7u);
  }
};

/// Of a tile that is not uniform: powers of two of its keys. Every 16 keys stand in the order pi
/// (tile/swizzle.h), so that a thread reads those of its columns in units of four.
struct KeyFactors {
  alignas(16) float k[kKeyTile];  // 2^EK, or NaN
  alignas(16) float v[kKeyTile];  // 2^EV, or infinity for a NaN: it must win a maximum
  int least_ek, most_ek;          // bytes; a NaN counts as its 127
};

/// Scales with which a factor of any exponent is a normal number. Others, negative ones too, which
/// turn the maximum of scores into that of the negated ones, take clamped general steps only.
__device__ __forceinline__ bool is_ordinary(float score_scale) {
  return score_scale >= pow2(-26) and score_scale <= pow2(26);
}

/// The exponents of a key tile as the producer warp holds them: four keys a lane.
class TileExponents {
 public:
  /// Loads. `keys`: how many of the tile are in the document, at least 1; `ek`, `ev`: the tile's
  /// first, aligned to 4 bytes, readable up to a multiple of 4.
  __device__ __forceinline__ TileExponents(const std::int8_t* ek, const std::int8_t* ev, int keys)
      : keys_(keys) {
    const int first = 4 * static_cast<int>(threadIdx.x % 32);
    if (first < keys) {
      ek_ = __ldg(reinterpret_cast<const std::uint32_t*>(ek + first));
      ev_ = __ldg(reinterpret_cast<const std::uint32_t*>(ev + first));
    }
  }

  /// Gives keys outside the document the exponents of the first key, and says whether all agree.
  __device__ __forceinline__ bool all_agree() {
    const int inside = max(min(keys_ - 4 * static_cast<int>(threadIdx.x % 32), 4), 0);
    const std::uint32_t own = inside == 4 ? ~0u : (1u << (8 * inside)) - 1;
    const std::uint32_t first_ek = repeat(__shfl_sync(kWarp, ek_, 0));
    const std::uint32_t first_ev = repeat(__shfl_sync(kWarp, ev_, 0));
    ek_ = (ek_ & own) | (first_ek & ~own);
    ev_ = (ev_ & own) | (first_ev & ~own);
    return __all_sync(kWarp, ek_ == first_ek and ev_ == first_ev) != 0;
  }

  // After all_agree(), of the lane's first key:
  __device__ __forceinline__ int ek() const { return byte(ek_, 0); }
  __device__ __forceinline__ int ev() const { return byte(ev_, 0); }
  __device__ __forceinline__ int most_ev() const {
    return __reduce_max_sync(kWarp,
                             max(max(byte(ev_, 0), byte(ev_, 1)), max(byte(ev_, 2), byte(ev_, 3))));
  }
  __device__ __forceinline__ void store(KeyFactors& to) const {
    const int lane = static_cast<int>(threadIdx.x % 32);
    // Keys 4 l .. 4 l + 3 of the tile are two pairs of block (l / 2) of eight.
    const int at = 16 * (lane / 4) + 8 * (lane % 2) + 2 * ((lane / 2) % 2);
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const int i = 2 * pair;
      *reinterpret_cast<float2*>(to.k + at + 4 * pair) = {key_factor(byte(ek_, i)),
                                                          key_factor(byte(ek_, i + 1))};
      *reinterpret_cast<float2*>(to.v + at + 4 * pair) = {value_factor(byte(ev_, i)),
                                                          value_factor(byte(ev_, i + 1))};
    }
    const int low = min(min(byte(ek_, 0), byte(ek_, 1)), min(byte(ek_, 2), byte(ek_, 3)));
    const int high = max(max(byte(ek_, 0), byte(ek_, 1)), max(byte(ek_, 2), byte(ek_, 3)));
    const int least = __reduce_min_sync(kWarp, low), most = __reduce_max_sync(kWarp, high);
    if (lane == 0) {
      to.least_ek = least;
      to.most_ek = most;
    }
  }

 private:
  static constexpr unsigned kWarp = 0xFFFFFFFFu;
  __device__ __forceinline__ static std::uint32_t repeat(std::uint32_t word) {
    return (word & 0xFFu) * 0x01010101u;
  }
  __device__ __forceinline__ static int byte(std::uint32_t word, int i) {
    return static_cast<std::int8_t>((word >> (8 * i)) & 0xFFu);
  }
  __device__ __forceinline__ static float key_factor(int ek) {
    return stages::factor(Exponent::stored(static_cast<std::int8_t>(ek)));
  }
  __device__ __forceinline__ static float value_factor(int ev) {
    return ev == stages::kNanExponent ? kInfinity : pow2(ev);
  }

  std::uint32_t ek_ = 0, ev_ = 0;
  int keys_;
};

}  // namespace mxattn::kernels::sm90::forward
