// What a backend of a CUDA device offers. All work is enqueued on the caller's stream: nothing here
// allocates, waits or reads lengths on the host, so a call may be captured into a graph and
// replayed with other lengths and values.
#pragma once

#include <cstdint>
#include <string>

#include "kernels/kernel.h"
#include "recipe/roles.h"

namespace mxattn::kernels {

/// A problem as the host knows it; the lengths of the documents lie on the device.
struct DeviceProblem {
  Problem problem;  // without pack and plans
  int num_documents = 0;
  std::int64_t total_q = 0;
  std::int64_t total_k = 0;
  int compute_capability = 0;  // of the device: 90 is 9.0
  int multiprocessors = 0;

  std::int64_t q_slots() const { return slot_capacity(total_q, num_documents); }
  std::int64_t k_slots() const { return slot_capacity(total_k, num_documents); }
};

/// A work list in device memory.
struct DeviceList {
  plan::WorkItem* items = nullptr;
  std::int32_t* num_items = nullptr;
};

/// The lists of all passes of one microbatch.
struct DeviceLists {
  DeviceList forward, dq, dkv;
};

/// Where a call finds what is not a tensor. Calls that may run at the same time need a workspace
/// each.
struct DeviceCall {
  const std::int32_t* cu_seqlens_q = nullptr;  // num_documents + 1, on the device
  const std::int32_t* cu_seqlens_k = nullptr;
  void* workspace = nullptr;  // workspace_bytes(), aligned to kWorkspaceAlignment, any contents
  const DeviceLists* lists = nullptr;  // null: the call makes its own in the workspace
  void* stream = nullptr;              // a cudaStream_t of the current device
};

inline constexpr std::int64_t kWorkspaceAlignment = 256;

/// Operands that the state holds already when the forward begins.
struct Quantised {
  bool q = false, k = false, v = false;
};

/// One architecture. Functions throw Error (kCuda) where the runtime reports a failure.
struct DeviceBackend {
  const char* name;
  const char* engine;  // what multiplies matrices
  /// Empty if it can run the problem, else one sentence.
  std::string (*supports)(const DeviceProblem&);
  /// Scratch memory of any one call.
  std::int64_t (*workspace_bytes)(const DeviceProblem&);
  /// Memory of the lists that make_lists() fills.
  std::int64_t (*lists_bytes)(const DeviceProblem&);
  DeviceLists (*make_lists)(const DeviceProblem&, const DeviceCall&, void* memory);
  /// One of Q, K and V into its operand.
  void (*quantize)(const DeviceProblem&, const DeviceCall&, Role role,
                   const TensorView<const Bf16Bits>& x, const Operand& out);
  /// Restored values of an operand; 0 outside the documents.
  void (*restore)(const DeviceProblem&, const DeviceCall&, Role role, const Operand& operand,
                  bool rotate_back, const TensorView<float>& y);
  void (*forward)(const DeviceProblem&, const DeviceCall&, const ForwardArgs&, Quantised);
  void (*backward)(const DeviceProblem&, const DeviceCall&, const BackwardArgs&);
};

}  // namespace mxattn::kernels
