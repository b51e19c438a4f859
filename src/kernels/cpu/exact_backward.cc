// Backward: a pass that owns query tiles (dQ) and a pass that owns key tiles (dK, dV).
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/cpu/exact_block.h"
#include "kernels/cpu/exact_gradient.h"
#include "kernels/cpu/exact_passes.h"
#include "recipe/roles.h"

namespace mxattn::kernels::exact {
namespace {

/// Normalised Walsh-Hadamard matrix times a row; its own inverse.
void rotate(double* row, int dim) {
  for (int stride = 1; stride < dim; stride *= 2) {
    for (int c = 0; c < dim; ++c) {
      if ((c & stride) != 0) continue;
      const double a = row[c], b = row[c + stride];
      row[c] = a + b;
      row[c + stride] = a - b;
    }
  }
  const double norm = 1 / std::sqrt(static_cast<double>(dim));
  for (int c = 0; c < dim; ++c) row[c] *= norm;
}

/// A gradient tensor on its way out. With scaled E4M3 outputs it is kept until its largest
/// magnitude is known.
class Output {
 public:
  Output(const Problem& problem, const TensorView<Bf16Bits>& tensor, bool of_scores)
      : problem_(problem), tensor_(tensor), of_scores_(of_scores) {
    if (problem.recipe.output == Element::kE4m3) {
      kept_.resize(static_cast<std::size_t>(tensor.tokens * tensor.heads * tensor.dim));
    }
  }

  /// Takes a finished sum; `row` is used as workspace.
  void put(std::int64_t token, int head, double* row) {
    const int dim = problem_.dim;
    if (of_scores_) {
      for (int c = 0; c < dim; ++c) row[c] *= problem_.softmax_scale;
      if (problem_.recipe.quantised() and is_rotated(Role::kQ, dim, problem_.rotate)) {
        rotate(row, dim);
      }
    }
    if (kept_.empty()) {
      std::transform(row, row + dim, tensor_.row(token, head), double_to_bf16);
    } else {
      std::copy_n(row, dim, kept(token, head));
    }
  }

  /// Rows that no item owns, from `end` on, and the rounding of what was kept.
  void finish(std::int64_t end) {
    double most = 0;
    for (const double x : kept_) most = std::max(most, std::abs(x));
    const double scale = most > 0 ? most / E4M3::kMax : 1.0;
    for (int head = 0; head < tensor_.heads; ++head) {
      for (std::int64_t token = 0; token < end and not kept_.empty(); ++token) {
        std::transform(kept(token, head), kept(token, head) + problem_.dim,
                       tensor_.row(token, head),
                       [=](double x) { return double_to_bf16(round_e4m3(x / scale) * scale); });
      }
      for (std::int64_t token = end; token < tensor_.tokens; ++token) {
        std::fill_n(tensor_.row(token, head), problem_.dim, Bf16Bits{0});
      }
    }
  }

 private:
  double* kept(std::int64_t token, int head) {
    return &kept_[static_cast<std::size_t>((token * tensor_.heads + head) * problem_.dim)];
  }

  const Problem& problem_;
  TensorView<Bf16Bits> tensor_;
  bool of_scores_;  // dQ and dK: softmax scale and rotation
  std::vector<double> kept_;
};

/// Longest chunk: those behind the first three are equal.
constexpr int kMaxChunk = stages::chunk_end(3) - stages::chunk_begin(3);

/// Buffers of a thread.
struct Scratch {
  explicit Scratch(int dim)
      : q(dim), k(dim), v(dim), g(dim), first(kTile * dim), second(kTile * dim) {}

  Tile q, k, v, g;
  Block block;
  QueryRow query[kTile];
  Exponent ek[kTile], ev[kTile];
  std::vector<double> first, second;  // sums of the item: dQ, or dK and dV
  Exponent running_norm[kMaxChunk];   // maximum of nV over a chunk up to a key
};

/// What both passes share about one (document, query head).
struct Pass {
  Pass(const Problem& problem, const BackwardArgs& args, const Gradient& gradient,
       int document_index, int head)
      : problem(problem),
        recipe(problem.recipe),
        document(problem.pack->documents[static_cast<std::size_t>(document_index)]),
        document_index(document_index),
        head(head),
        key_head(head / (problem.heads_q / problem.heads_k)),
        folded(recipe.gradient == GradientOperand::kDividedByL),
        gradient(gradient),
        q(args.state.q, args.q, head, document.q_slot, document.q_token, problem.dim),
        k(args.state.k, args.k, key_head, document.k_slot, document.k_token, problem.dim),
        v(args.state.v, args.v, key_head, document.k_slot, document.k_token, problem.dim),
        g(gradient.rows(document, head)),
        scale(problem, q, k) {}

  void load_queries(Scratch& s, int first, int count) const {
    s.q.load(q, first, count);
    s.g.load(g, first, count);
    for (int i = 0; i < count; ++i) s.query[i] = gradient.query(document, head, first + i);
  }
  void load_keys(Scratch& s, int first, int count) const {
    s.k.load(k, first, count);
    s.v.load(v, first, count);
    for (int j = 0; j < count; ++j) {
      s.ek[j] = k.exponent(first + j);
      s.ev[j] = v.exponent(first + j);
    }
  }

  /// Plain gradient: p normalised, dP restored, D as it is.
  Terms plain_terms(const QueryRow& query, Exponent ek, Exponent ev) const {
    return {scale.factor(query.eq, ek), query.addend,
            stages::factor(query.eg + ev) * g.scale() * v.scale(), query.delta};
  }
  DsRounding ds_rounding(int row_step, double ds_tensor_scale) const {
    int step = kTile;
    if (recipe.ds_scale == DsScale::kRow) step = row_step;
    if (recipe.ds_scale == DsScale::kBlock32) step = stages::kBlockTokens;
    return {recipe.ds_scale, recipe.probability, step, ds_tensor_scale};
  }

  const Problem& problem;
  const Recipe& recipe;
  const Document& document;
  const int document_index, head, key_head;
  const bool folded;  // GradientOperand::kDividedByL: scales are folded into p and dS
  const Gradient& gradient;
  const Rows q, k, v, g;
  const ScoreScale scale;
};

// ---- dQ ---------------------------------------------------------------------------------------

/// One query tile against its key tiles, ascending.
class DqItem {
 public:
  DqItem(const Pass& pass, const plan::WorkItem& item, Scratch& scratch)
      : pass_(pass), first_(item.first), count_(item.count), s_(scratch) {}

  /// Calls visit(key tile) with the block of p and dS filled.
  template <class Visit>
  void run(Visit visit) {
    pass_.load_queries(s_, first_, count_);
    const int tiles = (pass_.document.k_len + kTile - 1) / kTile;
    int chunk = -1;
    for (int tile = 0; tile < tiles; ++tile) {
      const int first = tile * kTile;
      const int count = std::min(kTile, pass_.document.k_len - first);
      if (not s_.block.begin(count_, [&](int i) { return local(keys(i), first, count); })) continue;
      if (pass_.folded and stages::chunk_of(first) != chunk) {
        chunk = stages::chunk_of(first);
        enter_chunk(chunk);
      }
      pass_.load_keys(s_, first, count);
      s_.block.fill(s_.q, s_.k, s_.g, s_.v, [&](int i, int j) { return terms(i, j); });
      visit();
    }
  }

  void add_dq(double ds_tensor_scale) {
    const DsRounding rounding = pass_.ds_rounding(kTile, ds_tensor_scale);
    const bool per_step = rounding.scale == DsScale::kBlock32;
    s_.block.add_ds(s_.first.data(), s_.k.rows.data(), pass_.problem.dim, rounding, pass_.k.scale(),
                    [&](int i, int j) { return per_step ? s_.ek[j] : r_[i]; });
  }

 private:
  Range keys(int i) const { return keys_of(pass_.problem, pass_.document, first_ + i); }

  // r_i of the chunk for every row that sees a key of it; other rows keep what they have.
  void enter_chunk(int chunk) {
    const int begin = stages::chunk_begin(chunk);
    const int end = std::min(stages::chunk_end(chunk), pass_.document.k_len);
    for (int j = begin; j < end; ++j) {
      const Exponent nv = pass_.v.norm(j);
      s_.running_norm[j - begin] = j == begin ? nv : max(s_.running_norm[j - begin - 1], nv);
    }
    for (int i = 0; i < count_; ++i) {
      Range range = keys(i);
      range = {std::max(range.begin, begin), std::min(range.end, end)};
      if (range.empty()) continue;
      Exponent ek = pass_.k.exponent(range.begin);
      for (int j = range.begin + 1; j < range.end; ++j) ek = max(ek, pass_.k.exponent(j));
      r_[i] = stages::ds_exponent_dq(s_.query[i].ng, s_.query[i].no,
                                     s_.running_norm[range.end - 1 - begin], ek);
    }
  }

  Terms terms(int i, int j) const {
    const QueryRow& query = s_.query[i];
    const Exponent ek = s_.ek[j], ev = s_.ev[j];
    if (not pass_.folded) return pass_.plain_terms(query, ek, ev);
    return {pass_.scale.factor(query.eq, ek),
            addend_of(stages::dq_addend(query.mu, query.eg, ev, ek, r_[i])), 1,
            stages::dq_delta(static_cast<float>(query.delta), query.eg, ev)};
  }

  const Pass& pass_;
  const int first_, count_;
  Scratch& s_;
  Exponent r_[kTile];
};

// ---- dK and dV --------------------------------------------------------------------------------

/// One key tile against the query tiles of one head of its group, ascending.
class DkvItem {
 public:
  DkvItem(const Pass& pass, const plan::WorkItem& item, Scratch& scratch)
      : pass_(pass), first_(item.first), count_(item.count), s_(scratch) {}

  void run(double ds_tensor_scale) {
    pass_.load_keys(s_, first_, count_);
    Exponent nv;
    if (pass_.folded) {
      nv = pass_.v.norm(first_);
      for (int j = 1; j < count_; ++j) nv = max(nv, pass_.v.norm(first_ + j));
    }
    const int tiles = (pass_.document.q_len + kTile - 1) / kTile;
    for (int tile = 0; tile < tiles; ++tile) {
      const QueryTileScales& scales = pass_.gradient.tile(pass_.document_index, pass_.head, tile);
      const int first = tile * kTile;
      const int count = std::min(kTile, pass_.document.q_len - first);
      if (not scales.live) continue;
      if (not s_.block.begin(count_, [&](int j) { return local(queries(j), first, count); })) {
        continue;
      }
      pass_.load_queries(s_, first, count);
      c_ = scales.scales.c;
      r_ = pass_.folded ? stages::ds_exponent_dk(scales.scales, nv) : Exponent(0);
      if (pass_.folded) fold_deltas(count);
      s_.block.fill(s_.k, s_.q, s_.v, s_.g, [&](int j, int i) { return terms(j, i); });
      add(ds_tensor_scale);
    }
  }

 private:
  Range queries(int j) const {
    return visible_queries(pass_.problem.mask, pass_.document.q_len, pass_.document.k_len,
                           first_ + j);
  }

  void fold_deltas(int count) {
    for (int i = 0; i < count; ++i) {
      QueryRow& query = s_.query[i];
      query.delta = stages::dkv_delta<Fp64Ops>(
          query.delta, stages::dkv_delta_factor(c_, query.eg, query.eq, r_));
    }
  }

  Terms terms(int j, int i) const {
    const QueryRow& query = s_.query[i];
    const Exponent ek = s_.ek[j], ev = s_.ev[j];
    if (not pass_.folded) return pass_.plain_terms(query, ek, ev);
    return {pass_.scale.factor(query.eq, ek), addend_of(stages::dkv_addend(query.mu, query.eg, c_)),
            stages::dkv_gradient_factor(c_, ev, query.eq, r_), query.delta};
  }

  void add(double ds_tensor_scale) {
    // dV from the codes of P. A folded p carries 2^(8 + eG - c) already.
    const int dim = pass_.problem.dim;
    const ProbabilityScale p_scale = probability_scale(pass_.recipe, stages::kTensorBackwardPScale);
    const double to_dv = stages::factor(c_ - p_scale.shift) / p_scale.multiplier * pass_.g.scale();
    s_.block.add_weights(
        s_.second.data(), s_.g.rows.data(), dim, pass_.recipe.probability, to_dv, [&](int i) {
          if (pass_.folded) return 1.0;
          return p_scale.multiplier *
                 static_cast<double>(stages::factor(s_.query[i].eg - c_ + p_scale.shift));
        });

    // dK from the codes of dS, which come from the unrounded p.
    const DsRounding rounding = pass_.ds_rounding(stages::kQueryStep, ds_tensor_scale);
    const bool per_step = rounding.scale == DsScale::kBlock32;
    s_.block.add_ds(s_.first.data(), s_.q.rows.data(), dim, rounding, pass_.q.scale(),
                    [&](int, int i) { return per_step ? s_.query[i].eq : r_; });
  }

  const Pass& pass_;
  const int first_, count_;
  Scratch& s_;
  Exponent c_, r_;
};

}  // namespace

void backward(const Problem& problem, const BackwardArgs& args) {
  Gradient gradient(problem, args);
  std::vector<Scratch> scratches(static_cast<std::size_t>(num_threads(problem)),
                                 Scratch(problem.dim));
  const auto scratch_of = [&](int thread) -> Scratch& {
    return scratches[static_cast<std::size_t>(thread)];
  };

  // D of exact attention, as the row sums of p dP.
  if (problem.recipe.operand == Element::kNone) {
    for_each_item(problem, plan::Pass::kDq, [&](int thread, const plan::WorkItem& item) {
      Scratch& s = scratch_of(thread);
      double delta[kTile] = {};
      const Pass pass(problem, args, gradient, item.document, item.head);
      DqItem(pass, item, s).run([&] { s.block.add_row_sums(delta); });
      for (int i = 0; i < item.count; ++i) {
        gradient.set_delta(pass.document.q_token + item.first + i, item.head, delta[i]);
      }
    });
  }

  // DsScale::kTensor: the largest |dS| of the whole tensor, before anything is rounded with it.
  double ds_tensor_scale = 1;
  if (problem.recipe.ds_scale == DsScale::kTensor) {
    std::vector<double> most(scratches.size(), 0.0);
    for_each_item(problem, plan::Pass::kDq, [&](int thread, const plan::WorkItem& item) {
      Scratch& s = scratch_of(thread);
      double& mine = most[static_cast<std::size_t>(thread)];
      const Pass pass(problem, args, gradient, item.document, item.head);
      DqItem(pass, item, s).run([&] { mine = std::max(mine, s.block.max_ds()); });
    });
    const double amax = *std::max_element(most.begin(), most.end());
    if (amax > 0) ds_tensor_scale = amax / E4M3::kMax;
  }

  Output dq(problem, args.dq, true), dk(problem, args.dk, true), dv(problem, args.dv, false);
  const int dim = problem.dim;
  for_each_item(problem, plan::Pass::kDq, [&](int thread, const plan::WorkItem& item) {
    Scratch& s = scratch_of(thread);
    std::fill(s.first.begin(), s.first.end(), 0.0);
    const Pass pass(problem, args, gradient, item.document, item.head);
    DqItem work(pass, item, s);
    work.run([&] { work.add_dq(ds_tensor_scale); });
    for (int i = 0; i < item.count; ++i) {
      dq.put(pass.document.q_token + item.first + i, item.head, &s.first[i * dim]);
    }
  });
  for_each_item(problem, plan::Pass::kDkv, [&](int thread, const plan::WorkItem& item) {
    Scratch& s = scratch_of(thread);
    std::fill(s.first.begin(), s.first.end(), 0.0);
    std::fill(s.second.begin(), s.second.end(), 0.0);
    const int group = problem.heads_q / problem.heads_k;
    for (int head = item.head * group; head < (item.head + 1) * group; ++head) {
      const Pass pass(problem, args, gradient, item.document, head);
      DkvItem(pass, item, s).run(ds_tensor_scale);
    }
    const Document& document = problem.pack->documents[static_cast<std::size_t>(item.document)];
    for (int j = 0; j < item.count; ++j) {
      const std::int64_t token = document.k_token + item.first + j;
      dk.put(token, item.head, &s.first[j * dim]);
      dv.put(token, item.head, &s.second[j * dim]);
    }
  });

  const Document last = problem.pack->documents.back();
  dq.finish(last.q_token + last.q_len);
  dk.finish(last.k_token + last.k_len);
  dv.finish(last.k_token + last.k_len);
}

}  // namespace mxattn::kernels::exact
