#include "kernels/sm90/attention.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>

#include "base/cuda_check.h"
#include "base/error.h"
#include "kernels/sm90/instances.h"
#include "kernels/sm90/outside.h"
#include "kernels/sm90/params.h"
#include "kernels/sm90/workspace.h"
#include "quantize/quantize.h"
#include "recipe/registry.h"
#include "recipe/roles.h"
#include "recipe/stages.h"

namespace mxattn::kernels::sm90 {
namespace {

using plan::Pass;

// Heads are the y dimension of grids.
constexpr int kMaxHeads = 65535;
// Kernels count slots, tiles, steps and tokens in 32 bits; a chunk may reach past the last slot.
constexpr std::int64_t kMaxCount = std::numeric_limits<std::int32_t>::max() - 4096;

cudaStream_t stream_of(const DeviceCall& call) { return static_cast<cudaStream_t>(call.stream); }

// ---- what can run -----------------------------------------------------------------------------

std::string supports(const DeviceProblem& device) {
  const Problem& problem = device.problem;
  if (device.compute_capability != 90) {
    return detail::concat("the kernels are for compute capability 9.0, the device has ",
                          device.compute_capability / 10, ".", device.compute_capability % 10);
  }
  if (problem.dim != 64 and problem.dim != 128) {
    return detail::concat("head_dim = ", problem.dim, ": the kernels take 64 and 128");
  }
  if (find_forward(problem.recipe, problem.dim) == nullptr or
      find_backward(problem.recipe, problem.dim) == nullptr) {
    return detail::concat("recipe ", info_of(problem.recipe).name,
                          ": the kernels run fp8, fp8_ds_row, mxfp8, mxfp8_token");
  }
  if (problem.heads_q > kMaxHeads) {
    return detail::concat("heads_q = ", problem.heads_q, ": the kernels take up to ", kMaxHeads);
  }
  const std::int64_t slots = std::max(device.q_slots(), device.k_slots());
  const std::int64_t steps = slots / stages::kQueryStep + device.num_documents + 1;
  if (slots > kMaxCount or steps > kMaxCount / problem.heads_q) {
    return detail::concat("total_q = ", device.total_q, ", total_k = ", device.total_k, " with ",
                          problem.heads_q, " heads: the kernels count 2^31 slots and items");
  }
  return {};
}

// ---- memory -----------------------------------------------------------------------------------

struct ListsWorkspace {
  std::uint8_t* scratch;
  ListsWorkspace(Carver& carver, const DeviceProblem& problem)
      : scratch(carver.take<std::uint8_t>(list_scratch_bytes(problem))) {}
};

std::int64_t workspace_bytes(const DeviceProblem& problem) {
  return std::max({bytes_of<ForwardWorkspace>(problem), bytes_of<BackwardWorkspace>(problem),
                   bytes_of<ListsWorkspace>(problem)});
}

std::int64_t lists_bytes(const DeviceProblem& problem) {
  Carver carver(nullptr);
  carve_lists(carver, problem);
  return carver.bytes();
}

/// Before the first kernel of a call: kernels overlap only where nothing else lies between them.
void clear(const DeviceCall& call, const ClearedWorkspace& workspace) {
  MXATTN_CUDA_CHECK(cudaMemsetAsync(
      workspace.words, 0, static_cast<std::size_t>(workspace.count) * sizeof(*workspace.words),
      stream_of(call)));
}

// ---- lists ------------------------------------------------------------------------------------

void build(const DeviceProblem& problem, const DeviceCall& call, Pass pass, const DeviceList& list,
           void* scratch) {
  plan::cuda::build_plan(list_spec(problem, pass), call.cu_seqlens_q, call.cu_seqlens_k, list.items,
                         list.num_items, scratch, stream_of(call));
}

DeviceLists make_lists(const DeviceProblem& problem, const DeviceCall& call, void* memory) {
  Carver workspace(call.workspace);
  const ListsWorkspace own(workspace, problem);
  Carver carver(memory);
  const DeviceLists lists = carve_lists(carver, problem);
  build(problem, call, Pass::kForward, lists.forward, own.scratch);
  build(problem, call, Pass::kDq, lists.dq, own.scratch);
  build(problem, call, Pass::kDkv, lists.dkv, own.scratch);
  return lists;
}

// ---- quantiser --------------------------------------------------------------------------------

/// What the quantiser is told of one of Q, K and V.
cuda::QuantizeArgs quantize_args(const DeviceProblem& problem, const DeviceCall& call, Role role,
                                 const TensorView<const Bf16Bits>& x, const Operand& out,
                                 std::uint8_t* transposed) {
  cuda::QuantizeArgs args;
  args.x = x;
  args.cu_seqlens = is_query_role(role) ? call.cu_seqlens_q : call.cu_seqlens_k;
  args.num_documents = problem.num_documents;
  args.rotate = is_rotated(role, problem.problem.dim, problem.problem.rotate);
  args.out = out;
  args.transposed = transposed;
  return args;
}

void quantize_alone(const DeviceProblem& problem, const DeviceCall& call, Role role,
                    const TensorView<const Bf16Bits>& x, const Operand& out) {
  Carver carver(call.workspace);
  const ClearedWorkspace look_back(carver, look_back_words(problem));
  clear(call, look_back);
  const cuda::QuantizeArgs args = quantize_args(problem, call, role, x, out, nullptr);
  cuda::quantize(problem.problem.recipe, {&args, 1}, look_back.words, problem.multiprocessors,
                 stream_of(call));
}

void restore(const DeviceProblem& problem, const DeviceCall& call, Role role,
             const Operand& operand, bool rotate_back, const TensorView<float>& y) {
  const std::int32_t* const cu_seqlens =
      is_query_role(role) ? call.cu_seqlens_q : call.cu_seqlens_k;
  cuda::restore(operand, cu_seqlens, problem.num_documents, rotate_back, y, stream_of(call));
  OutsideArgs outside;
  // Zeros are zeros: a row of FP32 is twice as many words of 16 bits.
  outside.rows[0] = {{reinterpret_cast<std::uint16_t*>(y.data), y.tokens, y.heads, 2 * y.dim,
                      2 * y.token_stride, 2 * y.head_stride},
                     cu_seqlens + problem.num_documents};
  fill_outside(outside, problem.multiprocessors, stream_of(call));
}

// ---- forward ----------------------------------------------------------------------------------

void forward(const DeviceProblem& device, const DeviceCall& call, const ForwardArgs& args,
             Quantised quantised) {
  const Problem& problem = device.problem;
  const State& state = args.state;
  const cudaStream_t stream = stream_of(call);
  Carver carver(call.workspace);
  const ForwardWorkspace workspace(carver, device);
  clear(call, workspace.cleared);

  cuda::QuantizeArgs tensors[cuda::kMaxTensors];
  std::size_t count = 0;
  const auto add = [&](Role role, const TensorView<const Bf16Bits>& x, const Operand& out,
                       std::uint8_t* transposed) {
    tensors[count++] = quantize_args(device, call, role, x, out, transposed);
  };
  if (not quantised.q) add(Role::kQ, args.q, state.q, nullptr);
  if (not quantised.k) add(Role::kK, args.k, state.k, nullptr);
  if (not quantised.v) add(Role::kV, args.v, state.v, workspace.v_transposed);
  cuda::quantize(problem.recipe, {tensors, count}, workspace.look_back, device.multiprocessors,
                 stream);
  if (quantised.v) {
    const cuda::Transposition v{state.v, workspace.v_transposed};
    cuda::transpose_codes({&v, 1}, stream);
  }
  DeviceList list = workspace.list;
  if (call.lists != nullptr) {
    list = call.lists->forward;
  } else {
    build(device, call, Pass::kForward, list, workspace.list_scratch);
  }

  const ForwardInstance& instance = forward_of(problem);
  instance.launch(forward_params(device, call, args, workspace, list), device.multiprocessors,
                  stream);

  OutsideArgs outside;
  outside.rows[0] = {args.out, call.cu_seqlens_q + device.num_documents};
  outside.lse = args.lse;
  outside.row_reference = state.row_reference;
  outside.row_sum = state.row_sum;
  outside.total = device.total_q;
  outside.heads = problem.heads_q;
  fill_outside(outside, device.multiprocessors, stream);
}

// ---- backward ---------------------------------------------------------------------------------

/// What both passes read that the forward has not left in the state.
void prepare(const DeviceProblem& device, const DeviceCall& call, const BackwardArgs& args,
             const BackwardWorkspace& workspace) {
  const cudaStream_t stream = stream_of(call);
  const State& state = args.state;
  // First, since its CTAs stay: those that begin beside a kernel with less shared memory find a
  // multiprocessor that has no room for as many of them.
  cuda::GradientArgs gradient;
  gradient.dout = args.dout;
  gradient.out = args.out;
  gradient.row_sum = state.row_sum;
  gradient.cu_seqlens = call.cu_seqlens_q;
  gradient.cu_seqlens_k = call.cu_seqlens_k;
  gradient.mask = device.problem.mask;
  gradient.num_documents = device.num_documents;
  gradient.g = workspace.g;
  gradient.transposed = workspace.g_transposed;
  gradient.output_norms = workspace.output_norms;
  gradient.delta = workspace.delta;
  gradient.live = workspace.live;
  cuda::prepare_gradient(device.problem.recipe, gradient, device.multiprocessors, stream);

  const cuda::Transposition transpositions[] = {{state.q, workspace.q_transposed},
                                                {state.k, workspace.k_transposed}};
  cuda::transpose_codes(transpositions, stream);

  cuda::ChunkMaximaArgs norms;
  norms.values = state.v.norms;
  norms.maxima = workspace.v_running_norms;
  norms.cu_seqlens = call.cu_seqlens_k;
  norms.num_documents = device.num_documents;
  norms.heads = device.problem.heads_k;
  norms.slots = state.v.slots;
  cuda::make_chunk_maxima(norms, stream);

  cuda::ScalesArgs scales;
  scales.q_exponents = state.q.exponents;
  scales.g_exponents = workspace.g.exponents;
  scales.g_norms = workspace.g.norms;
  scales.output_norms = workspace.output_norms;
  scales.live = workspace.live;
  scales.cu_seqlens = call.cu_seqlens_q;
  scales.num_documents = device.num_documents;
  scales.heads = device.problem.heads_q;
  scales.slots = state.q.slots;
  scales.scales = workspace.tile_scales;
  cuda::make_tile_scales(scales, stream);
}

void backward(const DeviceProblem& device, const DeviceCall& call, const BackwardArgs& args) {
  const cudaStream_t stream = stream_of(call);
  Carver carver(call.workspace);
  const BackwardWorkspace workspace(carver, device);
  clear(call, workspace.cleared);
  prepare(device, call, args, workspace);
  DeviceList dkv_list = workspace.dkv_list;
  DeviceList dq_list = workspace.dq_list;
  if (call.lists != nullptr) {
    dkv_list = call.lists->dkv;
    dq_list = call.lists->dq;
  } else {
    build(device, call, Pass::kDkv, dkv_list, workspace.list_scratch);
    build(device, call, Pass::kDq, dq_list, workspace.list_scratch);
  }
  const BackwardInstance& instance = backward_of(device.problem);
  instance.launch_dkv(dkv_params(device, call, args, workspace, dkv_list), device.multiprocessors,
                      stream);
  instance.launch_dq(dq_params(device, call, args, workspace, dq_list), device.multiprocessors,
                     stream);

  OutsideArgs outside;
  outside.rows[0] = {args.dq, call.cu_seqlens_q + device.num_documents};
  outside.rows[1] = {args.dk, call.cu_seqlens_k + device.num_documents};
  outside.rows[2] = {args.dv, call.cu_seqlens_k + device.num_documents};
  fill_outside(outside, device.multiprocessors, stream);
}

}  // namespace

const DeviceBackend& backend() {
  static constexpr DeviceBackend kBackend{
      .name = "sm90",
      .engine = "FP8 matrix instructions of Hopper",
      .supports = supports,
      .workspace_bytes = workspace_bytes,
      .lists_bytes = lists_bytes,
      .make_lists = make_lists,
      .quantize = quantize_alone,
      .restore = restore,
      .forward = forward,
      .backward = backward,
  };
  return kBackend;
}

}  // namespace mxattn::kernels::sm90
