// Where everything lies in the workspace of a call: sizes follow from totals, heads and the number
// of documents alone.
#pragma once

#include <cstdint>

#include "base/carver.h"
#include "kernels/device.h"
#include "plan/cuda/build_plan.h"
#include "quantize/cuda/quantize.h"

namespace mxattn::kernels::sm90 {

using Carver = mxattn::Carver<kWorkspaceAlignment>;

/// What the builder of a pass's list is told.
plan::cuda::BuildSpec list_spec(const DeviceProblem& problem, plan::Pass pass);

/// Takes the memory of a list.
DeviceList carve_list(Carver& carver, const DeviceProblem& problem, plan::Pass pass);
DeviceLists carve_lists(Carver& carver, const DeviceProblem& problem);

/// What building any of the lists needs besides.
std::int64_t list_scratch_bytes(const DeviceProblem& problem);

/// What a call sets to 0 before its first kernel.
struct ClearedWorkspace {
  std::uint32_t* words;
  std::int64_t count;

  ClearedWorkspace(Carver& carver, std::int64_t num_words);
};

/// What the quantiser of Q, K and V needs cleared.
std::int64_t look_back_words(const DeviceProblem& problem);

struct ForwardWorkspace {
  ClearedWorkspace cleared;
  int* next_item;
  std::uint32_t* look_back;    // look_back_words()
  std::uint8_t* v_transposed;  // (heads_k, d, k_slots)
  DeviceList list;
  std::uint8_t* list_scratch;

  ForwardWorkspace(Carver& carver, const DeviceProblem& problem);
};

struct BackwardWorkspace {
  ClearedWorkspace cleared;
  int *next_dkv_item, *next_dq_item;
  std::uint8_t* q_transposed;    // (heads_q, d, q_slots)
  std::uint8_t* k_transposed;    // (heads_k, d, k_slots)
  std::int8_t* v_running_norms;  // (heads_k, k_slots)
  Operand g;                     // codes, exponents and norms
  std::uint8_t* g_transposed;    // (heads_q, d, q_slots)
  std::int8_t* output_norms;     // (heads_q, q_slots), and so the next two
  std::uint8_t* live;
  float* delta;
  cuda::TileScales* tile_scales;  // (heads_q, q_slots / 16)
  float4* sums;                   // kSumBytesPerCta a multiprocessor
  DeviceList dkv_list, dq_list;
  std::uint8_t* list_scratch;

  BackwardWorkspace(Carver& carver, const DeviceProblem& problem);
};

/// Bytes that a workspace takes, or that anything which carves takes.
template <class Workspace>
std::int64_t bytes_of(const DeviceProblem& problem) {
  Carver carver(nullptr);
  Workspace(carver, problem);
  return carver.bytes();
}

}  // namespace mxattn::kernels::sm90
