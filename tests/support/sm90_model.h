// The CPU's model of the Hopper backend for one AttentionCase: operands, forward, and the backward
// from row statistics that somebody else computed.
#pragma once

#include <algorithm>
#include <thread>
#include <vector>

#include "kernels/cpu/faithful.h"
#include "quantize/quantize.h"
#include "support/attention_case.h"

namespace mxattn::test {

class Sm90Model {
 public:
  explicit Sm90Model(const AttentionCase& test)
      : test_(test),
        // A machine that is lent in part may name more threads than it gives.
        threads_(static_cast<int>(std::clamp(std::thread::hardware_concurrency(), 1u, 16u))),
        problem_(test.problem(threads_)),
        q_(problem_.recipe, problem_.heads_q, test.pack().q_slots, problem_.dim),
        k_(problem_.recipe, problem_.heads_k, test.pack().k_slots, problem_.dim),
        v_(problem_.recipe, problem_.heads_k, test.pack().k_slots, problem_.dim) {
    problem_.sm90_accumulator = true;
    const Pack& pack = test.pack();
    quantize(problem_.recipe, Role::kQ, queries(test.q), pack, problem_.rotate, threads_, q());
    quantize(problem_.recipe, Role::kK, keys(test.k), pack, problem_.rotate, threads_, k());
    quantize(problem_.recipe, Role::kV, keys(test.v), pack, problem_.rotate, threads_, v());
  }

  const Operand& q() const { return q_.operand(); }
  const Operand& k() const { return k_.operand(); }
  const Operand& v() const { return v_.operand(); }

  /// out, lse and row statistics.
  Result forward() const {
    Result r = blank();
    kernels::faithful_backend().forward(problem_, {.q = queries(test_.q),
                                                   .k = keys(test_.k),
                                                   .v = keys(test_.v),
                                                   .state = state(r),
                                                   .out = queries(r.out),
                                                   .lse = r.lse.data()});
    return r;
  }

  /// Codes and what else is prepared from out and row statistics of `given`.
  struct Gradient {
    std::vector<std::uint8_t> codes;
    std::vector<std::int8_t> exponents, norms, output_norms;
    std::vector<float> delta;
  };
  Gradient gradient(const Result& given) const {
    const auto rows = static_cast<std::size_t>(problem_.heads_q * test_.pack().q_slots);
    Gradient x;
    x.codes.resize(rows * static_cast<std::size_t>(problem_.dim));
    x.exponents.resize(rows);
    x.norms.resize(rows);
    x.output_norms.resize(rows);
    x.delta.resize(rows);
    prepare_gradient(problem_.recipe, problem_.mask, queries(given.out), queries(test_.dout),
                     given.row_sum.data(), test_.pack(), threads_,
                     {.g = {.codes = x.codes.data(),
                            .exponents = x.exponents.data(),
                            .norms = x.norms.data(),
                            .scale = nullptr,
                            .slots = test_.pack().q_slots,
                            .heads = problem_.heads_q,
                            .dim = problem_.dim},
                      .output_norms = x.output_norms.data(),
                      .delta = x.delta.data()});
    return x;
  }

  /// dq, dk and dv from out, lse and row statistics of `given`.
  Result backward(const Result& given) const {
    Result r = given;
    r.dq.assign(r.dq.size(), 0x7fff);
    r.dk.assign(r.dk.size(), 0x7fff);
    r.dv.assign(r.dv.size(), 0x7fff);
    kernels::faithful_backend().backward(problem_, {.q = queries(test_.q),
                                                    .k = keys(test_.k),
                                                    .v = keys(test_.v),
                                                    .out = queries(given.out),
                                                    .dout = queries(test_.dout),
                                                    .lse = given.lse.data(),
                                                    .state = state(r),
                                                    .dq = queries(r.dq),
                                                    .dk = keys(r.dk),
                                                    .dv = keys(r.dv)});
    return r;
  }

 private:
  Result blank() const {
    Result r;
    r.out.assign(test_.q_size(), 0x7fff);
    const auto rows = static_cast<std::size_t>(problem_.heads_q * test_.pack().total_q);
    r.lse.assign(rows, kNan);
    r.row_reference.assign(rows, -1);
    r.row_sum.assign(rows, kNan);
    return r;
  }
  State state(Result& r) const {
    return {.q = q(),
            .k = k(),
            .v = v(),
            .row_reference = r.row_reference.data(),
            .row_sum = r.row_sum.data()};
  }
  template <class T>
  TensorView<T> view(T* data, std::int64_t tokens, int heads) const {
    return {data, tokens, heads, problem_.dim, std::int64_t{heads} * problem_.dim, problem_.dim};
  }
  TensorView<const std::uint16_t> queries(const Bf16Vector& x) const {
    return view(x.data(), test_.pack().total_q, problem_.heads_q);
  }
  TensorView<const std::uint16_t> keys(const Bf16Vector& x) const {
    return view(x.data(), test_.pack().total_k, problem_.heads_k);
  }
  TensorView<std::uint16_t> queries(Bf16Vector& x) const {
    return view(x.data(), test_.pack().total_q, problem_.heads_q);
  }
  TensorView<std::uint16_t> keys(Bf16Vector& x) const {
    return view(x.data(), test_.pack().total_k, problem_.heads_k);
  }

  const AttentionCase& test_;
  int threads_;
  kernels::Problem problem_;
  OwnedOperand q_, k_, v_;
};

}  // namespace mxattn::test
