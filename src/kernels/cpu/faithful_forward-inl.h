// The forward: one item is up to kMaxUnits query tiles of a head against the key tiles they see,
// from the last one down to the first. For each key tile and query tile, 32 rows at a time:
//
//   S = cQ cK^T            fresh product; z = S a in log2 units
//   m = max(m, max z)      the real running maximum (or its ceiling); alpha = 2^(m_old - m_new)
//   h = round(256 p 2^(EV - c))      p = 2^(z - m); codes of P with V's exponent folded in
//   l = l alpha + 2^-8 sum round(256 p)
//   T = h cV               fresh product
//   O = O alpha + T 2^(c - 8)
//
// Scratch: packed K and V of the tile (shared by the units), per unit Q, O, m, l; S, h, T of a
// block.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "base/numeric.h"
#include "kernels/cpu/faithful_items.h"
#include "kernels/cpu/faithful_tiles.h"
#include "kernels/cpu/fp32_ops.h"
#include "kernels/cpu/tile_pack.h"
#include "recipe/stages.h"

#if defined(MXATTN_KERNELS_CPU_FAITHFUL_FORWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MXATTN_KERNELS_CPU_FAITHFUL_FORWARD_INL_H_
#undef MXATTN_KERNELS_CPU_FAITHFUL_FORWARD_INL_H_
#else
#define MXATTN_KERNELS_CPU_FAITHFUL_FORWARD_INL_H_
#endif

#include "kernels/cpu/faithful_tiles-inl.h"

HWY_BEFORE_NAMESPACE();
namespace mxattn::kernels::cpu {
namespace HWY_NAMESPACE {

inline constexpr int kOnesColumns = kGemmColumnStep;  // columns of ones; one would do

struct ForwardScratch {
  struct Unit {
    std::uint16_t* q;  // A operand (kTile, width)
    float* o;          // (kTile, width)
    float *m, *l;      // (kTile)
    float* a;          // score factors of rows, for keys of exponent a_key
    TileExponents eq;
    int first, rows;  // queries [first, first + rows) of the document
    std::int8_t a_key;
    bool a_valid;
  };
  struct KeyTile {
    std::uint16_t *k, *v;  // B operands: K contracts over channels, V over keys
    TileExponents ek, ev;
    int first, count;
  };

  ForwardScratch(Carver& carver, int padded)
      : width(padded),
        staging(carver.take<Bf16Bits>(static_cast<std::size_t>(kTile) * padded)),
        units(carver.take<Unit>(kMaxUnits)),
        keys(carver.take<KeyTile>(1)) {
    const auto tile = static_cast<std::size_t>(kTile) * padded;
    const auto block = static_cast<std::size_t>(kBlock);
    k = carver.take<std::uint16_t>(tile);
    v = carver.take<std::uint16_t>(tile);
    ones = carver.take<std::uint16_t>(kTile * kOnesColumns);
    s = carver.take<float>(block * kTile);
    h = carver.take<std::uint16_t>(block * kTile);
    hs = carver.take<std::uint16_t>(block * kTile);
    t = carver.take<float>(block * padded);
    row = carver.take<float>(padded);
    for (int u = 0; u < kMaxUnits; ++u) {
      unit_q[u] = carver.take<std::uint16_t>(tile);
      unit_o[u] = carver.take<float>(tile);
      unit_rows[u] = carver.take<float>(3 * kTile);
    }
  }

  int width;
  Bf16Bits* staging;
  Unit* units;
  KeyTile* keys;
  std::uint16_t *k, *v, *ones, *h, *hs;
  float *s, *t, *row;
  std::uint16_t* unit_q[kMaxUnits];
  float *unit_o[kMaxUnits], *unit_rows[kMaxUnits];
  // Of the rows of a block.
  alignas(64) float maximum[kBlock], alpha[kBlock], addend[kBlock], sum[kBlock], factor[kBlock];
  alignas(64) float chains[kBlock * kSumChains];
};

template <Recipe kRecipe>
class Forward {
 public:
  Forward(const Item& item, const ForwardArgs& args, std::byte* memory)
      : item_(item),
        problem_(*item.problem),
        args_(args),
        carver_(memory),
        x_(carver_, padded_dim(problem_.dim)),
        score_scale_(stages::score_scale(problem_.softmax_scale)) {
    const Document& doc = item.document;
    const int head_k = item.head / (problem_.heads_q / problem_.heads_k);
    q_ = head_rows(args.state.q, args.q, item.head, doc.q_slot, doc.q_token, doc.q_len);
    k_ = head_rows(args.state.k, args.k, head_k, doc.k_slot, doc.k_token, doc.k_len);
    v_ = head_rows(args.state.v, args.v, head_k, doc.k_slot, doc.k_token, doc.k_len);
  }

  void run() {
    constexpr std::uint16_t kOne = 0x3F80;
    if (problem_.sm90_accumulator) std::fill_n(x_.ones, kTile * kOnesColumns, kOne);
    Range tiles{1 << 30, 0};
    for (int first = 0; first < item_.count; first += kTile) {
      const Range keys = load_unit(num_units_++, item_.first + first);
      if (keys.empty()) continue;
      tiles = {std::min(tiles.begin, keys.begin / kTile),
               std::max(tiles.end, (keys.end - 1) / kTile + 1)};
    }
    for (int tile = tiles.end - 1; tile >= tiles.begin; --tile) {
      load_keys(tile * kTile);
      for (int u = 0; u < num_units_; ++u) visit(x_.units[u]);
    }
    for (int u = 0; u < num_units_; ++u) store_unit(x_.units[u]);
  }

 private:
  using Unit = ForwardScratch::Unit;

  Range visible(int query) const {
    return visible_keys(problem_.mask, item_.document.q_len, item_.document.k_len, query);
  }

  /// Returns the keys that some row of the unit sees.
  Range load_unit(int index, int first) {
    Unit& unit = x_.units[index];
    unit.q = x_.unit_q[index];
    unit.o = x_.unit_o[index];
    unit.m = x_.unit_rows[index];
    unit.l = unit.m + kTile;
    unit.a = unit.m + 2 * kTile;
    unit.first = first;
    unit.rows = std::min(kTile, item_.first + item_.count - first);
    unit.a_valid = false;
    const RowSource rows = tile_rows(q_, first, unit.rows, x_.staging, unit.eq);
    pack_rows(rows, kTile, x_.width, unit.q, x_.width);
    std::fill_n(unit.o, kTile * x_.width, 0.0f);
    std::fill_n(unit.m, kTile, -kInfinity);
    std::fill_n(unit.l, kTile, 0.0f);
    return {visible(first).begin, visible(first + unit.rows - 1).end};
  }

  void load_keys(int first) {
    ForwardScratch::KeyTile& keys = *x_.keys;
    keys.first = first;
    keys.count = std::min(kTile, k_.length - first);
    pack_column_pairs(tile_rows(k_, first, keys.count, x_.staging, keys.ek), kTile, x_.width, x_.k);
    pack_row_pairs(tile_rows(v_, first, keys.count, x_.staging, keys.ev), kTile, x_.width, x_.v);
  }

  /// One key tile for one query tile.
  void visit(Unit& unit) {
    const auto& keys = *x_.keys;
    const bool per_key = not(keys.ek.uniform and keys.ev.uniform);
    if (not per_key and not(unit.a_valid and unit.a_key == keys.ek.stored[0])) {
      unit.a_valid = true;
      unit.a_key = keys.ek.stored[0];
      for (int r = 0; r < kTile; ++r) {
        unit.a[r] = stages::score_factor(score_scale_, unit.eq.at(r), keys.ek.common());
      }
    }
    for (int first = 0; first < unit.rows; first += kBlock) {
      const BlockView view = view_block(std::min(kBlock, unit.rows - first), keys.first,
                                        [&](int r) { return visible(unit.first + first + r); });
      if (view.empty()) continue;
      scores(unit, first, view.columns);
      with_switches(view.masked, per_key, [&](auto masked, auto per_key_factors) {
        constexpr bool kMasked = decltype(masked)::value;
        constexpr bool kPerKey = decltype(per_key_factors)::value;
        maxima<kMasked, kPerKey>(unit, first, view);
        update_references(unit, first);
        tile_factors(view);
        weights<kMasked, kPerKey>(unit, first, view);
        sums(view.columns, kPerKey ? x_.hs : x_.h);
      });
      values(unit, first, view.columns);
    }
  }

  void scores(const Unit& unit, int first, Range columns) {
    multiply(*item_.engine, kBlock, columns.size(), x_.width, unit.q + first * x_.width, x_.width,
             x_.k + 2 * columns.begin, kTile, x_.s + columns.begin, kTile, false);
  }

  /// Score factors of a row at column v.
  template <bool kPerKey>
  HWY_INLINE Floats factors_of(const Unit& unit, int row, int v) const {
    if constexpr (kPerKey) {
      return score_factors(score_scale_, unit.eq.at(row), x_.keys->ek, v);
    } else {
      return hn::Set(FloatTag(), unit.a[row]);
    }
  }

  /// Largest z of each row; NaN is passed over.
  template <bool kMasked, bool kPerKey>
  void maxima(const Unit& unit, int first, const BlockView& view) {
    const FloatTag d;
    const int lanes = static_cast<int>(float_lanes());
    for (int r = 0; r < kBlock; ++r) {
      Floats best = hn::Set(d, -kInfinity);
      for (int v = view.columns.begin; v < view.columns.end; v += lanes) {
        const Floats acc = hn::Load(d, x_.s + r * kTile + v);
        const Floats z = stages::score<Ops>(acc, factors_of<kPerKey>(unit, first + r, v));
        FloatMask larger = hn::Gt(z, best);
        if constexpr (kMasked) larger = hn::And(larger, lanes_inside(view.row[r], v));
        best = hn::IfThenElse(larger, z, best);
      }
      x_.maximum[r] = hn::GetLane(hn::MaxOfLanes(d, best));
    }
  }

  /// m, alpha and the addend of the exponent.
  void update_references(Unit& unit, int first) {
    const FloatTag d;
    for (int r = 0; r < kBlock; r += static_cast<int>(float_lanes())) {
      const Floats old_m = hn::Load(d, unit.m + first + r);
      Floats seen = hn::Load(d, x_.maximum + r);
      if constexpr (kRecipe.row_reference == RowReference::kInteger) seen = hn::Ceil(seen);
      const Floats new_m = hn::Max(old_m, seen);
      const Floats alpha = hn::IfThenElse(hn::Eq(old_m, new_m), hn::Set(d, 1.0f),
                                          stages::rescale<Ops>(old_m, new_m));
      hn::Store(new_m, d, unit.m + first + r);
      hn::Store(alpha, d, x_.alpha + r);
      hn::Store(stages::forward_addend<Ops>(new_m), d, x_.addend + r);
    }
  }

  /// 2^(c - 8) of each row, c the largest exponent of V that the row sees in the tile.
  void tile_factors(const BlockView& view) {
    const TileExponents& ev = x_.keys->ev;
    for (int r = 0; r < kBlock; ++r) {
      c_[r] = view.row[r].empty() ? Exponent(0) : ev.at(view.row[r].end - 1);
      if (not ev.uniform) {
        for (int j = view.row[r].begin; j < view.row[r].end; ++j) c_[r] = max(c_[r], ev.at(j));
      }
      x_.factor[r] = stages::output_factor(c_[r]);
    }
  }

  /// Codes of P (h, and hs without V's exponents where those differ), and the chains of the row
  /// sum: of codes, where any order is exact for E4M3, or of unrounded weights.
  template <bool kMasked, bool kPerKey>
  void weights(const Unit& unit, int first, const BlockView& view) {
    const FloatTag d;
    constexpr int kLanes = static_cast<int>(hn::MaxLanes(FloatTag()));
    constexpr int kParts = kSumChains / kLanes;
    static_assert(kParts * kLanes == kSumChains and kBlock % kSumChains == 0);
    for (int r = 0; r < kBlock; ++r) {
      const Floats addend = hn::Set(d, x_.addend[r]);
      Floats sum[kParts];
      for (Floats& part : sum) part = hn::Zero(d);
      for (int v = view.columns.begin; v < view.columns.end; v += kSumChains) {
        for (int part = 0; part < kParts; ++part) {
          const int column = v + part * kLanes;
          const int at = r * kTile + column;
          const Floats acc = hn::Load(d, x_.s + at);
          const Floats a = factors_of<kPerKey>(unit, first + r, column);
          Floats p = stages::probability<Ops>(acc, a, addend);
          Floats folded = p;
          if constexpr (kPerKey) {
            const TileExponents& ev = x_.keys->ev;
            folded = hn::Mul(
                p, factors(exponents_at(ev, column, -c_[r]), nans_at(ev, column, c_[r].nan)));
          }
          if constexpr (kMasked) {
            const FloatMask inside = lanes_inside(view.row[r], column);
            p = hn::IfThenElseZero(inside, p);
            folded = hn::IfThenElseZero(inside, folded);
          }
          const Floats h = round_element<kRecipe.probability>(folded);
          store_bf16(h, x_.h + at);
          Floats hs = h;
          if constexpr (kPerKey) {
            hs = round_element<kRecipe.probability>(p);
            store_bf16(hs, x_.hs + at);
          }
          sum[part] = hn::Add(sum[part], kRecipe.row_sum == RowSum::kCodes ? hs : p);
        }
      }
      for (int part = 0; part < kParts; ++part) {
        hn::Store(sum[part], d, x_.chains + r * kSumChains + part * kLanes);
      }
    }
  }

  /// Row sums of the block: on the GPU's model by columns of ones, else from the chains.
  void sums(Range columns, const std::uint16_t* hs) {
    if (problem_.sm90_accumulator and kRecipe.row_sum == RowSum::kCodes) {
      multiply(*item_.engine, kBlock, kOnesColumns, columns.size(), hs + columns.begin, kTile,
               x_.ones, kOnesColumns, x_.chains, kOnesColumns, false);
      for (int r = 0; r < kBlock; ++r) x_.sum[r] = x_.chains[r * kOnesColumns];
    } else {
      for (int r = 0; r < kBlock; ++r) x_.sum[r] = sum_of_chains(x_.chains + r * kSumChains);
    }
  }

  /// T, and O and l with the tile added.
  void values(Unit& unit, int first, Range columns) {
    const FloatTag d;
    const int width = x_.width;
    const int lanes = static_cast<int>(float_lanes());
    multiply(*item_.engine, kBlock, width, columns.size(), x_.h + columns.begin, kTile,
             x_.v + static_cast<std::ptrdiff_t>(columns.begin) * width, width, x_.t, width, false);
    for (int r = 0; r < kBlock; ++r) {
      float* const o = unit.o + (first + r) * width;
      const Floats alpha = hn::Set(d, x_.alpha[r]);
      const Floats factor = hn::Set(d, x_.factor[r]);
      for (int v = 0; v < width; v += lanes) {
        const Floats tile = hn::Load(d, x_.t + r * width + v);
        hn::Store(stages::update_output<Ops>(hn::Load(d, o + v), alpha, tile, factor), d, o + v);
      }
    }
    for (int r = 0; r < kBlock; r += lanes) {
      float* const l = unit.l + first + r;
      hn::Store(stages::update_row_sum<Ops>(hn::Load(d, l), hn::Load(d, x_.alpha + r),
                                            hn::Load(d, x_.sum + r)),
                d, l);
    }
  }

  void store_unit(const Unit& unit) {
    const FloatTag d;
    const int width = x_.width;
    for (int r = 0; r < unit.rows; ++r) {
      const std::int64_t token = item_.document.q_token + unit.first + r;
      const std::int64_t at = statistic_index(problem_, item_.head, token);
      const bool keyless = visible(unit.first + r).empty();
      const float m = unit.m[r];
      const float l = keyless ? 1.0f : unit.l[r];
      const Floats divisor = hn::Set(d, l);
      for (int v = 0; v < width; v += static_cast<int>(float_lanes())) {
        hn::Store(hn::Div(hn::Load(d, unit.o + r * width + v), divisor), d, x_.row + v);
      }
      store_row(x_.row, problem_.dim, args_.out.row(token, item_.head));
      args_.lse[at] = keyless ? -kInfinity : stages::log_sum_exp<Fp32Ops>(m, l);
      if constexpr (kRecipe.gradient == GradientOperand::kPlain) {
        args_.state.row_reference[at] = std::bit_cast<std::int32_t>(keyless ? 0.0f : m);
        args_.state.row_sum[at] = l;
      } else {
        // m is -inf where every visible score is NaN; l is NaN there.
        constexpr float kLimit = 1 << 30;
        const float mu = m > -kLimit ? std::min(std::ceil(m), kLimit) : (keyless ? 0 : -kLimit);
        args_.state.row_reference[at] = static_cast<std::int32_t>(mu);
        args_.state.row_sum[at] = keyless ? 1.0f : Fp32Ops::mul(l, stages::rescale<Fp32Ops>(m, mu));
      }
    }
  }

  const Item& item_;
  const Problem& problem_;
  const ForwardArgs& args_;
  Carver carver_;
  ForwardScratch x_;
  HeadRows q_, k_, v_;
  float score_scale_;
  int num_units_ = 0;
  Exponent c_[kBlock];
};

}  // namespace HWY_NAMESPACE
}  // namespace mxattn::kernels::cpu
HWY_AFTER_NAMESPACE();

#endif  // MXATTN_KERNELS_CPU_FAITHFUL_FORWARD_INL_H_
