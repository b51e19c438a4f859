#include "api/problem.h"

#include <bit>
#include <cmath>
#include <limits>
#include <string_view>
#include <thread>

#include "base/error.h"
#include "recipe/stages.h"

namespace mxattn::api {
namespace {

constexpr int kMaxHeadDim = 256;
constexpr int kMaxThreads = 1024;
// Elements of one tensor: offsets in bytes, strided views included, then fit in 63 bits easily.
constexpr double kMaxElements = 0x1p56;

void check_sizes(const mxattn_problem_config& config) {
  require(config.total_q >= 0, "total_q", config.total_q, "at least 0");
  require(config.total_k >= 0, "total_k", config.total_k, "at least 0");
  require(config.num_documents >= 1, "num_documents", config.num_documents, "at least 1");
  require(config.num_documents < std::numeric_limits<std::int32_t>::max(), "num_documents",
          config.num_documents, "less than 2^31 - 1");
  require(config.heads_q >= 1, "heads_q", config.heads_q, "at least 1");
  require(config.heads_k >= 1, "heads_k", config.heads_k, "at least 1");
  require(config.heads_q % config.heads_k == 0, "heads_q", config.heads_q,
          "a multiple of heads_k = ", config.heads_k);
  require(config.head_dim >= 1 and config.head_dim <= kMaxHeadDim, "head_dim", config.head_dim,
          "1 to ", kMaxHeadDim);
  for (const auto& [name, total, heads] : {std::tuple{"total_q", config.total_q, config.heads_q},
                                           std::tuple{"total_k", config.total_k, config.heads_k}}) {
    // Slots, not tokens: each document may add 16 rows.
    const double rows = static_cast<double>(total) + 16.0 * config.num_documents + 16;
    require(rows * heads * config.head_dim <= kMaxElements, name, total,
            "a tensor of at most 2^56 elements");
  }
}

void check_mask(const mxattn_problem_config& config) {
  require(config.causal == 0 or config.causal == 1, "causal", config.causal, "0 or 1");
  require(config.window_left >= -1, "window_left", config.window_left,
          "at least -1 (-1: no bound)");
  require(config.window_right >= -1, "window_right", config.window_right,
          "at least -1 (-1: no bound)");
}

bool rotation(const mxattn_problem_config& config, const Recipe& recipe) {
  require(config.rotate >= -1 and config.rotate <= 1, "rotate", config.rotate,
          "-1 (as the recipe says), 0 or 1");
  if (config.rotate < 0) return recipe.rotates(config.head_dim);
  if (config.rotate == 1) {
    require(recipe.quantised(), "rotate", config.rotate,
            "0 or -1 with a recipe that does not quantise");
    require(std::has_single_bit(static_cast<unsigned>(config.head_dim)), "rotate", config.rotate,
            "0 or -1 with head_dim = ", config.head_dim, ", which is not a power of two");
  }
  return config.rotate == 1;
}

}  // namespace

int default_threads() {
  const unsigned threads = std::thread::hardware_concurrency();
  return threads == 0 ? 1 : static_cast<int>(std::min<unsigned>(threads, kMaxThreads));
}

Problem make_problem(const mxattn_problem_config& config) {
  Problem problem;
  problem.recipe = &find_recipe(config.recipe == nullptr ? "fp8" : config.recipe);
  check_sizes(config);
  check_mask(config);
  require(config.has_softmax_scale == 0 or config.has_softmax_scale == 1, "has_softmax_scale",
          config.has_softmax_scale, "0 or 1");
  require(config.has_softmax_scale == 0 or std::isfinite(config.softmax_scale), "softmax_scale",
          config.softmax_scale, "a finite number");
  require(config.has_softmax_scale == 0 or std::isfinite(stages::score_scale(config.softmax_scale)),
          "softmax_scale", config.softmax_scale, "a number that log2(e) times is finite in FP32");
  require(config.threads >= 0 and config.threads <= kMaxThreads, "threads", config.threads,
          "0 (all) to ", kMaxThreads);
  require(config.device_kind == MXATTN_DEVICE_CPU or config.device_kind == MXATTN_DEVICE_CUDA,
          "device_kind", config.device_kind, "MXATTN_DEVICE_CPU (0) or MXATTN_DEVICE_CUDA (1)");
  require(config.device_index >= 0, "device_index", config.device_index, "at least 0");

  kernels::Problem& kernel = problem.kernel;
  kernel.recipe = problem.recipe->recipe;
  kernel.mask = {config.causal == 1, config.window_left, config.window_right};
  kernel.heads_q = config.heads_q;
  kernel.heads_k = config.heads_k;
  kernel.dim = config.head_dim;
  kernel.softmax_scale = config.has_softmax_scale == 1
                             ? config.softmax_scale
                             : static_cast<float>(1.0 / std::sqrt(double(config.head_dim)));
  kernel.rotate = rotation(config, kernel.recipe);
  kernel.threads = config.threads == 0 ? default_threads() : config.threads;
  problem.total_q = config.total_q;
  problem.total_k = config.total_k;
  problem.num_documents = config.num_documents;

  problem.device_index = config.device_index;
  problem.device.problem = kernel;
  problem.device.num_documents = config.num_documents;
  problem.device.total_q = config.total_q;
  problem.device.total_k = config.total_k;
  problem.backend = choose_backend(config.backend == nullptr ? "auto" : config.backend,
                                   config.device_kind, config.device_index, problem.device);
  kernel = problem.device.problem;
  problem.state = state_layout(kernel, problem.total_q, problem.total_k, problem.num_documents);
  problem.explanation = explain(problem);
  return problem;
}

}  // namespace mxattn::api
