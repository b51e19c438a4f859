#include "api/backends.h"

#include <mxattn/mxattn.h>

#include "api/devices.h"
#include "api/machine.h"
#include "base/error.h"
#include "kernels/cpu/exact.h"
#include "kernels/cpu/faithful.h"

namespace mxattn::api {
namespace {

const kernels::Backend* faithful() { return &kernels::faithful_backend(); }
const kernels::Backend* exact() { return &kernels::exact_backend(); }

const char* fp64() { return "FP64 loops"; }
const char* sm90_model() { return "a model of the H200's FP8 matrix unit"; }

const char* nothing() { return ""; }
const char* no_device() { return devices().missing.c_str(); }

constexpr BackendEntry kBackends[] = {
    {"cpu", "fast CPU kernels with the recipe's roundings", MXATTN_DEVICE_CPU, faithful, false,
     matrix_engine, nothing},
    {"cpu_exact", "FP64 sums with the recipe's roundings: the oracle", MXATTN_DEVICE_CPU, exact,
     false, fp64, nothing},
    {"cpu_h200", "fast CPU kernels with the FP8 accumulator of an H200", MXATTN_DEVICE_CPU,
     faithful, true, sm90_model, nothing},
    {"cuda", "kernels for NVIDIA GPUs", MXATTN_DEVICE_CUDA, nullptr, false, nullptr, no_device},
};

/// Chooses the kernels of a device; the reason if there are none.
std::string choose_device(int index, kernels::DeviceProblem& problem,
                          const kernels::DeviceBackend*& backend) {
  const Devices& found = devices();
  const int count = static_cast<int>(found.list.size());
  if (index >= count) {
    return detail::concat("device_index = ", index, ": there are ", count, " CUDA devices");
  }
  const DeviceInfo& device = found.list[static_cast<std::size_t>(index)];
  problem.compute_capability = device.compute_capability;
  problem.multiprocessors = device.multiprocessors;
  backend = device_backend(device.compute_capability);
  if (backend == nullptr) {
    return detail::concat("there are no kernels for ", device.name, ", compute capability ",
                          device.compute_capability / 10, ".", device.compute_capability % 10);
  }
  return backend->supports(problem);
}

/// Why an entry cannot run the problem; empty if it can, and then `choice` names it.
std::string refusal(const BackendEntry& entry, int device_kind, int device_index,
                    kernels::DeviceProblem& problem, BackendChoice& choice) {
  if (*entry.missing() != 0) return entry.missing();
  if (entry.device_kind != device_kind) {
    return device_kind == MXATTN_DEVICE_CUDA ? "it runs on tensors in CPU memory only"
                                             : "it runs on tensors in GPU memory only";
  }
  choice.entry = &entry;
  problem.problem.sm90_accumulator = entry.sm90_accumulator;
  if (entry.backend == nullptr) return choose_device(device_index, problem, choice.device);
  return entry.backend()->supports(problem.problem);
}

}  // namespace

std::span<const BackendEntry> all_backends() { return kBackends; }

BackendChoice choose_backend(std::string_view name, int device_kind, int device_index,
                             kernels::DeviceProblem& problem) {
  BackendChoice choice;
  if (name == "auto") {
    // NOTE: cpu_h200 models another machine; nobody gets it without asking.
    std::string reasons;
    for (const BackendEntry& entry : kBackends) {
      if (entry.sm90_accumulator) continue;
      const std::string reason = refusal(entry, device_kind, device_index, problem, choice);
      if (reason.empty()) {
        choice.why = reasons.empty() ? "the first choice on this device" : reasons;
        return choice;
      }
      reasons += detail::concat(reasons.empty() ? "" : "; ", entry.name, ": ", reason);
    }
    unsupported("no backend can run the problem: ", reasons);
  }

  std::string names = "auto";
  for (const BackendEntry& entry : kBackends) {
    if (name == entry.name) {
      const std::string reason = refusal(entry, device_kind, device_index, problem, choice);
      if (not reason.empty()) unsupported("backend ", name, " cannot run the problem: ", reason);
      choice.why = "asked for by name";
      return choice;
    }
    names += detail::concat(", ", entry.name);
  }
  require(false, "backend", '"' + std::string(name) + '"', "one of ", names);
  return {};
}

}  // namespace mxattn::api
