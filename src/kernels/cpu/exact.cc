#include "kernels/cpu/exact.h"

#include "base/error.h"
#include "kernels/cpu/exact_passes.h"
#include "kernels/cpu/exact_tile.h"

namespace mxattn::kernels {
namespace {

std::string supports(const Problem& problem) {
  if (problem.dim < 1 or problem.dim > exact::kMaxDim) {
    return detail::concat("head dimension ", problem.dim, " is outside 1..", exact::kMaxDim);
  }
  if (problem.sm90_accumulator) return "the FP64 oracle models no accumulator";
  return {};
}

}  // namespace

const Backend& exact_backend() {
  static constexpr Backend kBackend{"exact", supports, exact::forward, exact::backward};
  return kBackend;
}

}  // namespace mxattn::kernels
