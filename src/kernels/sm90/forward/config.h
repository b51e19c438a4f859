// Shapes and parameters of the Hopper forward kernel: what the host and the device agree on.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "base/view.h"
#include "kernels/sm90/registers.h"
#include "pack/pack.h"
#include "plan/cost.h"
#include "recipe/recipe.h"
#include "tile/swizzle.h"

namespace mxattn::kernels::sm90 {

/// One instance of the kernel.
template <int kHeadDim, Recipe kTheRecipe>
struct ForwardConfig {
  static constexpr Recipe kRecipe = kTheRecipe;
  static constexpr int kDim = kHeadDim;
  static constexpr int kConsumers = 2;  // warpgroups, each with 64 query rows
  static constexpr int kRows = 64 * kConsumers;
  static constexpr int kStages = 4;  // key tiles in flight
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kConsumerRegisters = 232;
  static constexpr int kProducerRegisters = 40;

  static constexpr tile::Swizzle kSwizzle = tile::Swizzle::k128;  // of Q, K and V^T
  static constexpr int kValueColumns = kDim + 8;  // eight columns of ones: the row sum
  static constexpr int kOutputs = kDim / 2;       // accumulator registers of O
  static constexpr int kPartials = kValueColumns / 2;

  static_assert(fits_register_pool(kConsumers, kConsumerRegisters, kProducerRegisters));
  static_assert(kDim == 128, "d = 64 wants three warpgroups and 192 rows");
  static_assert(kRecipe.probability == Element::kE4m3 and kRecipe.row_sum == RowSum::kCodes,
                "the row sum comes from columns of ones");
};

struct ForwardParams {
  CUtensorMap q;  // codes (heads_q, q_slots, d), boxes of kRows x d
  CUtensorMap k;  // codes (heads_k, k_slots, d), boxes of 128 x d
  CUtensorMap v;  // codes transposed (heads_k, d, k_slots) in pi order, boxes of d x 128

  const plan::WorkItem* items = nullptr;  // items of kRows queries
  const int* num_items = nullptr;
  int* next_item = nullptr;  // 0 at launch

  const std::int32_t* cu_seqlens_q = nullptr;
  const std::int32_t* cu_seqlens_k = nullptr;
  const std::int8_t* q_exponents = nullptr;  // (heads, slots)
  const std::int8_t* k_exponents = nullptr;
  const std::int8_t* v_exponents = nullptr;
  std::int64_t q_slots = 0;
  std::int64_t k_slots = 0;

  TensorView<std::uint16_t> out;          // BF16 (total_q, heads_q, d)
  float* lse = nullptr;                   // (heads_q, total_q)
  std::int32_t* row_reference = nullptr;  // mu (heads_q, total_q)
  float* row_sum = nullptr;               // L (heads_q, total_q)
  std::int64_t total_q = 0;
  int heads_k = 1;
  int queries_per_key_head = 1;
  Mask mask;
  float score_scale = 0;  // stages::score_scale()
};

}  // namespace mxattn::kernels::sm90
