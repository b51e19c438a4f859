// Shapes and parameters of the Hopper forward kernel: what the host and the device agree on.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "base/view.h"
#include "kernels/sm90/pass.h"
#include "kernels/sm90/registers.h"
#include "recipe/recipe.h"
#include "tile/swizzle.h"

namespace mxattn::kernels::sm90 {

/// Whether the kernel computes the forward of a recipe; controls stay on the CPU. Scale groups are
/// tables of exponents to it: tiles whose exponents agree take the fast steps, whatever the table.
constexpr bool forward_runs(const Recipe& recipe) {
  return not recipe.control and recipe.operand == Element::kE4m3 and
         recipe.probability == Element::kE4m3 and
         (recipe.scale_group == ScaleGroup::kRunning or recipe.scale_group == ScaleGroup::kToken or
          recipe.scale_group == ScaleGroup::kBlock32) and
         recipe.row_reference == RowReference::kMax and recipe.row_sum == RowSum::kCodes and
         recipe.key_order == KeyOrder::kDescending and recipe.output == Element::kBf16;
}

/// One instance of the kernel. kWithDump: for tests, writes ForwardParams::dump.
template <int kHeadDim, bool kWithDump = false>
struct ForwardConfig {
  static constexpr int kDim = kHeadDim;
  static constexpr bool kDump = kWithDump;
  // compute-sanitizer follows a barrier only from lane to lane, not by way of a warp's leader.
  static constexpr bool kEveryLaneArrives = kDump;
  static constexpr int kConsumers = kDim == 64 ? 3 : 2;  // warpgroups, each with 64 query rows
  static constexpr int kRows = 64 * kConsumers;
  static constexpr int kStages = kDim == 64 ? 8 : 4;  // key tiles in flight
  static constexpr int kItems = 3;                    // items in flight
  // Whether the next scores are issued before T is there. At d = 64 they are not: codes would keep
  // their registers, of which three warpgroups have too few.
  static constexpr bool kEarlyScores = kDim == 128;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kConsumerRegisters = kDim == 64 ? 160 : 232;
  static constexpr int kProducerRegisters = kDim == 64 ? 32 : 40;

  static constexpr tile::Swizzle kRowSwizzle = tile::swizzle_of(kDim);  // of Q and K
  static constexpr tile::Swizzle kValueSwizzle = tile::Swizzle::k128;   // of V^T
  static constexpr int kOutputs = kDim / 2;             // accumulator registers of O
  static constexpr int kOutputsAndSums = kOutputs + 4;  // with eight columns of ones: the row sum

  static_assert(kDim == 64 or kDim == 128);
  static_assert(fits_register_pool(kConsumers, kConsumerRegisters, kProducerRegisters));
};

/// The same with a dump.
template <class Config>
using WithDump = ForwardConfig<Config::kDim, true>;

/// What an instance with kWithDump tells tests of every (query head, query, key), and of every
/// (query head, query, key tile) of which the query sees a key; the rest stays as it was. Keys
/// count from the document's start; `key_tiles` is that of the longest document or more.
struct ForwardDump {
  std::uint8_t* h = nullptr;    // codes (heads_q, total_q, key_tiles * 128), of visible keys
  std::uint8_t* hs = nullptr;   // the same
  float* alpha = nullptr;       // (heads_q, total_q, key_tiles)
  float* maximum = nullptr;     // m after the tile, the same
  float* correction = nullptr;  // 2^(m - mu) (heads_q, total_q), of rows with a finite m
  std::int64_t key_tiles = 0;
};

/// The items are kRows queries.
struct ForwardParams : PassParams {
  CUtensorMap q;  // codes (heads_q, q_slots, d), boxes of kRows x d, kRowSwizzle
  CUtensorMap k;  // codes (heads_k, k_slots, d), boxes of 128 x d, kRowSwizzle
  CUtensorMap v;  // transposed (heads_k, d, k_slots) in pi order, boxes of d x 128, kValueSwizzle

  TensorView<std::uint16_t> out;          // BF16 (total_q, heads_q, d)
  float* lse = nullptr;                   // (heads_q, total_q)
  std::int32_t* row_reference = nullptr;  // mu (heads_q, total_q)
  float* row_sum = nullptr;               // L (heads_q, total_q)
  ForwardDump dump;                       // of instances with kWithDump
};

}  // namespace mxattn::kernels::sm90
