#include "api/backends.h"

#include <mxattn/mxattn.h>

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

constexpr BackendEntry kBackends[] = {
    {"cpu", "fast CPU kernels with the recipe's roundings", MXATTN_DEVICE_CPU, faithful, false,
     matrix_engine, ""},
    {"cpu_exact", "FP64 sums with the recipe's roundings: the oracle", MXATTN_DEVICE_CPU, exact,
     false, fp64, ""},
    {"cpu_h200", "fast CPU kernels with the FP8 accumulator of an H200", MXATTN_DEVICE_CPU,
     faithful, true, sm90_model, ""},
    {"cuda", "kernels for NVIDIA GPUs", MXATTN_DEVICE_CUDA, nullptr, false, nullptr,
     "this build holds no CUDA kernels"},
};

/// Why an entry cannot run the problem; empty if it can. Sets the kernel's mode.
std::string refusal(const BackendEntry& entry, int device_kind, kernels::Problem& problem) {
  if (entry.backend == nullptr) return entry.missing;
  if (entry.device_kind != device_kind) {
    return device_kind == MXATTN_DEVICE_CUDA ? "it runs on tensors in CPU memory only"
                                             : "it runs on tensors in GPU memory only";
  }
  problem.sm90_accumulator = entry.sm90_accumulator;
  return entry.backend()->supports(problem);
}

}  // namespace

std::span<const BackendEntry> all_backends() { return kBackends; }

BackendChoice choose_backend(std::string_view name, int device_kind, kernels::Problem& problem) {
  if (name == "auto") {
    // NOTE: cpu_h200 models another machine; nobody gets it without asking.
    std::string reasons;
    for (const BackendEntry& entry : kBackends) {
      if (entry.sm90_accumulator) continue;
      const std::string reason = refusal(entry, device_kind, problem);
      if (reason.empty()) {
        return {&entry, reasons.empty() ? "the first choice on this device" : reasons};
      }
      reasons += detail::concat(reasons.empty() ? "" : "; ", entry.name, ": ", reason);
    }
    unsupported("no backend can run the problem: ", reasons);
  }

  std::string names = "auto";
  for (const BackendEntry& entry : kBackends) {
    if (name == entry.name) {
      const std::string reason = refusal(entry, device_kind, problem);
      if (not reason.empty()) unsupported("backend ", name, " cannot run the problem: ", reason);
      return {&entry, "asked for by name"};
    }
    names += detail::concat(", ", entry.name);
  }
  require(false, "backend", '"' + std::string(name) + '"', "one of ", names);
  return {};
}

}  // namespace mxattn::api
