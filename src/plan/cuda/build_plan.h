// The sorted work list from cu_seqlens on a device: the items of plan::make_plan, bit for bit.
//
// Built once for a microbatch and read by the kernels of all its layers. Sizes follow from totals
// and the number of documents alone, so nothing here reads the device, waits or allocates, and a
// captured graph may be replayed with other lengths.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "pack/pack.h"
#include "plan/cost.h"
#include "plan/plan.h"

namespace mxattn::plan::cuda {

/// What the host knows of the list. The order is one of the sorted ones; they share one list.
struct BuildSpec {
  PlanSpec spec;
  Mask mask;
  int num_documents = 0;
  std::int64_t total_q = 0;  // capacity of the packed tensors
  std::int64_t total_k = 0;
};

/// Most items that documents of these totals can have. Throws Error (kInvalidArgument) unless the
/// spec is legal and devices can index the items with 32 bits; so do the next two.
std::int64_t max_items(const BuildSpec& build);

/// Bytes of scratch memory that build_plan() needs.
std::int64_t scratch_bytes(const BuildSpec& build);

/// Enqueues the kernels that write `items` (room for max_items()) and `num_items` (one word). Items
/// behind the last stay as they were. All pointers are of the device; `items` and `scratch` are
/// aligned to 16 bytes; the scratch may hold anything and is free again when the kernels are done.
///
/// NOTE: nobody checks the lengths here. They are what make_pack() takes: from 0, never decreasing,
/// at most the totals.
void build_plan(const BuildSpec& build, const std::int32_t* cu_seqlens_q,
                const std::int32_t* cu_seqlens_k, WorkItem* items, std::int32_t* num_items,
                void* scratch, cudaStream_t stream);

}  // namespace mxattn::plan::cuda
