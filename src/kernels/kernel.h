// What a backend offers: supports(problem) says yes or why not, forward and backward run.
#pragma once

#include <cstdint>
#include <string>

#include "base/view.h"
#include "pack/pack.h"
#include "plan/plan.h"
#include "quantize/operand.h"
#include "recipe/recipe.h"

namespace mxattn::kernels {

using Bf16Bits = std::uint16_t;

/// A validated problem. heads_q is a multiple of heads_k; query head h reads key head
/// h / (heads_q / heads_k).
struct Problem {
  Recipe recipe;
  const Pack* pack = nullptr;
  Mask mask;
  int heads_q = 0;
  int heads_k = 0;
  int dim = 0;
  float softmax_scale = 0;
  bool rotate = false;  // Q and K were rotated by the quantiser; dQ and dK rotate back
  int threads = 1;
  bool sm90_accumulator = false;       // model the H200's FP8 accumulator bit for bit (CPU only)
  const plan::Plans* plans = nullptr;  // the backend's lists of this pack; null: it makes its own
};

/// Inputs and outputs of the forward. Every row of out and lse is written; rows outside documents
/// get 0 and -inf.
struct ForwardArgs {
  TensorView<const Bf16Bits> q, k, v;  // (total, heads, dim)
  State state;                         // operands filled by the quantiser; row statistics written
  TensorView<Bf16Bits> out;            // (total_q, heads_q, dim)
  float* lse = nullptr;                // (heads_q, total_q), natural logarithm
};

/// Inputs and outputs of the backward. Every row of dq, dk, dv is written; rows outside documents
/// get 0.
struct BackwardArgs {
  TensorView<const Bf16Bits> q, k, v, out, dout;
  const float* lse = nullptr;
  State state;
  TensorView<Bf16Bits> dq, dk, dv;
};

/// One way to run a problem. The reason is empty if it can, else one sentence. NOTE: supports() is
/// asked before the lengths are known: problem.pack is null there.
struct Backend {
  const char* name;
  std::string (*supports)(const Problem&);
  void (*forward)(const Problem&, const ForwardArgs&);
  void (*backward)(const Problem&, const BackwardArgs&);
  // Work lists for Problem::plans; null if the backend reads none.
  plan::Plans (*make_plans)(const Problem&) = nullptr;
};

}  // namespace mxattn::kernels
