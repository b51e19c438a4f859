#include "kernels/sm90/workspace.h"

#include <algorithm>

#include "kernels/sm90/instances.h"
#include "recipe/stages.h"

namespace mxattn::kernels::sm90 {
namespace {

// Of an H200's 60 MB of L2, what the heads that are worked on together may fill: each half of it
// also holds copies of lines of the other. docs/perf/h200.md has what was measured.
constexpr std::int64_t kL2Bytes = 32'000'000;

/// Bytes of codes that the items of one key head share.
std::int64_t bytes_per_key_head(const DeviceProblem& problem, plan::Pass pass) {
  const Problem& p = problem.problem;
  switch (pass) {
    case plan::Pass::kForward:  // K, V^T
      return 2 * p.dim * problem.total_k;
    case plan::Pass::kDq:  // K, V, K^T
      return 3 * p.dim * problem.total_k;
    case plan::Pass::kDkv:  // Q, g and their transposes
      return 4 * p.dim * problem.total_q * (p.heads_q / p.heads_k);
  }
  return 0;
}

}  // namespace

plan::cuda::BuildSpec list_spec(const DeviceProblem& problem, plan::Pass pass) {
  plan::cuda::BuildSpec build;
  build.spec.pass = pass;
  build.spec.heads_q = problem.problem.heads_q;
  build.spec.heads_k = problem.problem.heads_k;
  build.spec.tile =
      pass == plan::Pass::kForward ? forward_of(problem.problem).rows : stages::kQueryTile;
  build.spec.heads_per_group =
      plan::heads_per_group_for_l2(build.spec, bytes_per_key_head(problem, pass), kL2Bytes);
  build.mask = problem.problem.mask;
  build.num_documents = problem.num_documents;
  build.total_q = problem.total_q;
  build.total_k = problem.total_k;
  return build;
}

DeviceList carve_list(Carver& carver, const DeviceProblem& problem, plan::Pass pass) {
  const std::int64_t most = plan::cuda::max_items(list_spec(problem, pass));
  DeviceList list;
  list.items = carver.take<plan::WorkItem>(std::max<std::int64_t>(most, 1));
  list.num_items = carver.take<std::int32_t>(1);
  return list;
}

DeviceLists carve_lists(Carver& carver, const DeviceProblem& problem) {
  DeviceLists lists;
  lists.forward = carve_list(carver, problem, plan::Pass::kForward);
  lists.dq = carve_list(carver, problem, plan::Pass::kDq);
  lists.dkv = carve_list(carver, problem, plan::Pass::kDkv);
  return lists;
}

std::int64_t list_scratch_bytes(const DeviceProblem& problem) {
  std::int64_t most = 0;
  for (const plan::Pass pass : {plan::Pass::kForward, plan::Pass::kDq, plan::Pass::kDkv}) {
    most = std::max(most, plan::cuda::scratch_bytes(list_spec(problem, pass)));
  }
  return most;
}

std::int64_t look_back_words(const DeviceProblem& problem) {
  return cuda::quantize_scratch_words(problem.problem.heads_q, problem.q_slots()) +
         2 * cuda::quantize_scratch_words(problem.problem.heads_k, problem.k_slots());
}

ClearedWorkspace::ClearedWorkspace(Carver& carver, std::int64_t num_words)
    : words(carver.take<std::uint32_t>(num_words)), count(num_words) {}

ForwardWorkspace::ForwardWorkspace(Carver& carver, const DeviceProblem& problem)
    : cleared(carver, 1 + look_back_words(problem)),
      next_item(reinterpret_cast<int*>(cleared.words)),
      look_back(cleared.words + 1) {
  const std::int64_t k_rows = problem.problem.heads_k * problem.k_slots();
  v_transposed = carver.take<std::uint8_t>(k_rows * problem.problem.dim);
  list = carve_list(carver, problem, plan::Pass::kForward);
  list_scratch = carver.take<std::uint8_t>(list_scratch_bytes(problem));
}

BackwardWorkspace::BackwardWorkspace(Carver& carver, const DeviceProblem& problem)
    : cleared(carver, 2),
      next_dkv_item(reinterpret_cast<int*>(cleared.words)),
      next_dq_item(next_dkv_item + 1) {
  const int dim = problem.problem.dim;
  const std::int64_t q_rows = problem.problem.heads_q * problem.q_slots();
  const std::int64_t k_rows = problem.problem.heads_k * problem.k_slots();
  q_transposed = carver.take<std::uint8_t>(q_rows * dim);
  k_transposed = carver.take<std::uint8_t>(k_rows * dim);
  v_running_norms = carver.take<std::int8_t>(k_rows);
  g = {.codes = carver.take<std::uint8_t>(q_rows * dim),
       .exponents = carver.take<std::int8_t>(q_rows),
       .norms = carver.take<std::int8_t>(q_rows),
       .scale = nullptr,
       .slots = problem.q_slots(),
       .heads = problem.problem.heads_q,
       .dim = dim};
  g_transposed = carver.take<std::uint8_t>(q_rows * dim);
  output_norms = carver.take<std::int8_t>(q_rows);
  live = carver.take<std::uint8_t>(q_rows);
  delta = carver.take<float>(q_rows);
  tile_scales = carver.take<cuda::TileScales>(q_rows / kSlotAlignment);
  sums = carver.take<float4>(problem.multiprocessors * kSumBytesPerCta /
                             static_cast<std::int64_t>(sizeof(float4)));
  dkv_list = carve_list(carver, problem, plan::Pass::kDkv);
  dq_list = carve_list(carver, problem, plan::Pass::kDq);
  list_scratch = carver.take<std::uint8_t>(list_scratch_bytes(problem));
}

}  // namespace mxattn::kernels::sm90
