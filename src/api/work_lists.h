// Work lists made in advance: what stands behind a mxattn_plan handle.
#pragma once

#include <mxattn/plan.h>

#include <cstdint>
#include <vector>

#include "api/problem.h"
#include "pack/pack.h"
#include "plan/plan.h"

namespace mxattn::api {

struct WorkLists {
  // What the lists depend on, besides the lengths.
  const BackendEntry* backend = nullptr;
  Mask mask;
  int heads_q = 0;
  int heads_k = 0;
  int dim = 0;
  std::int64_t total_q = 0;
  std::int64_t total_k = 0;

  std::vector<std::int32_t> cu_seqlens_q, cu_seqlens_k;
  Pack pack;
  plan::Plans plans = {};  // empty if the backend reads none
  bool planned = false;
};

/// Checks the lengths and makes the lists of the problem's backend.
WorkLists make_work_lists(const Problem& problem, const mxattn_tensor& cu_seqlens_q,
                          const mxattn_tensor& cu_seqlens_k);

/// Throws kInvalidArgument naming the first field in which `problem` differs from the problem that
/// the lists were made for.
void check_made_for(const WorkLists& lists, const Problem& problem);

}  // namespace mxattn::api

struct mxattn_plan {
  mxattn::api::WorkLists lists;
};
