// What every pass over a work list is told.
#pragma once

#include <cstdint>

#include "pack/pack.h"
#include "plan/cost.h"

namespace mxattn::kernels::sm90 {

struct PassParams {
  const plan::WorkItem* items = nullptr;
  const int* num_items = nullptr;
  int* next_item = nullptr;  // 0 at launch

  const std::int32_t* cu_seqlens_q = nullptr;
  const std::int32_t* cu_seqlens_k = nullptr;
  const std::int8_t* q_exponents = nullptr;  // (heads, slots)
  const std::int8_t* k_exponents = nullptr;
  const std::int8_t* v_exponents = nullptr;
  std::int64_t q_slots = 0;
  std::int64_t k_slots = 0;
  std::int64_t total_q = 0;
  int heads_k = 1;
  int queries_per_key_head = 1;
  Mask mask;
  float score_scale = 0;  // stages::score_scale()
};

}  // namespace mxattn::kernels::sm90
