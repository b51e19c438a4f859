// The backends by name, and which of them a problem gets.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "kernels/device.h"
#include "kernels/kernel.h"

namespace mxattn::api {

/// One name that a caller may ask for. Several names may share a kernel in different modes.
struct BackendEntry {
  const char* name;
  const char* summary;
  int device_kind;                       // MXATTN_DEVICE_...
  const kernels::Backend* (*backend)();  // null on devices, which have a kernels::DeviceBackend
  bool sm90_accumulator;                 // mode of the kernel
  const char* (*engine)();               // what multiplies its matrices, null if `backend` is
  const char* (*missing)();              // why nobody can have it on this machine, else ""
};

/// All backends, the preferred first.
std::span<const BackendEntry> all_backends();

/// The backend that was chosen and one sentence that says why.
struct BackendChoice {
  const BackendEntry* entry = nullptr;
  std::string why;
  const kernels::DeviceBackend* device = nullptr;  // null on the CPU
};

/// Chooses for "auto" the first backend of the device that supports the problem, else the named
/// one. Sets the mode of the kernel, or what the device is, in `problem`. Throws kInvalidArgument
/// for a name that is not there, kUnsupported with the reasons if nothing can run the problem.
BackendChoice choose_backend(std::string_view name, int device_kind, int device_index,
                             kernels::DeviceProblem& problem);

}  // namespace mxattn::api
