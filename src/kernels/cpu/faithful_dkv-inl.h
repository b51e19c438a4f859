// The dK/dV pass: one item is up to kMaxUnits key tiles of a key head against the queries that see
// them: query heads of the group ascending, query tiles (two 64-query steps) ascending. For each
// query tile and key tile, 32 keys at a time, scores transposed (a row is a key):
//
//   S = cK cQ^T, dP = cV cG^T            fresh products
//   t = 2^(S a - mu + eG - c + 8)
//   dS 2^(EQ - r) = t (dP F - D')
//   A_v += round(t) cG, A_k += round(dS 2^(EQ - r)) cQ      in place
//   dV = sum of 2^(c - 8) A_v, dK = sum of 2^r A_k
//
// c and r are constants of a chunk of queries (or of a query tile, where the chunk spreads); the
// accumulators are rescaled when they change and promoted into FP32 sums at fixed places and at the
// end of a head. With DsScale::kRow the exponent of dS is one of the key and step, and A_k is fresh
// for every step.
//
// Scratch: packed Q and G of the query tile (each twice), per unit K, V, the accumulators and the
// sums; S, dP, codes of both of a block.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "base/numeric.h"
#include "kernels/cpu/faithful_gradient.h"
#include "kernels/cpu/faithful_items.h"
#include "kernels/cpu/faithful_tiles.h"
#include "kernels/cpu/fp32_ops.h"
#include "kernels/cpu/tile_pack.h"
#include "recipe/exponents.h"
#include "recipe/roles.h"
#include "recipe/stages.h"

#if defined(MXATTN_KERNELS_CPU_FAITHFUL_DKV_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MXATTN_KERNELS_CPU_FAITHFUL_DKV_INL_H_
#undef MXATTN_KERNELS_CPU_FAITHFUL_DKV_INL_H_
#else
#define MXATTN_KERNELS_CPU_FAITHFUL_DKV_INL_H_
#endif

#include "kernels/cpu/faithful_tiles-inl.h"

HWY_BEFORE_NAMESPACE();
namespace mxattn::kernels::cpu {
namespace HWY_NAMESPACE {

struct DkvScratch : PassScratch {
  struct Unit {
    std::uint16_t *k, *v;                  // A operands (kTile, width)
    float *v_acc, *k_acc, *v_sum, *k_sum;  // (kTile, width)
    TileExponents ek, ev;
    Exponent nv;                     // largest norm exponent of V in the tile
    float a[kTile], f[kTile];        // score factor and F of rows, for queries of one exponent
    alignas(64) float delta[kTile];  // D' of the query tile
    int first, rows;
    Exponent c, r;  // of the accumulators
    bool factors_valid;
    std::int8_t factors_eq;
  };
  struct QueryTile {
    TileExponents eq, eg;
    float delta[kTile];  // D
    std::int32_t mu[kTile];
    float base[kTile];  // GradientOperand::kPlain: -(m + log2 l)
    alignas(64) float addend[kTile];
    int first, rows;
  };

  DkvScratch(Carver& carver, int padded)
      : PassScratch(carver, padded, 4),
        units(carver.take<Unit>(kMaxUnits)),
        queries(carver.take<QueryTile>(1)) {
    const auto tile = static_cast<std::size_t>(kTile) * padded;
    q_columns = carver.take<std::uint16_t>(tile);
    g_columns = carver.take<std::uint16_t>(tile);
    q_rows = carver.take<std::uint16_t>(tile);
    g_rows = carver.take<std::uint16_t>(tile);
    p = carver.take<std::uint16_t>(kBlock * kTile);
  }

  Unit* units;
  QueryTile* queries;
  std::uint16_t *q_columns, *g_columns, *q_rows, *g_rows, *p;
};

template <Recipe kRecipe>
class DkvPass {
 public:
  DkvPass(const Item& item, const BackwardArgs& args, const Gradient& gradient, std::byte* memory)
      : item_(item),
        problem_(*item.problem),
        args_(args),
        gradient_(gradient),
        carver_(memory),
        x_(carver_, padded_dim(problem_.dim)),
        score_scale_(stages::score_scale(problem_.softmax_scale)) {
    const Document& doc = item.document;
    const State& state = args.state;
    k_ = head_rows(state.k, args.k, item.head, doc.k_slot, doc.k_token, doc.k_len);
    v_ = head_rows(state.v, args.v, item.head, doc.k_slot, doc.k_token, doc.k_len);
  }

  void run() {
    Range queries{1 << 30, 0};
    for (int first = 0; first < item_.count; first += kTile) {
      const Range seen = load_unit(num_units_++, item_.first + first);
      if (seen.empty()) continue;
      queries = {std::min(queries.begin, seen.begin), std::max(queries.end, seen.end)};
    }
    const int group = problem_.heads_q / problem_.heads_k;
    for (int head = item_.head * group; head < (item_.head + 1) * group; ++head) {
      if (not queries.empty()) run_head(head, queries);
    }
    for (int u = 0; u < num_units_; ++u) store_unit(x_.units[u]);
  }

 private:
  using Unit = DkvScratch::Unit;
  static constexpr bool kPlain = kRecipe.gradient == GradientOperand::kPlain;
  static constexpr bool kRowScale = kRecipe.ds_scale == DsScale::kRow;

  Range visible(int key) const {
    return visible_queries(problem_.mask, item_.document.q_len, item_.document.k_len, key);
  }
  Range visible(const Unit& unit) const {
    return {visible(unit.first).begin, visible(unit.first + unit.rows - 1).end};
  }

  /// Returns the queries that see some key of the unit.
  Range load_unit(int index, int first) {
    Unit& unit = x_.units[index];
    const auto tile = static_cast<std::ptrdiff_t>(kTile) * x_.width;
    unit.k = x_.unit_rows[index];
    unit.v = unit.k + tile;
    unit.v_acc = x_.unit_sums[index];
    unit.k_acc = unit.v_acc + tile;
    unit.v_sum = unit.k_acc + tile;
    unit.k_sum = unit.v_sum + tile;
    unit.first = first;
    unit.rows = std::min(kTile, item_.first + item_.count - first);
    pack_rows(tile_rows(k_, first, unit.rows, x_.staging, unit.ek), kTile, x_.width, unit.k,
              x_.width);
    pack_rows(tile_rows(v_, first, unit.rows, x_.staging, unit.ev), kTile, x_.width, unit.v,
              x_.width);
    unit.nv = Exponent(0);
    if constexpr (not kPlain) {
      unit.nv = Exponent::stored(*std::max_element(v_.norms + first, v_.norms + first + unit.rows));
    }
    std::fill_n(unit.v_acc, 4 * tile, 0.0f);
    return visible(unit);
  }

  void run_head(int head, Range queries) {
    const Document& doc = item_.document;
    const State& state = args_.state;
    head_ = head;
    q_ = head_rows(state.q, args_.q, head, doc.q_slot, doc.q_token, doc.q_len);
    g_ = gradient_.rows(doc, head);
    chunk_ = -1;
    force_ = neutral_scales();
    for (int u = 0; u < num_units_; ++u) {
      x_.units[u].factors_valid = false;
      x_.units[u].c = force_.c;
      x_.units[u].r = ds_exponent(x_.units[u]);
    }
    for (int tile = queries.begin / kTile; tile * kTile < queries.end; ++tile) {
      update_scales(tile);
      load_queries(tile * kTile);
      for (int u = 0; u < num_units_; ++u) visit(x_.units[u], tile);
    }
    for (int u = 0; u < num_units_; ++u) promote_unit(x_.units[u]);
  }

  /// Scales that are factors 1 in every place: what BF16 takes, and codes before the first live
  /// query tile, whose products are 0.
  static stages::ChunkScales neutral_scales() {
    return {.a = 0, .b = 0, .c = stages::kProbabilityShift};
  }

  Exponent ds_exponent(const Unit& unit) const {
    return kPlain ? Exponent(0) : stages::ds_exponent_dk(force_, unit.nv);
  }

  /// The scales in force for a query tile: of its chunk, or its own where the chunk spreads.
  void update_scales(int tile) {
    if constexpr (kPlain) return;
    const QueryTileMaxima* const tiles = gradient_.maxima(head_, item_.first_tile);
    const int chunk = stages::chunk_of(tile * kTile);
    if (chunk != chunk_) {
      chunk_ = chunk;
      const int begin = stages::chunk_begin(chunk) / kTile;
      const int end = (std::min(stages::chunk_end(chunk), q_.length) + kTile - 1) / kTile;
      chunk_scales_ = chunk_scales(tiles + begin, end - begin);
    }
    if (not tiles[tile].live) return;
    force_ = chunk_scales_.shared ? chunk_scales_.scales : tiles[tile].scales;
  }

  struct ChunkChoice {
    stages::ChunkScales scales;
    bool shared;  // no maximum spreads too far over the chunk's tiles
  };

  static ChunkChoice chunk_scales(const QueryTileMaxima* tiles, int count) {
    stages::ChunkScales most;
    int least_a = 1 << 20, least_b = 1 << 20, least_c = 1 << 20;
    for (int i = 0; i < count; ++i) {
      if (not tiles[i].live) continue;
      const stages::ChunkScales& tile = tiles[i].scales;
      most = {max(most.a, tile.a), max(most.b, tile.b), max(most.c, tile.c)};
      least_a = std::min(least_a, tile.a.value);
      least_b = std::min(least_b, tile.b.value);
      least_c = std::min(least_c, tile.c.value);
    }
    const bool shared = most.a.value - least_a <= stages::kChunkSpread and
                        most.b.value - least_b <= stages::kChunkSpread and
                        most.c.value - least_c <= stages::kChunkSpread;
    return {most, shared};
  }

  void load_queries(int first) {
    DkvScratch::QueryTile& queries = *x_.queries;
    const Document& doc = item_.document;
    queries.first = first;
    queries.rows = std::min(kTile, q_.length - first);
    const RowSource q = tile_rows(q_, first, queries.rows, x_.staging, queries.eq);
    pack_column_pairs(q, kTile, x_.width, x_.q_columns);
    pack_row_pairs(q, kTile, x_.width, x_.q_rows);
    const RowSource g = tile_rows(g_, first, queries.rows, x_.staging, queries.eg);
    pack_column_pairs(g, kTile, x_.width, x_.g_columns);
    pack_row_pairs(g, kTile, x_.width, x_.g_rows);

    const std::int64_t at = statistic_index(problem_, head_, doc.q_token + first);
    for (int i = 0; i < kTile; ++i) {
      // Slots outside the document, and rows that see no key: p = 0 without a mask.
      if (i >= queries.rows or
          visible_keys(problem_.mask, doc.q_len, doc.k_len, first + i).empty()) {
        queries.delta[i] = 0;
        queries.addend[i] = -kInfinity;
        continue;
      }
      queries.delta[i] = gradient_.statistics(doc.q_token + first + i, head_).delta;
      const std::int32_t reference = args_.state.row_reference[at + i];
      const Exponent eg = queries.eg.at(i);
      if constexpr (kPlain) {
        queries.addend[i] = eg.nan ? kNan
                                   : stages::plain_addend<Fp32Ops>(std::bit_cast<float>(reference),
                                                                   args_.state.row_sum[at + i]);
      } else {
        const Exponent e = stages::dkv_addend(reference, eg, force_.c);
        queries.addend[i] = e.nan ? kNan : static_cast<float>(e.value);
      }
    }
  }

  void visit(Unit& unit, int tile) {
    const Range seen = visible(unit);
    if (seen.begin >= (tile + 1) * kTile or seen.end <= tile * kTile) return;
    update_unit(unit);
    const DkvScratch::QueryTile& queries = *x_.queries;
    for (int first = 0; first < kTile; first += kBlock) {
      BlockView view;
      if (first < unit.rows) {
        view = view_block(std::min(kBlock, unit.rows - first), queries.first,
                          [&](int r) { return visible(unit.first + first + r); });
      }
      if (not view.empty()) {
        product(unit.k, first, view.columns, x_.q_columns, x_.s);
        product(unit.v, first, view.columns, x_.g_columns, x_.dp);
        with_switches(view.masked, not queries.eq.uniform, [&](auto masked, auto per_query) {
          gradients<decltype(masked)::value, decltype(per_query)::value>(unit, first, view);
        });
      }
      accumulate(unit, first, tile, view.columns);
    }
  }

  /// c, r and what follows from them, for the query tile.
  void update_unit(Unit& unit) {
    const DkvScratch::QueryTile& queries = *x_.queries;
    const Exponent r = ds_exponent(unit);
    const int elements = kTile * x_.width;
    if (unit.c != force_.c) {
      rescale_rows(unit.v_acc, 1, elements, stages::factor(unit.c - force_.c));
    }
    if (unit.r != r and not kRowScale) {
      rescale_rows(unit.k_acc, 1, elements, stages::factor(unit.r - r));
    }
    const bool same = unit.factors_valid and unit.c == force_.c and unit.r == r and
                      unit.factors_eq == queries.eq.stored[0];
    unit.c = force_.c;
    unit.r = r;
    for (int i = 0; i < kTile; ++i) {
      unit.delta[i] = queries.delta[i];
      if constexpr (not kPlain) {
        unit.delta[i] *= stages::dkv_delta_factor(unit.c, queries.eg.at(i), queries.eq.at(i), r);
      }
    }
    if constexpr (not kPlain) {
      const FloatTag d;
      for (int v = 0; v < kTile; v += static_cast<int>(float_lanes())) {
        hn::Store(round_fp16(hn::Load(d, unit.delta + v)), d, unit.delta + v);
      }
    }
    if (same and queries.eq.uniform) return;
    unit.factors_valid = queries.eq.uniform;
    if (not unit.factors_valid) return;
    unit.factors_eq = queries.eq.stored[0];
    const Exponent eq = queries.eq.common();
    for (int j = 0; j < kTile; ++j) {
      unit.a[j] = stages::score_factor(score_scale_, eq, unit.ek.at(j));
      unit.f[j] = stages::dkv_gradient_factor(unit.c, unit.ev.at(j), eq, r);
    }
  }

  void product(const std::uint16_t* rows, int first, Range columns, const std::uint16_t* packed,
               float* to) {
    multiply(*item_.engine, kBlock, columns.size(), x_.width, rows + first * x_.width, x_.width,
             packed + 2 * columns.begin, kTile, to + columns.begin, kTile, false);
  }

  /// Codes of P and of dS.
  template <bool kMasked, bool kPerQuery>
  void gradients(const Unit& unit, int first, const BlockView& view) {
    const FloatTag d;
    const DkvScratch::QueryTile& queries = *x_.queries;
    const int lanes = static_cast<int>(float_lanes());
    for (int r = 0; r < kBlock; ++r) {
      const int row = first + r;
      const Exponent ek = unit.ek.at(row);
      // What stages::dkv_gradient_factor adds to EQ.
      const Exponent rest = unit.c - stages::kProbabilityShift + unit.ev.at(row) - unit.r;
      Floats a = hn::Set(d, unit.a[row]);
      Floats f = hn::Set(d, unit.f[row]);
      for (int v = view.columns.begin; v < view.columns.end; v += lanes) {
        const int at = r * kTile + v;
        if constexpr (kPerQuery) {
          a = score_factors(score_scale_, ek, queries.eq, v);
          f = factors(exponents_at(queries.eq, v, rest), nans_at(queries.eq, v, rest.nan));
        }
        Floats t =
            stages::probability<Ops>(hn::Load(d, x_.s + at), a, hn::Load(d, queries.addend + v));
        Floats ds = stages::dkv_ds<Ops>(t, hn::Load(d, x_.dp + at), f, hn::Load(d, unit.delta + v));
        if constexpr (kMasked) {
          const FloatMask inside = lanes_inside(view.row[r], v);
          t = hn::IfThenElseZero(inside, t);
          ds = hn::IfThenElseZero(inside, ds);
        }
        store_bf16(round_element<kRecipe.probability>(t), x_.p + at);
        if constexpr (kRowScale) {
          hn::Store(ds, d, x_.s + at);
        } else {
          store_bf16(round_element<kRecipe.probability>(ds), x_.ds + at);
        }
      }
      if constexpr (kRowScale) scale_row(unit, r, view.columns);
    }
  }

  /// DsScale::kRow: codes of dS with an exponent of the key and step.
  void scale_row(const Unit& unit, int r, Range columns) {
    const FloatTag d;
    const int lanes = static_cast<int>(float_lanes());
    for (int step = 0; step < 2; ++step) {
      const Range part = step_columns(columns, step);
      Floats largest = hn::Zero(d);
      for (int v = part.begin; v < part.end; v += lanes) {
        const Floats magnitude = hn::Abs(hn::Load(d, x_.s + r * kTile + v));
        largest = hn::IfThenElse(hn::Gt(magnitude, largest), magnitude, largest);
      }
      const Exponent extra = row_exponent(hn::GetLane(hn::MaxOfLanes(d, largest)));
      row_r_[step][r] = unit.r + extra;
      const Floats factor = hn::Set(d, stages::factor(-extra));
      for (int v = part.begin; v < part.end; v += lanes) {
        const int at = r * kTile + v;
        const Floats ds = hn::Mul(hn::Load(d, x_.s + at), factor);
        store_bf16(round_element<kRecipe.probability>(ds), x_.ds + at);
      }
    }
  }

  static Range step_columns(Range columns, int step) {
    return {std::max(columns.begin, step * stages::kQueryStep),
            std::min(columns.end, (step + 1) * stages::kQueryStep)};
  }

  /// A_v and A_k of a block, with the promotions that stand before its two steps.
  void accumulate(Unit& unit, int first, int tile, Range columns) {
    const int half = first / stages::kQueryStep;
    const int step = 2 * tile;
    const auto at = static_cast<std::ptrdiff_t>(first) * x_.width;
    const float v_factor = stages::factor(unit.c - stages::kProbabilityShift);
    add_product(unit.v_acc + at, unit.v_sum + at, x_.p, x_.g_rows, columns, v_factor,
                stages::promotes_dv(step, half), stages::promotes_dv(step + 1, half));
    if constexpr (kRowScale) {
      for (int part = 0; part < 2; ++part)
        add_fresh(unit.k_sum + at, step_columns(columns, part), part);
    } else {
      add_product(unit.k_acc + at, unit.k_sum + at, x_.ds, x_.q_rows, columns,
                  stages::factor(unit.r), stages::promotes_dk(step, half),
                  stages::promotes_dk(step + 1, half));
    }
  }

  /// acc += codes packed, promoted before the first or the second step.
  void add_product(float* acc, float* sum, const std::uint16_t* codes, const std::uint16_t* packed,
                   Range columns, float factor, bool promote_first, bool promote_second) {
    if (promote_first) promote_rows(sum, acc, kBlock, x_.width, factor);
    if (not promote_second) {
      add_range(acc, codes, packed, columns);
      return;
    }
    add_range(acc, codes, packed, step_columns(columns, 0));
    promote_rows(sum, acc, kBlock, x_.width, factor);
    add_range(acc, codes, packed, step_columns(columns, 1));
  }

  void add_range(float* acc, const std::uint16_t* codes, const std::uint16_t* packed, Range columns,
                 bool accumulate = true) {
    if (columns.empty()) return;
    const int width = x_.width;
    multiply(*item_.engine, kBlock, width, columns.size(), codes + columns.begin, kTile,
             packed + static_cast<std::ptrdiff_t>(columns.begin) * width, width, acc, width,
             accumulate);
  }

  /// DsScale::kRow: the product of one step, added to the sum with the exponents of its rows.
  void add_fresh(float* sum, Range columns, int step) {
    if (columns.empty()) return;
    add_range(x_.t, x_.ds, x_.q_rows, columns, false);
    for (int r = 0; r < kBlock; ++r) {
      promote_rows(sum + r * x_.width, x_.t + r * x_.width, 1, x_.width,
                   stages::factor(row_r_[step][r]));
    }
  }

  /// At the end of a head nothing stays in the accumulators.
  void promote_unit(Unit& unit) {
    promote_rows(unit.v_sum, unit.v_acc, kTile, x_.width,
                 stages::factor(unit.c - stages::kProbabilityShift));
    if constexpr (not kRowScale) {
      promote_rows(unit.k_sum, unit.k_acc, kTile, x_.width, stages::factor(unit.r));
    }
  }

  void store_unit(Unit& unit) {
    const std::int64_t token = item_.document.k_token + unit.first;
    store_gradient(unit.k_sum, unit.rows, x_.width, problem_.softmax_scale,
                   is_rotated(Role::kK, problem_.dim, problem_.rotate), args_.dk, token,
                   item_.head);
    for (int r = 0; r < unit.rows; ++r) {
      store_row(unit.v_sum + static_cast<std::ptrdiff_t>(r) * x_.width, problem_.dim,
                args_.dv.row(token + r, item_.head));
    }
  }

  const Item& item_;
  const Problem& problem_;
  const BackwardArgs& args_;
  const Gradient& gradient_;
  Carver carver_;
  DkvScratch x_;
  HeadRows q_, k_, v_, g_;
  float score_scale_;
  int num_units_ = 0;
  int head_ = 0;
  int chunk_ = -1;
  ChunkChoice chunk_scales_{};
  stages::ChunkScales force_;  // the scales in force
  Exponent row_r_[2][kBlock];  // DsScale::kRow
};

}  // namespace HWY_NAMESPACE
}  // namespace mxattn::kernels::cpu
HWY_AFTER_NAMESPACE();

#endif  // MXATTN_KERNELS_CPU_FAITHFUL_DKV_INL_H_
