#include "api/calls.h"

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "api/checks.h"
#include "api/devices.h"
#include "api/work_lists.h"
#include "base/error.h"
#include "pack/pack.h"
#include "quantize/quantize.h"
#include "recipe/roles.h"

namespace mxattn::api {
namespace {

using kernels::Bf16Bits;

constexpr const char* kQueryShape = "(total_q, heads_q, head_dim)";
constexpr const char* kKeyShape = "(total_k, heads_k, head_dim)";

/// Threads that a call may use, at most `wanted`. OpenMP keeps the team of a thread and waits for
/// it in the next call. A process forked from such a thread has no team to wait for, so that it
/// would wait for ever: there the thread works alone. Results are the same.
int usable_threads(int wanted) {
  static thread_local pid_t process_of_team = 0;
  if (wanted <= 1) return wanted;
  const pid_t process = getpid();
  if (process_of_team == 0) process_of_team = process;
  return process_of_team == process ? wanted : 1;
}

/// One call while it is being checked. Nothing is written before begin() has returned.
class Checker {
 public:
  Checker(const Problem& problem, const mxattn_call& call) : problem_(problem), call_(call) {
    require(call.reserved == 0, "call.reserved", call.reserved, "0");
    check_state(problem.state, call.state, call.num_state);
    if (problem.on_device() != nullptr) {
      device_call_ = check_device_call(
          problem, call.cu_seqlens_q, call.cu_seqlens_k, call.workspace, call.workspace_bytes,
          call.stream, call.plan == nullptr ? nullptr : &call.plan->lists, regions_);
      return;
    }
    require(call.stream == nullptr, "call.stream", call.stream, "null on the CPU");
    if (call.plan != nullptr) {
      take_lists(call.plan->lists);
      return;
    }
    const auto q =
        check_lengths("cu_seqlens_q", call.cu_seqlens_q, problem.num_documents, regions_);
    const auto k =
        call.cu_seqlens_k.data == nullptr
            ? q
            : check_lengths("cu_seqlens_k", call.cu_seqlens_k, problem.num_documents, regions_);
    own_pack_ = make_pack(q, k, problem.total_q, problem.total_k);
  }
  Checker(const Checker&) = delete;
  Checker& operator=(const Checker&) = delete;

  /// Announces the buffers of these operands (0: the row statistics) as read or written.
  void state(Access access, int operands, bool rows) {
    for (std::size_t i = 0; i < problem_.state.size(); ++i) {
      const StateBuffer& buffer = problem_.state[i];
      if (buffer.operand == 0 ? rows : (operands & buffer.operand) != 0) {
        regions_.add_bytes(std::string("state buffer ") + buffer.name, access, call_.state[i].data,
                           buffer.bytes);
      }
    }
  }

  void queries(const char* name, const mxattn_tensor& tensor, Access access,
               int dtype = MXATTN_BF16) {
    check_rows(name, tensor, dtype, problem_.total_q, problem_.kernel.heads_q, problem_.kernel.dim,
               kQueryShape, access, regions_);
  }
  void keys(const char* name, const mxattn_tensor& tensor, Access access, int dtype = MXATTN_BF16) {
    check_rows(name, tensor, dtype, problem_.total_k, problem_.kernel.heads_k, problem_.kernel.dim,
               kKeyShape, access, regions_);
  }
  void lse(const mxattn_tensor& tensor, Access access) {
    check_contiguous("lse", tensor, MXATTN_F32, {problem_.kernel.heads_q, problem_.total_q},
                     "(heads_q, total_q)", access, regions_);
  }

  /// The last checks; returns the problem with its pack, which lives as long as the checker. On a
  /// device the lengths are not known: there is no pack.
  kernels::Problem begin() {
    kernels::Problem kernel = problem_.kernel;
    if (problem_.on_device() != nullptr) {
      check_device_regions(problem_, regions_);
      return kernel;
    }
    regions_.check();
    kernel.pack = &pack();
    kernel.threads = usable_threads(kernel.threads);
    if (lists_ != nullptr and lists_->planned) kernel.plans = &lists_->plans;
    return kernel;
  }

  /// Views of tensors that the caller may have left out, in the shape that they must have.
  TensorView<const Bf16Bits> query_view(const mxattn_tensor& tensor) const {
    if (tensor.data != nullptr) return view_of<const Bf16Bits>(tensor);
    return {nullptr, problem_.total_q, problem_.kernel.heads_q, problem_.kernel.dim, 0, 0};
  }
  TensorView<const Bf16Bits> key_view(const mxattn_tensor& tensor) const {
    if (tensor.data != nullptr) return view_of<const Bf16Bits>(tensor);
    return {nullptr, problem_.total_k, problem_.kernel.heads_k, problem_.kernel.dim, 0, 0};
  }

  State bind() const {
    return bind_state(problem_.kernel, problem_.state, call_.state, problem_.device.q_slots(),
                      problem_.device.k_slots());
  }

  const kernels::DeviceCall& device_call() const { return device_call_; }

 private:
  const Pack& pack() const { return lists_ != nullptr ? lists_->pack : own_pack_; }

  /// Lengths and work come from the plan; lengths that the call names too must be the same.
  void take_lists(const WorkLists& lists) {
    check_made_for(lists, problem_);
    const auto same = [&](const char* name, const mxattn_tensor& tensor,
                          const std::vector<std::int32_t>& planned) {
      if (tensor.data == nullptr) return;
      const auto given = check_lengths(name, tensor, problem_.num_documents, regions_);
      const auto [here, there] = std::mismatch(given.begin(), given.end(), planned.begin());
      if (here == given.end()) return;
      require(false, detail::concat(name, "[", here - given.begin(), "]"), *here, *there,
              ", as call.plan was made with");
    };
    same("cu_seqlens_q", call_.cu_seqlens_q, lists.cu_seqlens_q);
    same("cu_seqlens_k", call_.cu_seqlens_k, lists.cu_seqlens_k);
    lists_ = &lists;
  }

  const Problem& problem_;
  const mxattn_call& call_;
  Regions regions_;
  Pack own_pack_;
  const WorkLists* lists_ = nullptr;
  kernels::DeviceCall device_call_;
};

const char* operand_name(int operand) {
  return operand == MXATTN_Q ? "q" : operand == MXATTN_K ? "k" : "v";
}

/// Checks the arguments of quantize and dequantize, which differ in what is read and written.
void check_operand(Checker& check, const Problem& problem, const mxattn_quantize_args& args,
                   int dtype, Access tensor, Access state) {
  require(args.operand == MXATTN_Q or args.operand == MXATTN_K or args.operand == MXATTN_V,
          "operand", args.operand, "MXATTN_Q (1), MXATTN_K (2) or MXATTN_V (4)");
  require(problem.kernel.recipe.quantised(), "recipe", problem.recipe->name,
          "one that quantises: this one has no operands");
  if (args.operand == MXATTN_Q) {
    check.queries("tensor", args.tensor, tensor, dtype);
  } else {
    check.keys("tensor", args.tensor, tensor, dtype);
  }
  check.state(state, args.operand, false);
}

struct Side {
  Role role;
  const Operand& operand;
};

Side side_of(const State& state, int operand) {
  if (operand == MXATTN_Q) return {Role::kQ, state.q};
  if (operand == MXATTN_K) return {Role::kK, state.k};
  return {Role::kV, state.v};
}

/// Quantises a tensor into its operand.
void fill(const kernels::Problem& kernel, const Side& side, const TensorView<const Bf16Bits>& x) {
  quantize(kernel.recipe, side.role, x, *kernel.pack, kernel.rotate, kernel.threads, side.operand);
}

}  // namespace

void forward(const Problem& problem, const mxattn_forward_args& args) {
  Checker check(problem, args.call);
  constexpr int kAll = MXATTN_Q | MXATTN_K | MXATTN_V;
  require(args.reserved == 0, "reserved", args.reserved, "0");
  require((args.quantized & ~kAll) == 0, "quantized", args.quantized,
          "a sum of MXATTN_Q (1), MXATTN_K (2) and MXATTN_V (4)");
  require(args.quantized == 0 or problem.kernel.recipe.quantised(), "quantized", args.quantized,
          "0 with a recipe that does not quantise");
  for (const auto& [operand, tensor] :
       {std::pair{MXATTN_Q, &args.q}, std::pair{MXATTN_K, &args.k}, std::pair{MXATTN_V, &args.v}}) {
    if ((args.quantized & operand) != 0 and tensor->data == nullptr) continue;
    if (operand == MXATTN_Q) {
      check.queries("q", *tensor, Access::kRead);
    } else {
      check.keys(operand_name(operand), *tensor, Access::kRead);
    }
  }
  check.queries("out", args.out, Access::kWrite);
  check.lse(args.lse, Access::kWrite);
  check.state(Access::kWrite, kAll & ~args.quantized, true);
  check.state(Access::kRead, args.quantized, false);

  const kernels::Problem kernel = check.begin();
  const kernels::ForwardArgs run{.q = check.query_view(args.q),
                                 .k = check.key_view(args.k),
                                 .v = check.key_view(args.v),
                                 .state = check.bind(),
                                 .out = view_of<Bf16Bits>(args.out),
                                 .lse = static_cast<float*>(args.lse.data)};
  if (problem.on_device() != nullptr) {
    const CurrentDevice current(problem.device_index);
    problem.on_device()->forward(problem.device, check.device_call(), run,
                                 {.q = (args.quantized & MXATTN_Q) != 0,
                                  .k = (args.quantized & MXATTN_K) != 0,
                                  .v = (args.quantized & MXATTN_V) != 0});
    return;
  }
  if (kernel.recipe.quantised()) {
    for (const auto& [operand, x] :
         {std::pair{MXATTN_Q, &run.q}, std::pair{MXATTN_K, &run.k}, std::pair{MXATTN_V, &run.v}}) {
      if ((args.quantized & operand) == 0) fill(kernel, side_of(run.state, operand), *x);
    }
  }
  problem.run().forward(kernel, run);
}

void backward(const Problem& problem, const mxattn_backward_args& args) {
  Checker check(problem, args.call);
  // A recipe that quantises reads q, k, v from the state.
  const bool optional = problem.kernel.recipe.quantised();
  if (not(optional and args.q.data == nullptr)) check.queries("q", args.q, Access::kRead);
  if (not(optional and args.k.data == nullptr)) check.keys("k", args.k, Access::kRead);
  if (not(optional and args.v.data == nullptr)) check.keys("v", args.v, Access::kRead);
  check.queries("out", args.out, Access::kRead);
  check.lse(args.lse, Access::kRead);
  check.queries("dout", args.dout, Access::kRead);
  check.queries("dq", args.dq, Access::kWrite);
  check.keys("dk", args.dk, Access::kWrite);
  check.keys("dv", args.dv, Access::kWrite);
  check.state(Access::kRead, MXATTN_Q | MXATTN_K | MXATTN_V, true);

  const kernels::Problem kernel = check.begin();
  const kernels::BackwardArgs run{.q = check.query_view(args.q),
                                  .k = check.key_view(args.k),
                                  .v = check.key_view(args.v),
                                  .out = view_of<const Bf16Bits>(args.out),
                                  .dout = view_of<const Bf16Bits>(args.dout),
                                  .lse = static_cast<const float*>(args.lse.data),
                                  .state = check.bind(),
                                  .dq = view_of<Bf16Bits>(args.dq),
                                  .dk = view_of<Bf16Bits>(args.dk),
                                  .dv = view_of<Bf16Bits>(args.dv)};
  if (problem.on_device() != nullptr) {
    const CurrentDevice current(problem.device_index);
    problem.on_device()->backward(problem.device, check.device_call(), run);
    return;
  }
  problem.run().backward(kernel, run);
}

void quantize_operand(const Problem& problem, const mxattn_quantize_args& args) {
  Checker check(problem, args.call);
  require(args.rotate_back == 0, "rotate_back", args.rotate_back, "0 when quantising");
  check_operand(check, problem, args, MXATTN_BF16, Access::kRead, Access::kWrite);
  const kernels::Problem kernel = check.begin();
  const State state = check.bind();
  const Side side = side_of(state, args.operand);
  const auto x = view_of<const Bf16Bits>(args.tensor);
  if (problem.on_device() != nullptr) {
    const CurrentDevice current(problem.device_index);
    problem.on_device()->quantize(problem.device, check.device_call(), side.role, x, side.operand);
    return;
  }
  fill(kernel, side, x);
}

void dequantize_operand(const Problem& problem, const mxattn_quantize_args& args) {
  Checker check(problem, args.call);
  require(args.rotate_back == 0 or args.rotate_back == 1, "rotate_back", args.rotate_back,
          "0 or 1");
  check_operand(check, problem, args, MXATTN_F32, Access::kWrite, Access::kRead);
  const kernels::Problem kernel = check.begin();
  const State state = check.bind();
  const Side side = side_of(state, args.operand);
  const bool rotate_back =
      args.rotate_back == 1 and is_rotated(side.role, kernel.dim, kernel.rotate);
  if (problem.on_device() != nullptr) {
    const CurrentDevice current(problem.device_index);
    problem.on_device()->restore(problem.device, check.device_call(), side.role, side.operand,
                                 rotate_back, view_of<float>(args.tensor));
    return;
  }
  restore(side.operand, side.role, *kernel.pack, rotate_back, kernel.threads,
          view_of<float>(args.tensor));
}

}  // namespace mxattn::api
