// The dQ pass: one item is up to kMaxUnits query tiles of a head against the key tiles they see,
// ascending. For each key tile and query tile, 32 rows at a time:
//
//   S = cQ cK^T, dP = cG cV^T          fresh products
//   dS 2^(EK - r) = 2^(S a - mu + eG + EV + EK - r) (dP - D''),  D'' = D 2^-(eG + EV)
//   A += round(dS 2^(EK - r)) cK       in place; dQ = sum of 2^r A
//
// r is one exponent of a row and a chunk of keys; A is rescaled when it changes and promoted into
// the FP32 sum at fixed places. With DsScale::kRow the exponent is one of the row and key tile,
// and A is fresh for every tile.
//
// NOTE: the gradient lies in the rows of dQ (faithful_gradient.h). An item reads only rows of its
// own, all of them before it stores the first one.
//
// Scratch: packed K (twice) and V of the tile, per unit Q, G, A and the sum; S, dP, codes of dS of
// a block.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "base/numeric.h"
#include "formats/exponent.h"
#include "formats/limits.h"
#include "kernels/cpu/faithful_gradient.h"
#include "kernels/cpu/faithful_items.h"
#include "kernels/cpu/faithful_tiles.h"
#include "kernels/cpu/fp32_ops.h"
#include "kernels/cpu/tile_pack.h"
#include "recipe/roles.h"
#include "recipe/stages.h"

#if defined(MXATTN_KERNELS_CPU_FAITHFUL_DQ_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MXATTN_KERNELS_CPU_FAITHFUL_DQ_INL_H_
#undef MXATTN_KERNELS_CPU_FAITHFUL_DQ_INL_H_
#else
#define MXATTN_KERNELS_CPU_FAITHFUL_DQ_INL_H_
#endif

#include "kernels/cpu/faithful_tiles-inl.h"

HWY_BEFORE_NAMESPACE();
namespace mxattn::kernels::cpu {
namespace HWY_NAMESPACE {

struct DqScratch : PassScratch {
  struct Unit {
    std::uint16_t *q, *g;  // A operands (kTile, width)
    float *acc, *sum;      // (kTile, width)
    TileExponents eq, eg;
    Exponent r[kTile];
    std::int32_t mu[kTile];            // with GradientOperand::kPlain unused
    float base[kTile];                 // with GradientOperand::kPlain -(m + log2 l)
    float delta[kTile];                // D
    std::int8_t ng[kTile], no[kTile];  // norm exponents of g and O
    float a[kTile], addend[kTile], scaled_delta[kTile];  // of rows, for a key tile that is uniform
    int first, rows;
    int chunk;
    bool factors_valid;
    std::int8_t factors_ek, factors_ev;
  };

  DqScratch(Carver& carver, int padded)
      : PassScratch(carver, padded, 2),
        units(carver.take<Unit>(kMaxUnits)),
        ek(carver.take<TileExponents>(1)),
        ev(carver.take<TileExponents>(1)) {
    const auto tile = static_cast<std::size_t>(kTile) * padded;
    k_columns = carver.take<std::uint16_t>(tile);
    v_columns = carver.take<std::uint16_t>(tile);
    k_rows = carver.take<std::uint16_t>(tile);
  }

  Unit* units;
  TileExponents *ek, *ev;
  std::uint16_t *k_columns, *v_columns, *k_rows;
};

template <Recipe kRecipe>
class DqPass {
 public:
  DqPass(const Item& item, const BackwardArgs& args, const Gradient& gradient, std::byte* memory)
      : item_(item),
        problem_(*item.problem),
        args_(args),
        gradient_(gradient),
        carver_(memory),
        x_(carver_, padded_dim(problem_.dim)),
        score_scale_(stages::score_scale(problem_.softmax_scale)) {
    const Document& doc = item.document;
    const int head_k = item.head / (problem_.heads_q / problem_.heads_k);
    const State& state = args.state;
    q_ = head_rows(state.q, args.q, item.head, doc.q_slot, doc.q_token, doc.q_len);
    k_ = head_rows(state.k, args.k, head_k, doc.k_slot, doc.k_token, doc.k_len);
    v_ = head_rows(state.v, args.v, head_k, doc.k_slot, doc.k_token, doc.k_len);
    g_ = gradient.rows(doc, item.head);
  }

  void run() {
    Range tiles{1 << 30, 0};
    for (int first = 0; first < item_.count; first += kTile) {
      const Range keys = load_unit(num_units_++, item_.first + first);
      if (keys.empty()) continue;
      tiles = {std::min(tiles.begin, keys.begin / kTile),
               std::max(tiles.end, (keys.end - 1) / kTile + 1)};
    }
    for (int tile = tiles.begin; tile < tiles.end; ++tile) {
      load_keys(tile * kTile);
      for (int u = 0; u < num_units_; ++u) {
        promote_halves(x_.units[u], tile);
        visit(x_.units[u]);
      }
    }
    for (int u = 0; u < num_units_; ++u) store_unit(x_.units[u]);
  }

 private:
  using Unit = DqScratch::Unit;
  static constexpr bool kPlain = kRecipe.gradient == GradientOperand::kPlain;

  Range visible(int query) const {
    return visible_keys(problem_.mask, item_.document.q_len, item_.document.k_len, query);
  }

  /// Returns the keys that some row of the unit sees.
  Range load_unit(int index, int first) {
    Unit& unit = x_.units[index];
    const auto tile = static_cast<std::ptrdiff_t>(kTile) * x_.width;
    unit.q = x_.unit_rows[index];
    unit.g = unit.q + tile;
    unit.acc = x_.unit_sums[index];
    unit.sum = unit.acc + tile;
    unit.first = first;
    unit.rows = std::min(kTile, item_.first + item_.count - first);
    unit.chunk = -1;
    unit.factors_valid = false;
    pack_rows(tile_rows(q_, first, unit.rows, x_.staging, unit.eq), kTile, x_.width, unit.q,
              x_.width);
    pack_rows(tile_rows(g_, first, unit.rows, x_.staging, unit.eg), kTile, x_.width, unit.g,
              x_.width);
    std::fill_n(unit.acc, 2 * tile, 0.0f);
    load_statistics(unit);
    return {visible(first).begin, visible(first + unit.rows - 1).end};
  }

  void load_statistics(Unit& unit) {
    const Document& doc = item_.document;
    const std::int64_t at = statistic_index(problem_, item_.head, doc.q_token + unit.first);
    for (int r = 0; r < kTile; ++r) {
      unit.delta[r] = 0;
      unit.mu[r] = 0;
      unit.base[r] = 0;
      unit.r[r] = Exponent(0);
      if (r >= unit.rows) continue;
      const GradientStatistics statistics =
          gradient_.statistics(doc.q_token + unit.first + r, item_.head);
      unit.delta[r] = statistics.delta;
      unit.ng[r] = statistics.norm;
      unit.no[r] = statistics.output_norm;
      const std::int32_t reference = args_.state.row_reference[at + r];
      if constexpr (kPlain) {
        unit.base[r] = stages::plain_addend<Fp32Ops>(std::bit_cast<float>(reference),
                                                     args_.state.row_sum[at + r]);
      } else {
        unit.mu[r] = reference;
      }
    }
  }

  void load_keys(int first) {
    const int count = std::min(kTile, k_.length - first);
    tile_first_ = first;
    const RowSource k = tile_rows(k_, first, count, x_.staging, *x_.ek);
    pack_column_pairs(k, kTile, x_.width, x_.k_columns);
    pack_row_pairs(k, kTile, x_.width, x_.k_rows);
    pack_column_pairs(tile_rows(v_, first, count, x_.staging, *x_.ev), kTile, x_.width,
                      x_.v_columns);
  }

  /// Adds the accumulator to the sum where the page says so: 64 rows at a time.
  void promote_halves(Unit& unit, int tile) {
    if constexpr (kRecipe.ds_scale == DsScale::kRow) return;
    for (int half = 0; half < 2; ++half) {
      if (stages::promotes_dq(tile, half)) {
        promote_unit(unit, half * stages::kQueryStep, stages::kQueryStep);
      }
    }
  }

  void promote_unit(Unit& unit, int first, int rows) {
    const int width = x_.width;
    for (int r = first; r < first + rows; ++r) {
      promote_rows(unit.sum + r * width, unit.acc + r * width, 1, width, stages::factor(unit.r[r]));
    }
  }

  /// r of every row for the chunk of the key tile; the accumulator follows.
  void enter_chunk(Unit& unit, int chunk) {
    unit.chunk = chunk;
    unit.factors_valid = false;
    if constexpr (kPlain) return;
    const auto seen_of = [&](int r) {
      const Range keys = visible(unit.first + r);
      return Range{std::max(keys.begin, stages::chunk_begin(chunk)),
                   std::min(keys.end, stages::chunk_end(chunk))};
    };
    Exponent nv(-400);  // running from the chunk's start
    int nv_end = stages::chunk_begin(chunk);
    // Keys that all rows see in the chunk: both ends of a row's range never decrease.
    const Range shared{seen_of(unit.rows - 1).begin, seen_of(0).end};
    const Exponent shared_ek = largest(k_.exponents, shared);
    for (int r = 0; r < unit.rows; ++r) {
      const Range seen = seen_of(r);
      if (seen.empty()) continue;
      nv = max(nv, largest(v_.norms, {nv_end, seen.end}));
      nv_end = std::max(nv_end, seen.end);
      Exponent ek;
      if (shared.empty()) {
        ek = largest(k_.exponents, seen);
      } else {
        ek = max(shared_ek, max(largest(k_.exponents, {seen.begin, shared.begin}),
                                largest(k_.exponents, {shared.end, seen.end})));
      }
      const Exponent now = stages::ds_exponent_dq(Exponent::stored(unit.ng[r]),
                                                  Exponent::stored(unit.no[r]), nv, ek);
      const Exponent change = unit.r[r] - now;
      unit.r[r] = now;
      if (change != Exponent(0) and kRecipe.ds_scale != DsScale::kRow) {
        rescale_rows(unit.acc + r * x_.width, 1, x_.width, stages::factor(change));
      }
    }
  }

  /// Largest of stored exponents of a range; far below any where it is empty.
  static Exponent largest(const std::int8_t* stored, Range range) {
    std::int8_t best = -128;
    for (int j = range.begin; j < range.end; ++j) best = std::max(best, stored[j]);
    return range.empty() ? Exponent(-400) : Exponent::stored(best);
  }

  void visit(Unit& unit) {
    const Range keys{visible(unit.first).begin, visible(unit.first + unit.rows - 1).end};
    if (keys.begin >= tile_first_ + kTile or keys.end <= tile_first_) return;
    const int chunk = stages::chunk_of(tile_first_);
    if (chunk != unit.chunk) enter_chunk(unit, chunk);
    const bool per_key = not(x_.ek->uniform and x_.ev->uniform);
    if (not per_key) row_factors(unit);
    for (int first = 0; first < unit.rows; first += kBlock) {
      const BlockView view = view_block(std::min(kBlock, unit.rows - first), tile_first_,
                                        [&](int r) { return visible(unit.first + first + r); });
      if (view.empty()) continue;
      product(unit.q, first, view.columns, x_.k_columns, x_.s);
      product(unit.g, first, view.columns, x_.v_columns, x_.dp);
      with_switches(view.masked, per_key, [&](auto masked, auto per_key_factors) {
        gradients<decltype(masked)::value, decltype(per_key_factors)::value>(unit, first, view);
      });
      accumulate(unit, first, view.columns);
    }
  }

  /// a, the addend and D'' of every row: constants of a uniform key tile.
  void row_factors(Unit& unit) {
    const std::int8_t ek = x_.ek->stored[0];
    const std::int8_t ev = x_.ev->stored[0];
    if (unit.factors_valid and unit.factors_ek == ek and unit.factors_ev == ev) return;
    unit.factors_valid = true;
    unit.factors_ek = ek;
    unit.factors_ev = ev;
    for (int r = 0; r < kTile; ++r) {
      const Exponent eg = unit.eg.at(r);
      unit.a[r] = stages::score_factor(score_scale_, unit.eq.at(r), x_.ek->common());
      unit.scaled_delta[r] = stages::dq_delta(unit.delta[r], eg, x_.ev->common());
      const Exponent e =
          stages::dq_addend(unit.mu[r], eg, x_.ev->common(), x_.ek->common(), unit.r[r]);
      unit.addend[r] = row_addend(unit, r, e);
    }
  }

  static float row_addend(const Unit& unit, int r, Exponent e) {
    if (e.nan) return kNan;
    if constexpr (kPlain) return unit.base[r];
    return static_cast<float>(e.value);
  }

  void product(const std::uint16_t* rows, int first, Range columns, const std::uint16_t* packed,
               float* to) {
    multiply(*item_.engine, kBlock, columns.size(), x_.width, rows + first * x_.width, x_.width,
             packed + 2 * columns.begin, kTile, to + columns.begin, kTile, false);
  }

  /// Codes of dS 2^(EK - r).
  template <bool kMasked, bool kPerKey>
  void gradients(const Unit& unit, int first, const BlockView& view) {
    const FloatTag d;
    const IntTag di;
    const int lanes = static_cast<int>(float_lanes());
    for (int r = 0; r < kBlock; ++r) {
      const int row = first + r;
      Floats a = hn::Set(d, unit.a[row]);
      Floats addend = hn::Set(d, unit.addend[row]);
      Floats delta = hn::Set(d, unit.scaled_delta[row]);
      const Exponent eg = unit.eg.at(row);
      // What stages::dq_addend adds to EV + EK.
      const Exponent rest = stages::dq_addend(unit.mu[row], eg, 0, 0, unit.r[row]);
      Floats largest = hn::Zero(d);
      for (int v = view.columns.begin; v < view.columns.end; v += lanes) {
        const int at = r * kTile + v;
        if constexpr (kPerKey) {
          const Floats nan = hn::Add(nans_at(*x_.ev, v, rest.nan), nans_at(*x_.ek, v, false));
          const Ints ev = exponents_at(*x_.ev, v, eg);
          a = score_factors(score_scale_, unit.eq.at(row), *x_.ek, v);
          if constexpr (kPlain) {
            addend = hn::Add(hn::Set(d, unit.base[row]), nan);
          } else {
            const Ints sum = hn::Add(exponents_at(*x_.ek, v, rest), hn::Load(di, x_.ev->value + v));
            addend = hn::Add(hn::ConvertTo(d, sum), nan);
          }
          delta = dq_deltas(unit.delta[row], ev, nans_at(*x_.ev, v, eg.nan));
        }
        const Floats p = stages::probability<Ops>(hn::Load(d, x_.s + at), a, addend);
        Floats ds = stages::dq_ds<Ops>(p, hn::Load(d, x_.dp + at), delta);
        if constexpr (kMasked) ds = hn::IfThenElseZero(lanes_inside(view.row[r], v), ds);
        if constexpr (kRecipe.ds_scale == DsScale::kRow) {
          hn::Store(ds, d, x_.s + at);
          const Floats magnitude = hn::Abs(ds);
          largest = hn::IfThenElse(hn::Gt(magnitude, largest), magnitude, largest);
        } else {
          store_bf16(round_element<kRecipe.probability>(ds), x_.ds + at);
        }
      }
      if constexpr (kRecipe.ds_scale == DsScale::kRow) {
        const Exponent extra = row_exponent(hn::GetLane(hn::MaxOfLanes(d, largest)));
        row_r_[r] = unit.r[row] + extra;
        const Floats factor = hn::Set(d, stages::factor(-extra));
        for (int v = view.columns.begin; v < view.columns.end; v += lanes) {
          const int at = r * kTile + v;
          const Floats ds = hn::Mul(hn::Load(d, x_.s + at), factor);
          store_bf16(round_element<kRecipe.probability>(ds), x_.ds + at);
        }
      }
    }
  }

  /// stages::dq_delta of a vector of keys, `e` = eG + EV.
  static HWY_INLINE Floats dq_deltas(float delta, Ints e, Floats nan) {
    const FloatTag d;
    const Floats limit = hn::Set(d, pow2(stages::kDqDeltaExponent));
    const Floats x = hn::Mul(hn::Set(d, delta), factors(hn::Neg(e), nan));
    const Floats low = hn::IfThenElse(hn::Lt(x, hn::Neg(limit)), hn::Neg(limit), x);
    return hn::IfThenElse(hn::Gt(x, limit), limit, low);
  }

  void accumulate(Unit& unit, int first, Range columns) {
    const int width = x_.width;
    const std::uint16_t* const k = x_.k_rows + static_cast<std::ptrdiff_t>(columns.begin) * width;
    const auto at = static_cast<std::ptrdiff_t>(first) * width;
    constexpr bool kFresh = kRecipe.ds_scale == DsScale::kRow;
    float* const to = kFresh ? x_.t : unit.acc + at;
    multiply(*item_.engine, kBlock, width, columns.size(), x_.ds + columns.begin, kTile, k, width,
             to, width, not kFresh);
    if constexpr (kFresh) {
      for (int r = 0; r < kBlock; ++r) {
        promote_rows(unit.sum + at + r * width, x_.t + r * width, 1, width,
                     stages::factor(row_r_[r]));
      }
    }
  }

  void store_unit(Unit& unit) {
    if constexpr (kRecipe.ds_scale != DsScale::kRow) promote_unit(unit, 0, kTile);
    store_gradient(unit.sum, unit.rows, x_.width, problem_.softmax_scale,
                   is_rotated(Role::kQ, problem_.dim, problem_.rotate), args_.dq,
                   item_.document.q_token + unit.first, item_.head);
  }

  const Item& item_;
  const Problem& problem_;
  const BackwardArgs& args_;
  const Gradient& gradient_;
  Carver carver_;
  DqScratch x_;
  HeadRows q_, k_, v_, g_;
  float score_scale_;
  int num_units_ = 0;
  int tile_first_ = 0;
  Exponent row_r_[kBlock];  // DsScale::kRow
};

}  // namespace HWY_NAMESPACE
}  // namespace mxattn::kernels::cpu
HWY_AFTER_NAMESPACE();

#endif  // MXATTN_KERNELS_CPU_FAITHFUL_DQ_INL_H_
