// Attention problems for tests: owns tensors, packs, quantises and runs any Backend.
//
//   AttentionCase test({.recipe = recipes::fp8, .q_lens = {200, 400}});
//   fill_normal(test, 1);                        // support/inputs.h, also hard_cases()
//   const Result a = test.run(exact_backend());
//   const Exact b = textbook(test);              // support/textbook.h
//   cosine(a.dq, b.dq);
//
// Tensors are contiguous, (tokens, heads, dim). Outputs start as NaN, so that a row nobody wrote is
// seen. A test includes this file from the room it tests: kernels and quantize must be linked.
#pragma once

#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "formats/bf16.h"
#include "kernels/kernel.h"
#include "quantize/quantize.h"
#include "recipe/registry.h"

namespace mxattn::test {

using Bf16Vector = std::vector<std::uint16_t>;

/// What a test chooses.
struct CaseSpec {
  Recipe recipe = recipes::fp8;
  std::vector<int> q_lens;
  std::vector<int> k_lens = {};  // empty: as q_lens
  int heads_q = 1;
  int heads_k = 1;
  int dim = 128;
  Mask mask = {.causal = true};
  int spare = 0;                    // rows behind the last document, of queries and of keys
  float softmax_scale = 0;          // 0: 1 / sqrt(dim)
  bool rotate = true;               // where the recipe does
  bool rotation_requested = false;  // also where it does not by itself
  bool sm90_accumulator = false;
};

/// Everything a run writes. Indices as in kernels/kernel.h.
struct Result {
  Bf16Vector out, dq, dk, dv;
  std::vector<float> lse;
  std::vector<std::int32_t> row_reference;
  std::vector<float> row_sum;

  bool operator==(const Result&) const = default;  // NOTE: false where lse holds NaN
};

/// Buffers of an operand.
class OwnedOperand {
 public:
  OwnedOperand(const Recipe& recipe, int heads, std::int64_t slots, int dim) {
    if (not recipe.quantised()) return;
    const auto rows = static_cast<std::size_t>(heads * slots);
    const bool tensor = recipe.scale_group == ScaleGroup::kTensor;
    codes_.resize(rows * static_cast<std::size_t>(dim));
    exponents_.resize(rows);
    norms_.resize(rows);
    operand_ = {.codes = codes_.data(),
                .exponents = exponents_.data(),
                .norms = tensor ? nullptr : norms_.data(),
                .scale = tensor ? &scale_ : nullptr,
                .slots = slots,
                .heads = heads,
                .dim = dim};
  }
  OwnedOperand(const OwnedOperand&) = delete;
  OwnedOperand& operator=(const OwnedOperand&) = delete;
  const Operand& operand() const { return operand_; }

 private:
  std::vector<std::uint8_t> codes_;
  std::vector<std::int8_t> exponents_, norms_;
  float scale_ = 1;
  Operand operand_;
};

class AttentionCase {
 public:
  explicit AttentionCase(CaseSpec spec) : spec_(std::move(spec)) {
    if (spec_.k_lens.empty()) spec_.k_lens = spec_.q_lens;
    if (spec_.softmax_scale == 0) {
      spec_.softmax_scale = 1 / std::sqrt(static_cast<float>(spec_.dim));
    }
    const std::vector<std::int32_t> cu_q = offsets(spec_.q_lens), cu_k = offsets(spec_.k_lens);
    pack_ = make_pack(cu_q, cu_k, cu_q.back() + spec_.spare, cu_k.back() + spec_.spare);
    q.resize(q_size());
    k.resize(k_size());
    v.resize(k_size());
    dout.resize(q_size());
  }

  const CaseSpec& spec() const { return spec_; }
  const Pack& pack() const { return pack_; }
  std::size_t q_size() const { return size_of(pack_.total_q, spec_.heads_q); }
  std::size_t k_size() const { return size_of(pack_.total_k, spec_.heads_k); }

  /// Position of a row's first channel in q, dout and outputs of queries (or of keys).
  std::size_t q_at(std::int64_t token, int head = 0) const {
    return at(token, head, spec_.heads_q);
  }
  std::size_t k_at(std::int64_t token, int head = 0) const {
    return at(token, head, spec_.heads_k);
  }

  /// The problem for kernels.
  kernels::Problem problem(int threads = 1) const {
    return {
        .recipe = spec_.recipe,
        .pack = &pack_,
        .mask = spec_.mask,
        .heads_q = spec_.heads_q,
        .heads_k = spec_.heads_k,
        .dim = spec_.dim,
        .softmax_scale = spec_.softmax_scale,
        .rotate = spec_.rotate and (spec_.rotation_requested or spec_.recipe.rotates(spec_.dim)),
        .threads = threads,
        .sm90_accumulator = spec_.sm90_accumulator};
  }

  /// Quantises and runs forward and backward. Outputs start as NaN.
  Result run(const kernels::Backend& backend, int threads = 1) const {
    const kernels::Problem problem = this->problem(threads);
    const Recipe& recipe = spec_.recipe;
    const TensorView<const std::uint16_t> q_view = view(q.data(), pack_.total_q, spec_.heads_q),
                                          k_view = view(k.data(), pack_.total_k, spec_.heads_k),
                                          v_view = view(v.data(), pack_.total_k, spec_.heads_k);
    const OwnedOperand q_operand(recipe, spec_.heads_q, pack_.q_slots, spec_.dim),
        k_operand(recipe, spec_.heads_k, pack_.k_slots, spec_.dim),
        v_operand(recipe, spec_.heads_k, pack_.k_slots, spec_.dim);
    if (recipe.quantised()) {
      quantize(recipe, Role::kQ, q_view, pack_, problem.rotate, threads, q_operand.operand());
      quantize(recipe, Role::kK, k_view, pack_, problem.rotate, threads, k_operand.operand());
      quantize(recipe, Role::kV, v_view, pack_, problem.rotate, threads, v_operand.operand());
    }

    constexpr std::uint16_t kPoison = 0x7fff;
    Result result;
    result.out.assign(q_size(), kPoison);
    result.dq.assign(q_size(), kPoison);
    result.dk.assign(k_size(), kPoison);
    result.dv.assign(k_size(), kPoison);
    const auto rows = static_cast<std::size_t>(pack_.total_q * spec_.heads_q);
    result.lse.assign(rows, kNan);
    result.row_reference.assign(rows, -1);
    result.row_sum.assign(rows, kNan);
    const State state{.q = q_operand.operand(),
                      .k = k_operand.operand(),
                      .v = v_operand.operand(),
                      .row_reference = result.row_reference.data(),
                      .row_sum = result.row_sum.data()};
    backend.forward(problem, {.q = q_view,
                              .k = k_view,
                              .v = v_view,
                              .state = state,
                              .out = view(result.out.data(), pack_.total_q, spec_.heads_q),
                              .lse = result.lse.data()});
    const std::uint16_t* out = result.out.data();
    backend.backward(problem, {.q = q_view,
                               .k = k_view,
                               .v = v_view,
                               .out = view(out, pack_.total_q, spec_.heads_q),
                               .dout = view(dout.data(), pack_.total_q, spec_.heads_q),
                               .lse = result.lse.data(),
                               .state = state,
                               .dq = view(result.dq.data(), pack_.total_q, spec_.heads_q),
                               .dk = view(result.dk.data(), pack_.total_k, spec_.heads_k),
                               .dv = view(result.dv.data(), pack_.total_k, spec_.heads_k)});
    return result;
  }

  // Inputs, (total, heads, dim), to be filled by the test; zero at first.
  Bf16Vector q, k, v, dout;

 private:
  static std::vector<std::int32_t> offsets(const std::vector<int>& lens) {
    std::vector<std::int32_t> cu(lens.size() + 1, 0);
    std::partial_sum(lens.begin(), lens.end(), cu.begin() + 1);
    return cu;
  }
  std::size_t size_of(std::int64_t tokens, int heads) const {
    return static_cast<std::size_t>(tokens * heads * spec_.dim);
  }
  std::size_t at(std::int64_t token, int head, int heads) const {
    return static_cast<std::size_t>((token * heads + head) * spec_.dim);
  }
  template <class T>
  TensorView<T> view(T* data, std::int64_t tokens, int heads) const {
    return {.data = data,
            .tokens = tokens,
            .heads = heads,
            .dim = spec_.dim,
            .token_stride = std::int64_t{heads} * spec_.dim,
            .head_stride = spec_.dim};
  }

  CaseSpec spec_;
  Pack pack_;
};

// ---- comparing --------------------------------------------------------------------------------

inline double value_of(std::uint16_t bits) { return bf16_to_float(bits); }
inline double value_of(double x) { return x; }

/// Cosine of two tensors, over all heads.
template <class A, class B>
double cosine(const std::vector<A>& a, const std::vector<B>& b) {
  double ab = 0, aa = 0, bb = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double x = value_of(a[i]), y = value_of(b[i]);
    ab += x * y;
    aa += x * x;
    bb += y * y;
  }
  return ab / std::sqrt(aa * bb);
}

/// The inputs of a case under another specification of the same shapes.
inline AttentionCase with_spec(const AttentionCase& test, const CaseSpec& spec) {
  AttentionCase other(spec);
  other.q = test.q;
  other.k = test.k;
  other.v = test.v;
  other.dout = test.dout;
  return other;
}

/// The inputs of a case under another recipe.
inline AttentionCase with_recipe(const AttentionCase& test, const Recipe& recipe) {
  CaseSpec spec = test.spec();
  spec.recipe = recipe;
  return with_spec(test, spec);
}

/// The recipes that a backend runs, in the order of the registry.
inline std::vector<RecipeInfo> supported_recipes(const kernels::Backend& backend) {
  std::vector<RecipeInfo> supported;
  for (const RecipeInfo& info : all_recipes()) {
    const AttentionCase test({.recipe = info.recipe, .q_lens = {1}});
    if (backend.supports(test.problem()).empty()) supported.push_back(info);
  }
  return supported;
}

}  // namespace mxattn::test
