// Parameters of the two backward passes of sm_90a: what the host and the device agree on.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "base/view.h"
#include "pack/pack.h"
#include "plan/cost.h"
#include "quantize/cuda/quantize.h"
#include "recipe/recipe.h"

namespace mxattn::kernels::sm90 {

struct BackwardParams {
  // Codes by rows, boxes of 64 (dK/dV: q, g) or 128 rows; transposed codes (heads, d, slots) in pi
  // order, boxes of d x 64 (dK/dV: q, g) or d x 128.
  CUtensorMap q, k, v, g;
  CUtensorMap q_transposed, k_transposed, g_transposed;

  const plan::WorkItem* items = nullptr;
  const int* num_items = nullptr;
  int* next_item = nullptr;  // 0 at launch

  const std::int32_t* cu_seqlens_q = nullptr;
  const std::int32_t* cu_seqlens_k = nullptr;
  // Bytes (heads, slots).
  const std::int8_t* q_exponents = nullptr;
  const std::int8_t* k_exponents = nullptr;
  const std::int8_t* v_exponents = nullptr;
  const std::int8_t* g_exponents = nullptr;
  const std::int8_t* g_norms = nullptr;
  const std::int8_t* o_norms = nullptr;
  const std::int8_t* v_norms = nullptr;
  const std::int8_t* v_running_norms = nullptr;   // maximum so far in the key chunk
  const float* delta = nullptr;                   // D (heads_q, q_slots)
  const cuda::TileScales* tile_scales = nullptr;  // (heads_q, q_slots / 16)
  const std::int32_t* row_reference = nullptr;    // mu (heads_q, total_q)
  std::int64_t q_slots = 0;
  std::int64_t k_slots = 0;
  std::int64_t total_q = 0;

  TensorView<std::uint16_t> dq, dk, dv;  // BF16
  float4* sums = nullptr;                // workspace: FP32 sums, kSumsPerCta a CTA
  int heads_k = 1;
  int queries_per_key_head = 1;
  Mask mask;
  float score_scale = 0;
  float softmax_scale = 0;
  bool rotate = false;
};

}  // namespace mxattn::kernels::sm90
