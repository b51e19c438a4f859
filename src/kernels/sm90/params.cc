#include "kernels/sm90/params.h"

#include "kernels/sm90/instances.h"
#include "recipe/stages.h"
#include "tile/tensor_map.h"

namespace mxattn::kernels::sm90 {
namespace {

/// Codes (heads, slots, d) in boxes of `box` rows.
CUtensorMap rows_map(const Operand& x, int box) {
  return tile::make_byte_tensor_map(x.codes, x.dim, x.slots, x.heads, x.dim, x.slots * x.dim, x.dim,
                                    box, tile::swizzle_of(x.dim));
}

/// The transposed codes of an operand, (heads, d, slots), in boxes of d x `box`.
CUtensorMap columns_map(const Operand& x, const std::uint8_t* transposed, int box) {
  return tile::make_byte_tensor_map(transposed, x.slots, x.dim, x.heads, x.slots, x.slots * x.dim,
                                    box, x.dim, tile::swizzle_of(box));
}

void fill_pass(const DeviceProblem& device, const DeviceCall& call, const State& state,
               const DeviceList& list, int* next_item, PassParams& params) {
  const Problem& problem = device.problem;
  params.items = list.items;
  params.num_items = list.num_items;
  params.next_item = next_item;
  params.cu_seqlens_q = call.cu_seqlens_q;
  params.cu_seqlens_k = call.cu_seqlens_k;
  params.q_exponents = state.q.exponents;
  params.k_exponents = state.k.exponents;
  params.v_exponents = state.v.exponents;
  params.q_slots = state.q.slots;
  params.k_slots = state.k.slots;
  params.total_q = device.total_q;
  params.heads_k = problem.heads_k;
  params.queries_per_key_head = problem.heads_q / problem.heads_k;
  params.mask = problem.mask;
  params.score_scale = stages::score_scale(problem.softmax_scale);
}

/// Parameters of a pass that reads `query_box` rows of Q and g at a time, but for the transposed
/// copies, of which each pass has its own.
BackwardParams backward_params(const DeviceProblem& device, const DeviceCall& call,
                               const BackwardArgs& args, const BackwardWorkspace& workspace,
                               const DeviceList& list, int* next_item, int query_box) {
  const State& state = args.state;
  BackwardParams params;
  fill_pass(device, call, state, list, next_item, params);
  params.q = rows_map(state.q, query_box);
  params.g = rows_map(workspace.g, query_box);
  params.k = rows_map(state.k, stages::kKeyTile);
  params.v = rows_map(state.v, stages::kKeyTile);
  params.g_exponents = workspace.g.exponents;
  params.g_norms = workspace.g.norms;
  params.o_norms = workspace.output_norms;
  params.v_norms = state.v.norms;
  params.v_running_norms = workspace.v_running_norms;
  params.delta = workspace.delta;
  params.tile_scales = workspace.tile_scales;
  params.row_reference = state.row_reference;
  params.dq = args.dq;
  params.dk = args.dk;
  params.dv = args.dv;
  params.sums = workspace.sums;
  params.softmax_scale = device.problem.softmax_scale;
  params.rotate = device.problem.rotate;
  return params;
}

}  // namespace

ForwardParams forward_params(const DeviceProblem& device, const DeviceCall& call,
                             const ForwardArgs& args, const ForwardWorkspace& workspace,
                             const DeviceList& list) {
  const State& state = args.state;
  ForwardParams params;
  fill_pass(device, call, state, list, workspace.next_item, params);
  params.q = rows_map(state.q, forward_of(device.problem).rows);
  params.k = rows_map(state.k, stages::kKeyTile);
  params.v = columns_map(state.v, workspace.v_transposed, stages::kKeyTile);
  params.out = args.out;
  params.lse = args.lse;
  params.row_reference = state.row_reference;
  params.row_sum = state.row_sum;
  return params;
}

BackwardParams dkv_params(const DeviceProblem& device, const DeviceCall& call,
                          const BackwardArgs& args, const BackwardWorkspace& workspace,
                          const DeviceList& list) {
  BackwardParams params = backward_params(device, call, args, workspace, list,
                                          workspace.next_dkv_item, stages::kQueryStep);
  params.q_transposed = columns_map(args.state.q, workspace.q_transposed, stages::kQueryStep);
  params.g_transposed = columns_map(workspace.g, workspace.g_transposed, stages::kQueryStep);
  return params;
}

BackwardParams dq_params(const DeviceProblem& device, const DeviceCall& call,
                         const BackwardArgs& args, const BackwardWorkspace& workspace,
                         const DeviceList& list) {
  BackwardParams params = backward_params(device, call, args, workspace, list,
                                          workspace.next_dq_item, stages::kQueryTile);
  params.k_transposed = columns_map(args.state.k, workspace.k_transposed, stages::kKeyTile);
  return params;
}

}  // namespace mxattn::kernels::sm90
