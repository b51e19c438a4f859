// A checked problem: what stands behind a mxattn_problem handle.
#pragma once

#include <mxattn/mxattn.h>

#include <cstdint>
#include <string>
#include <vector>

#include "api/backends.h"
#include "api/state.h"
#include "kernels/kernel.h"
#include "recipe/registry.h"

namespace mxattn::api {

struct Problem {
  kernels::Problem kernel;  // pack is null: the lengths come with each call
  const RecipeInfo* recipe = nullptr;
  BackendChoice backend;
  std::int64_t total_q = 0;
  std::int64_t total_k = 0;
  int num_documents = 0;
  std::vector<StateBuffer> state;
  std::string explanation;
  kernels::DeviceProblem device;  // the same, for a device
  int device_index = 0;

  /// Null on the CPU, where run() has the kernels.
  const kernels::DeviceBackend* on_device() const { return backend.device; }
  const kernels::Backend& run() const { return *backend.entry->backend(); }
  /// Scratch memory of a call.
  std::uint64_t workspace_bytes() const {
    // CPU kernels keep a few tiles a thread, of their own.
    return on_device() == nullptr
               ? 0
               : static_cast<std::uint64_t>(on_device()->workspace_bytes(device));
  }
};

/// Checks the configuration and chooses the backend; throws Error.
Problem make_problem(const mxattn_problem_config& config);

/// CPU threads that the process may use.
int default_threads();

/// What mxattn_problem_explain says.
std::string explain(const Problem& problem);

}  // namespace mxattn::api
