#include "api/work_lists.h"

#include <span>
#include <string>

#include "api/checks.h"
#include "base/error.h"

namespace mxattn::api {

WorkLists make_work_lists(const Problem& problem, const mxattn_tensor& cu_seqlens_q,
                          const mxattn_tensor& cu_seqlens_k) {
  Regions regions;
  const auto q = check_lengths("cu_seqlens_q", cu_seqlens_q, problem.num_documents, regions);
  const auto k = cu_seqlens_k.data == nullptr
                     ? q
                     : check_lengths("cu_seqlens_k", cu_seqlens_k, problem.num_documents, regions);
  const kernels::Problem& kernel = problem.kernel;
  WorkLists lists{.backend = problem.backend.entry,
                  .mask = kernel.mask,
                  .heads_q = kernel.heads_q,
                  .heads_k = kernel.heads_k,
                  .dim = kernel.dim,
                  .total_q = problem.total_q,
                  .total_k = problem.total_k,
                  .cu_seqlens_q = {q.begin(), q.end()},
                  .cu_seqlens_k = {k.begin(), k.end()},
                  .pack = make_pack(q, k, problem.total_q, problem.total_k)};
  if (problem.run().make_plans != nullptr) {
    kernels::Problem with_pack = kernel;
    with_pack.pack = &lists.pack;
    lists.plans = problem.run().make_plans(with_pack);
    lists.planned = true;
  }
  return lists;
}

void check_made_for(const WorkLists& lists, const Problem& problem) {
  const auto same = [](const char* field, const auto& made_for, const auto& here) {
    require(made_for == here, std::string("call.plan made for ") + field, made_for, here,
            ", as the problem of the call has");
  };
  const kernels::Problem& kernel = problem.kernel;
  same("backend", std::string(lists.backend->name), std::string(problem.backend.entry->name));
  same("num_documents", lists.cu_seqlens_q.size() - 1,
       static_cast<std::size_t>(problem.num_documents));
  same("total_q", lists.total_q, problem.total_q);
  same("total_k", lists.total_k, problem.total_k);
  same("heads_q", lists.heads_q, kernel.heads_q);
  same("heads_k", lists.heads_k, kernel.heads_k);
  same("head_dim", lists.dim, kernel.dim);
  same("causal", lists.mask.causal, kernel.mask.causal);
  same("window_left", lists.mask.window_left, kernel.mask.window_left);
  same("window_right", lists.mask.window_right, kernel.mask.window_right);
}

}  // namespace mxattn::api
