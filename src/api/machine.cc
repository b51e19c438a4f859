#include "api/machine.h"

#include <hwy/targets.h>

#include <cstdint>
#include <string>

#include "kernels/cpu/tile_gemm.h"

namespace mxattn::api {

const char* simd_targets() {
  static const std::string text = [] {
    std::string names;
    // Highway numbers better targets lower.
    for (std::int64_t left = hwy::SupportedTargets() & HWY_TARGETS; left != 0; left &= left - 1) {
      if (not names.empty()) names += ',';
      names += hwy::TargetName(left & -left);
    }
    return names;
  }();
  return text.c_str();
}

const char* matrix_engine() { return kernels::cpu::best_tile_gemm().name; }

}  // namespace mxattn::api
