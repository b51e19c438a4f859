// What mxattn_problem_explain tells people.
#include <sstream>

#include "api/devices.h"
#include "api/problem.h"
#include "base/error.h"
#include "recipe/stages.h"

namespace mxattn::api {
namespace {

const char* text(Element element) {
  switch (element) {
    case Element::kNone:
      return "FP64, unrounded";
    case Element::kBf16:
      return "BF16";
    case Element::kE4m3:
      return "E4M3";
  }
  return "";
}

const char* text(ScaleGroup group) {
  switch (group) {
    case ScaleGroup::kNone:
      return "no scale";
    case ScaleGroup::kRunning:
      return "exponents of the running maximum of the document";
    case ScaleGroup::kToken:
      return "one exponent a token";
    case ScaleGroup::kBlock32:
      return "one exponent for 32 tokens";
    case ScaleGroup::kTensor:
      return "one scale a tensor";
  }
  return "";
}

const char* text(DsScale scale) {
  switch (scale) {
    case DsScale::kNone:
      return "unscaled";
    case DsScale::kNorm:
      return "scaled by norms of operands";
    case DsScale::kRow:
      return "scaled by each row's largest magnitude";
    case DsScale::kBlock32:
      return "scaled by the largest magnitude of 32 x 32 blocks";
    case DsScale::kTensor:
      return "scaled by the largest magnitude of the tensor";
  }
  return "";
}

std::string text(const Mask& mask) {
  std::ostringstream out;
  out << (mask.causal ? "causal, bottom-right" : "full");
  if (mask.window_left >= 0) out << ", " << mask.window_left << " keys to the left";
  if (mask.window_right >= 0) out << ", " << mask.window_right << " keys to the right";
  return out.str();
}

std::string engine(const Problem& problem) {
  if (problem.on_device() != nullptr) {
    const DeviceInfo& device = devices().list[static_cast<std::size_t>(problem.device_index)];
    return detail::concat(problem.on_device()->engine, ", device ", problem.device_index, ": ",
                          device.name, ", ", device.multiprocessors, " multiprocessors");
  }
  const int threads = problem.kernel.threads;
  return detail::concat(problem.backend.entry->engine(), ", ", threads,
                        threads == 1 ? " thread" : " threads");
}

}  // namespace

std::string explain(const Problem& problem) {
  const kernels::Problem& kernel = problem.kernel;
  const Recipe& recipe = kernel.recipe;
  std::uint64_t state_bytes = 0;
  for (const StateBuffer& buffer : problem.state) state_bytes += buffer.bytes;

  std::ostringstream out;
  out << "problem:  " << problem.total_q << " query and " << problem.total_k
      << " key tokens, documents: " << problem.num_documents << ", " << kernel.heads_q
      << " query heads on " << kernel.heads_k << " key heads, head dimension " << kernel.dim
      << ", mask " << text(kernel.mask) << ", softmax scale " << kernel.softmax_scale << "\n"
      << "recipe:   " << problem.recipe->name << ", " << problem.recipe->form << " form, version "
      << int{recipe.version} << ": " << problem.recipe->summary << "\n"
      << "          operands " << text(recipe.operand) << ", " << text(recipe.scale_group)
      << "; probabilities " << text(recipe.probability) << ", row sum from "
      << (recipe.row_sum == RowSum::kCodes ? "the codes" : "the unrounded weights") << "; dS "
      << text(recipe.ds_scale) << "\n"
      << "          " << (recipe.strictly_causal() ? "strictly causal" : "not strictly causal")
      << (recipe.control ? "; a control: to be measured, not to be trained with" : "") << "\n"
      << "rotation: " << (kernel.rotate ? "q and k, Walsh-Hadamard over the channels" : "none")
      << "\n"
      << "backend:  " << problem.backend.entry->name << ", " << problem.backend.entry->summary
      << " (" << problem.backend.why << ")\n"
      << "tiles:    " << stages::kQueryTile << " queries by " << stages::kKeyTile << " keys, "
      << (recipe.key_order == KeyOrder::kDescending ? "from the diagonal down"
                                                    : "from the document's start up")
      << "\n"
      << "engine:   " << engine(problem) << "\n"
      << "memory:   state " << state_bytes << " bytes in " << problem.state.size()
      << " buffers, workspace " << problem.workspace_bytes() << " bytes\n";
  return out.str();
}

}  // namespace mxattn::api
