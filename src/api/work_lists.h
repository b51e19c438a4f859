// Work lists made in advance: what stands behind a mxattn_plan handle.
#pragma once

#include <mxattn/plan.h>

#include <cstdint>
#include <vector>

#include "api/checks.h"
#include "api/problem.h"
#include "pack/pack.h"
#include "plan/plan.h"

namespace mxattn::api {

struct WorkLists {
  // What the lists depend on, besides the lengths.
  const BackendEntry* backend = nullptr;
  int device_index = 0;
  int num_documents = 0;
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

  // On a device: the lists, and where the lengths lie (`pack` and the copies are empty).
  kernels::DeviceLists device_lists = {};
  const std::int32_t* device_cu_seqlens_q = nullptr;
  const std::int32_t* device_cu_seqlens_k = nullptr;
};

/// Checks the lengths and makes the lists of the problem's backend.
WorkLists make_work_lists(const Problem& problem, const mxattn_tensor& cu_seqlens_q,
                          const mxattn_tensor& cu_seqlens_k);

/// Enqueues the building of the lists in memory of the device.
WorkLists make_device_lists(const Problem& problem, const mxattn_device_plan_args& args);

/// Bytes of memory that make_device_lists() needs; 0 on the CPU.
std::uint64_t device_lists_bytes(const Problem& problem);

/// Checks lengths, workspace and stream of a call on a device. `lists` may be null; lengths that
/// the call leaves out come from it.
kernels::DeviceCall check_device_call(const Problem& problem, const mxattn_tensor& cu_seqlens_q,
                                      const mxattn_tensor& cu_seqlens_k, void* workspace,
                                      std::uint64_t workspace_bytes, void* stream,
                                      const WorkLists* lists, Regions& regions);

/// The last check on a device: nothing that is written is shared, and every address is the
/// device's.
void check_device_regions(const Problem& problem, const Regions& regions);

/// Reads the lengths, waiting for the stream, and throws what make_pack() throws.
void check_lengths_of(const Problem& problem, const mxattn_tensor& cu_seqlens_q,
                      const mxattn_tensor& cu_seqlens_k, void* stream);

/// Throws kInvalidArgument naming the first field in which `problem` differs from the problem that
/// the lists were made for.
void check_made_for(const WorkLists& lists, const Problem& problem);

}  // namespace mxattn::api

struct mxattn_plan {
  mxattn::api::WorkLists lists;
};
