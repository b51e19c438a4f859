#include "api/work_lists.h"

#include <span>
#include <string>

#include "api/devices.h"
#include "base/error.h"

namespace mxattn::api {
namespace {

/// Lists of a problem, still empty.
WorkLists lists_for(const Problem& problem) {
  const kernels::Problem& kernel = problem.kernel;
  return {.backend = problem.backend.entry,
          .device_index = problem.device_index,
          .num_documents = problem.num_documents,
          .mask = kernel.mask,
          .heads_q = kernel.heads_q,
          .heads_k = kernel.heads_k,
          .dim = kernel.dim,
          .total_q = problem.total_q,
          .total_k = problem.total_k,
          .cu_seqlens_q = {},
          .cu_seqlens_k = {},
          .pack = {}};
}

/// Checks a block of memory of the device.
void check_block(const std::string& name, void* data, std::uint64_t bytes, std::uint64_t needed,
                 Regions& regions) {
  require(data != nullptr or needed == 0, name, "null", "the address of ", needed, " bytes");
  require(bytes >= needed, name + "_bytes", bytes, "at least ", needed);
  require(reinterpret_cast<std::uintptr_t>(data) % kernels::kWorkspaceAlignment == 0, name, data,
          "a multiple of ", kernels::kWorkspaceAlignment);
  regions.add_bytes(name, Access::kWrite, data, needed);
}

}  // namespace

WorkLists make_work_lists(const Problem& problem, const mxattn_tensor& cu_seqlens_q,
                          const mxattn_tensor& cu_seqlens_k) {
  require(problem.on_device() == nullptr, "problem", problem.backend.entry->name,
          "one on the CPU: mxattn_plan_create_on_device makes lists of a device");
  Regions regions;
  const auto q = check_lengths("cu_seqlens_q", cu_seqlens_q, problem.num_documents, regions);
  const auto k = cu_seqlens_k.data == nullptr
                     ? q
                     : check_lengths("cu_seqlens_k", cu_seqlens_k, problem.num_documents, regions);
  WorkLists lists = lists_for(problem);
  lists.cu_seqlens_q = {q.begin(), q.end()};
  lists.cu_seqlens_k = {k.begin(), k.end()};
  lists.pack = make_pack(q, k, problem.total_q, problem.total_k);
  if (problem.run().make_plans != nullptr) {
    kernels::Problem with_pack = problem.kernel;
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
  same("device_index", lists.device_index, problem.device_index);
  same("num_documents", lists.num_documents, problem.num_documents);
  same("total_q", lists.total_q, problem.total_q);
  same("total_k", lists.total_k, problem.total_k);
  same("heads_q", lists.heads_q, kernel.heads_q);
  same("heads_k", lists.heads_k, kernel.heads_k);
  same("head_dim", lists.dim, kernel.dim);
  same("causal", lists.mask.causal, kernel.mask.causal);
  same("window_left", lists.mask.window_left, kernel.mask.window_left);
  same("window_right", lists.mask.window_right, kernel.mask.window_right);
}

// ---- lists on a device ----------------------------------------------------------------------

kernels::DeviceCall check_device_call(const Problem& problem, const mxattn_tensor& cu_seqlens_q,
                                      const mxattn_tensor& cu_seqlens_k, void* workspace,
                                      std::uint64_t workspace_bytes, void* stream,
                                      const WorkLists* lists, Regions& regions) {
  kernels::DeviceCall call;
  if (lists != nullptr) {
    check_made_for(*lists, problem);
    call.lists = &lists->device_lists;
    call.cu_seqlens_q = lists->device_cu_seqlens_q;
    call.cu_seqlens_k = lists->device_cu_seqlens_k;
  }
  const bool planned = call.lists != nullptr;
  if (not planned or cu_seqlens_q.data != nullptr) {
    call.cu_seqlens_q =
        check_lengths("cu_seqlens_q", cu_seqlens_q, problem.num_documents, regions).data();
    if (not planned) call.cu_seqlens_k = call.cu_seqlens_q;
  }
  if (cu_seqlens_k.data != nullptr) {
    call.cu_seqlens_k =
        check_lengths("cu_seqlens_k", cu_seqlens_k, problem.num_documents, regions).data();
  }
  check_block("workspace", workspace, workspace_bytes, problem.workspace_bytes(), regions);
  call.workspace = workspace;
  call.stream = stream;
  return call;
}

void check_device_regions(const Problem& problem, const Regions& regions) {
  regions.check();
  for (const Region& region : regions.all()) {
    check_device_memory(region.name + ".data", reinterpret_cast<const void*>(region.begin),
                        problem.device_index);
  }
}

std::uint64_t device_lists_bytes(const Problem& problem) {
  const kernels::DeviceBackend* const device = problem.on_device();
  return device == nullptr ? 0 : static_cast<std::uint64_t>(device->lists_bytes(problem.device));
}

WorkLists make_device_lists(const Problem& problem, const mxattn_device_plan_args& args) {
  require(problem.on_device() != nullptr, "problem", problem.backend.entry->name,
          "one on a device: mxattn_plan_create makes lists of the CPU");
  Regions regions;
  const kernels::DeviceCall call =
      check_device_call(problem, args.cu_seqlens_q, args.cu_seqlens_k, args.workspace,
                        args.workspace_bytes, args.stream, nullptr, regions);
  check_block("memory", args.memory, args.memory_bytes, device_lists_bytes(problem), regions);
  check_device_regions(problem, regions);
  WorkLists lists = lists_for(problem);
  lists.device_cu_seqlens_q = call.cu_seqlens_q;
  lists.device_cu_seqlens_k = call.cu_seqlens_k;
  const CurrentDevice current(problem.device_index);
  lists.device_lists = problem.on_device()->make_lists(problem.device, call, args.memory);
  return lists;
}

void check_lengths_of(const Problem& problem, const mxattn_tensor& cu_seqlens_q,
                      const mxattn_tensor& cu_seqlens_k, void* stream) {
  Regions regions;
  auto q = check_lengths("cu_seqlens_q", cu_seqlens_q, problem.num_documents, regions);
  auto k = cu_seqlens_k.data == nullptr
               ? q
               : check_lengths("cu_seqlens_k", cu_seqlens_k, problem.num_documents, regions);
  std::vector<std::int32_t> copy_q, copy_k;
  if (problem.on_device() != nullptr) {
    check_device_regions(problem, regions);
    const CurrentDevice current(problem.device_index);
    copy_q = copy_lengths(q, stream);
    copy_k = copy_lengths(k, stream);
    q = copy_q;
    k = copy_k;
  }
  make_pack(q, k, problem.total_q, problem.total_k);
}

}  // namespace mxattn::api
