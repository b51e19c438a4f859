// Forward of the folded FP8 recipes on sm_90a (docs/numerics.md, section 3).
//
// A CTA is persistent and takes items of 128 queries of one document and head from a list, longest
// first. Warpgroup 0 loads: one thread takes items and keeps key tiles in flight through the copy
// engine. Warpgroups 1 and 2 own 64 query rows each and walk the key tiles from the diagonal down:
//
//   WG 1   max exp pack, PV(32) x 4 | S(t-1) beside O = O alpha + T | wait for the turn
//   WG 2   wait for the turn        | max exp pack, PV(32) x 4      | S(t-1) beside ...
//
// A turn passes between the two so that one is in its exponentials while the tensor core works for
// the other. P leaves the score registers in the order pi of tile/swizzle.h, which V^T shares. The
// row sum rides in the PV product as eight columns of ones (tiles whose EV is uniform).
#pragma once

#include "base/division.h"
#include "kernels/sm90/device_ops.h"
#include "kernels/sm90/epilogue.h"
#include "kernels/sm90/forward/config.h"
#include "kernels/sm90/turn.h"
#include "kernels/sm90/work.h"
#include "ptx/barrier.h"
#include "ptx/copy.h"
#include "ptx/math.h"
#include "ptx/wgmma.h"
#include "recipe/stages.h"
#include "tile/fragment.h"
#include "tile/ring.h"
#include "tile/swizzle.h"

namespace mxattn::kernels::sm90::forward {

using stages::Exponent;
using stages::kKeyTile;

inline constexpr std::uint32_t kOneE4m3x4 = 0x38383838u;  // four codes of 1.0

/// What rarely matters of a query row: kept in shared memory, where it costs no register.
struct RowFacts {
  Range visible;  // keys; empty for rows past the document's end
  int eq;         // the stored byte
};

/// How a step goes.
enum class Step : std::uint32_t { kPlain, kMasked, kGeneral, kSkip };

template <class Config>
struct alignas(1024) SharedStorage {
  // producer -> consumers; swizzled as their tensor maps say
  std::uint8_t q[2][Config::kRows * Config::kDim];
  struct alignas(1024) Stage {
    std::uint8_t k[kKeyTile * Config::kDim];
    std::uint8_t v[Config::kDim * kKeyTile];
    std::uint8_t ones[8 * kKeyTile];  // rows d..d+7 of V^T; written once
  } stages[Config::kStages];
  std::uint16_t out[Config::kRows * Config::kDim];        // epilogue, each warp its own 16 rows
  std::uint32_t facts[Config::kStages];                   // beside each key tile: TileFacts
  alignas(16) std::int8_t ek[Config::kStages][kKeyTile];  // of tiles that are not uniform
  alignas(16) std::int8_t ev[Config::kStages][kKeyTile];
  RowFacts rows[Config::kRows];  // written by the first of the row's quad, read by the quad
  Work work[2];                  // beside each q, and EQ of its rows
  alignas(16) std::int8_t eq[2][Config::kRows];
  tile::RingBarriers<2> q_ring;
  tile::RingBarriers<Config::kStages> kv_ring;
};

/// Key tiles of an item as the 64 rows of a warpgroup see them.
struct TileScope {
  Range whole{0, 0};  // tiles of which every row sees all keys
  Range some{0, 0};   // tiles of which any row sees any key

  __device__ __forceinline__ TileScope(const Mask& mask, const Document& d, int first_row) {
    const int last_row = min(first_row + 63, d.q_len - 1);
    if (first_row > last_row) return;
    // The mask is a band: its ends never decrease with the row.
    const Range first = visible_keys(mask, d.q_len, d.k_len, first_row);
    const Range last = visible_keys(mask, d.q_len, d.k_len, last_row);
    whole = {(last.begin + kKeyTile - 1) / kKeyTile, first.end / kKeyTile};
    if (first.begin < last.end) {
      some = {first.begin / kKeyTile, (last.end - 1) / kKeyTile + 1};
    }
  }
  __device__ __forceinline__ Step step(int tile, bool uniform) const {
    if (not some.contains(tile)) return Step::kSkip;
    if (not uniform) return Step::kGeneral;
    return whole.contains(tile) ? Step::kPlain : Step::kMasked;
  }
};

/// What the steps of a key tile want to know, in one word: EK and EV of its first key, and how the
/// step of each warpgroup goes.
struct TileFacts {
  static constexpr std::uint32_t kExponents = 0xFFFFu;

  __device__ __forceinline__ static std::uint32_t pack(std::int8_t ek, std::int8_t ev, Step step0,
                                                       Step step1) {
    return static_cast<std::uint8_t>(ek) |
           static_cast<std::uint32_t>(static_cast<std::uint8_t>(ev)) << 8 |
           static_cast<std::uint32_t>(step0) << 16 | static_cast<std::uint32_t>(step1) << 18;
  }
  __device__ __forceinline__ static std::int8_t ek(std::uint32_t facts) {
    return static_cast<std::int8_t>(facts & 0xFFu);
  }
  __device__ __forceinline__ static std::int8_t ev(std::uint32_t facts) {
    return static_cast<std::int8_t>((facts >> 8) & 0xFFu);
  }
  __device__ __forceinline__ static Step step(std::uint32_t facts, int consumer) {
    return static_cast<Step>((facts >> (16 + 2 * consumer)) & 3u);
  }
};

// ---- producer ---------------------------------------------------------------------------------

template <class Config>
__device__ void load(const ForwardParams& params, SharedStorage<Config>& shared) {
  tile::RingPosition<2> q_at;
  tile::RingPosition<Config::kStages> kv_at;
  while (true) {
    // The queries, and what their item is about.
    const Work taken = take_work<false>(params);
    shared.q_ring.wait_empty(q_at);
    // Read back where it is needed: the loop has few registers.
    Work& work = shared.work[q_at.stage];
    work = taken;
    const std::uint32_t q_full = shared.q_ring.full_at(q_at.stage);
    if (work.last) {
      ptx::mbarrier_arrive(q_full);
      return;
    }
    const std::int64_t query =
        work.item.head * params.q_slots + work.document.q_slot + work.item.first;
    // The last rows of the last document may end before kRows slots do.
    const int eq_bytes = static_cast<int>(
        min(std::int64_t{Config::kRows},
            params.heads_k * params.queries_per_key_head * params.q_slots - query));
    ptx::mbarrier_arrive_expect(q_full, sizeof(shared.q[0]) + eq_bytes);
    ptx::copy_tensor_3d(ptx::shared_address(shared.q[q_at.stage]), &params.q, 0,
                        static_cast<int>(work.document.q_slot) + work.item.first, work.item.head,
                        q_full);
    ptx::copy_bulk(ptx::shared_address(shared.eq[q_at.stage]), params.q_exponents + query, eq_bytes,
                   q_full);
    q_at.advance();

    // Key tiles from the diagonal down to the first visible one.
    const std::int64_t row = work.key_head * params.k_slots + work.document.k_slot;
    const TileScope scope0(params.mask, work.document, work.item.first);
    const TileScope scope1(params.mask, work.document, work.item.first + 64);
    for (int t = work.visits.end - 1; t >= work.visits.begin; --t) {
      const std::int64_t offset = row + t * kKeyTile;
      const std::int64_t last = offset + min(kKeyTile, work.document.k_len - t * kKeyTile) - 1;
      // Running exponents never decrease: their ends tell whether all are equal. The plain step
      // takes the score of the maximum for the maximum of the scores.
      const std::int8_t ek = params.k_exponents[offset], ev = params.v_exponents[offset];
      const bool uniform = ek == params.k_exponents[last] and ev == params.v_exponents[last] and
                           params.score_scale >= 0.0f;
      shared.kv_ring.wait_empty(kv_at);
      auto& stage = shared.stages[kv_at.stage];
      const std::uint32_t full = shared.kv_ring.full_at(kv_at.stage);
      const int slot = static_cast<int>(work.document.k_slot) + t * kKeyTile;
      shared.facts[kv_at.stage] =
          TileFacts::pack(ek, ev, scope0.step(t, uniform), scope1.step(t, uniform));
      // The last tile of the last document may end before 128 slots do.
      const int bytes = uniform ? 0
                                : static_cast<int>(min(std::int64_t{kKeyTile},
                                                       params.heads_k * params.k_slots - offset));
      ptx::mbarrier_arrive_expect(full, sizeof(stage.k) + sizeof(stage.v) + 2 * bytes);
      ptx::copy_tensor_3d(ptx::shared_address(stage.k), &params.k, 0, slot, work.key_head, full);
      ptx::copy_tensor_3d(ptx::shared_address(stage.v), &params.v, slot, 0, work.key_head, full);
      if (not uniform) {
        ptx::copy_bulk(ptx::shared_address(shared.ek[kv_at.stage]), params.k_exponents + offset,
                       bytes, full);
        ptx::copy_bulk(ptx::shared_address(shared.ev[kv_at.stage]), params.v_exponents + offset,
                       bytes, full);
      }
      kv_at.advance();
    }
  }
}

// ---- consumers --------------------------------------------------------------------------------

inline constexpr int kNoUnit = -1000;               // no byte
inline constexpr std::uint32_t kNoFacts = 0x8080u;  // exponents that no token has

/// What a thread keeps of its two query rows over the key tiles.
template <class Config>
struct Rows {
  // O in units of 2^(unit - 8) and l in units of 2^-8: powers of two move through the FMAs of the
  // recipe exactly, so that tiles of equal EV need no factor.
  float o[Config::kOutputs];
  float m[2];
  float l[2];
  int unit[2];  // c of the first tile that the row saw, or kNoUnit
  float a[2];   // score factors of tiles with these facts
  std::uint32_t tile_facts;
  RowFacts* facts;  // of half 0; half 1 is eight rows on

  __device__ __forceinline__ Range visible(int r) const { return facts[8 * r].visible; }
  __device__ __forceinline__ Exponent eq(int r) const {
    return Exponent::stored(static_cast<std::int8_t>(facts[8 * r].eq));
  }

  /// eq: of the item's rows, `first_row` the warpgroup's first of them in the document.
  __device__ __forceinline__ void start(const Mask& mask, const Work& work, const std::int8_t* eq,
                                        int first_row) {
#pragma unroll
    for (int i = 0; i < Config::kOutputs; ++i) o[i] = 0.0f;
    tile_facts = kNoFacts;
    const Document& d = work.document;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first_row + tile::fragment_row(threadIdx.x % 128, r);
      m[r] = -kInfinity;
      l[r] = 0.0f;
      unit[r] = kNoUnit;
      const bool valid = row < d.q_len;
      if (threadIdx.x % 4 == 0) {
        facts[8 * r] = {valid ? visible_keys(mask, d.q_len, d.k_len, row) : Range{0, 0},
                        valid ? eq[row - work.item.first] : 0};
      }
    }
    __syncwarp();
  }
};

/// Score factors for tiles with these facts, which almost never change.
template <class Config>
__device__ __forceinline__ void enter_tile(Rows<Config>& rows, std::uint32_t facts,
                                           float score_scale) {
  const bool same = ((facts ^ rows.tile_facts) & TileFacts::kExponents) == 0;
  rows.tile_facts = facts;
  if (same) return;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    rows.a[r] =
        stages::score_factor(score_scale, rows.eq(r), Exponent::stored(TileFacts::ek(facts)));
  }
}

/// One key tile as a warpgroup sees it, and what follows it.
struct KeyTile {
  int begin;               // first key
  int stage;               // of the ring
  std::uint32_t low;       // of the descriptor of K, V^T and the ones behind it
  std::uint32_t q_low;     // of the descriptor of Q
  std::uint32_t next_low;  // of the next tile
};

template <class Config>
using SoftmaxTurn = Turn<Config::kConsumers, 1>;

template <class Config>
using Layout = tile::Descriptor<Config::kSwizzle>;

/// Issues S = Q K^T of a tile.
template <class Config>
__device__ __forceinline__ void issue_scores(float (&s)[64], std::uint32_t q_low,
                                             std::uint32_t k_low) {
  using Scores = ptx::WgmmaE4m3<kKeyTile>;
  const std::uint64_t q = Layout<Config>::whole(q_low);
  const std::uint64_t k = Layout<Config>::whole(k_low);
  Scores::fresh_ss(s, q, k);
#pragma unroll
  for (int step = 1; step < Config::kDim / stages::kMmaDepth; ++step) {
    Scores::add_ss(s, q + step * tile::kDescriptorStepK32, k + step * tile::kDescriptorStepK32);
  }
  ptx::wgmma_commit_group();
}

/// Issues one quarter of T = P V: 32 keys. The columns of ones make the row sum.
template <class Config>
__device__ __forceinline__ void issue_values(float (&t)[Config::kPartials],
                                             const std::uint32_t (&codes)[4], const KeyTile& tile,
                                             int quarter) {
  using Values = ptx::WgmmaE4m3<Config::kValueColumns>;
  const std::uint64_t v =
      Layout<Config>::whole(tile.low + kKeyTile * Config::kDim / tile::kDescriptorUnit) +
      quarter * tile::kDescriptorStepK32;
  ptx::wgmma_fence();
  if (quarter == 0) {
    Values::fresh_rs(t, codes, v);
  } else {
    Values::add_rs(t, codes, v);
  }
  ptx::wgmma_commit_group();
}

__device__ __forceinline__ bool sees(Range keys, int key) {
  return keys.begin <= key and key < keys.end;
}

/// c_it: exponent of the last key of the tile that the row sees.
__device__ __forceinline__ Exponent last_visible_exponent(const std::int8_t* ev, int begin,
                                                          Range visible) {
  return Exponent::stored(ev[max(min(visible.end, begin + kKeyTile) - 1 - begin, 0)]);
}

/// alpha of both rows, and the new maximum. `top` is the tile's largest score of each row. In a
/// tile that shows every row a key (kMasked false), m_new is finite and equal maxima give 2^0 = 1
/// by themselves.
template <class Config, bool kMasked>
__device__ __forceinline__ void raise_maximum(Rows<Config>& rows, const float (&top)[2],
                                              float (&alpha)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float m_new = fmaxf(rows.m[r], top[r]);
    alpha[r] = stages::rescale<DeviceOps>(rows.m[r], m_new);
    if (kMasked and m_new == rows.m[r]) alpha[r] = 1.0f;
    rows.m[r] = m_new;
  }
}

/// T = T 2^(c - unit), for rows whose unit is another; the first tile that a row sees sets its
/// unit.
template <class Config>
__device__ __forceinline__ void to_units(Rows<Config>& rows, float (&t)[Config::kPartials],
                                         const Exponent (&c)[2], const bool (&saw)[2]) {
  float scale[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (saw[r] and rows.unit[r] == kNoUnit) rows.unit[r] = c[r].nan ? 0 : c[r].value;
    // A row that sees no key of the tile has T = 0 and sum 0, whatever the exponents hold.
    scale[r] = saw[r] ? stages::factor(c[r] - Exponent(rows.unit[r])) : 1.0f;
  }
#pragma unroll
  for (int i = 0; i < Config::kOutputs; ++i) t[i] = mul_rn(t[i], scale[tile::fragment_half(i)]);
}

/// O = O alpha + T, l = l alpha + sum.
template <class Config>
__device__ __forceinline__ void promote(Rows<Config>& rows, const float (&t)[Config::kPartials],
                                        const float (&sum)[2], const float (&alpha)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) rows.l[r] = fma_rn(rows.l[r], alpha[r], sum[r]);
#pragma unroll
  for (int i = 0; i < Config::kOutputs; ++i) {
    rows.o[i] = fma_rn(rows.o[i], alpha[tile::fragment_half(i)], t[i]);
  }
}

__device__ __forceinline__ bool sees_any(Range visible, int begin) {
  return max(visible.begin, begin) < min(visible.end, begin + kKeyTile);
}

/// Step of a tile whose keys share EK and EV: no factor in the loop. Needs score_scale >= 0, so
/// that the maximum of the scores is the score of the maximum.
template <class Config, bool kMasked>
__device__ __forceinline__ void step_uniform(Rows<Config>& rows, float (&s)[64],
                                             const KeyTile& tile, int consumer) {
  SoftmaxTurn<Config>::take(consumer);
  // Columns of the tile that each row sees, counted from the thread's first.
  Range seen[2];
  if constexpr (kMasked) {
    const int first = tile.begin + 2 * (threadIdx.x % 4);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      seen[r] = {rows.visible(r).begin - first, rows.visible(r).end - first};
    }
  }
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    if (kMasked and not sees(seen[tile::fragment_half(i)], 8 * (i >> 2) + (i & 1))) {
      s[i] = -kInfinity;
    }
  }
  // Four chains a row: one would wait for itself.
  float chain[2][4];
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    float& most = chain[tile::fragment_half(i)][2 * ((i >> 2) & 1) + (i & 1)];
    most = i < 8 ? s[i] : fmaxf(most, s[i]);
  }
  float top[2], alpha[2], addend[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float raw =
        tile::quad_max(fmaxf(fmaxf(chain[r][0], chain[r][1]), fmaxf(chain[r][2], chain[r][3])));
    top[r] = stages::score<DeviceOps>(raw, rows.a[r]);
    // 0 times infinity, where the softmax scale is 0.
    if (kMasked and raw == -kInfinity) top[r] = -kInfinity;
  }
  raise_maximum<Config, kMasked>(rows, top, alpha);
#pragma unroll
  for (int r = 0; r < 2; ++r) addend[r] = stages::forward_addend<DeviceOps>(rows.m[r]);

  // P in quarters of 32 keys; each is multiplied as soon as it is packed.
  float t[Config::kPartials];
  std::uint32_t codes[4][4];
#pragma unroll
  for (int g = 0; g < 4; ++g) {
#pragma unroll
    for (int i = 16 * g; i < 16 * (g + 1); ++i) {
      const int r = tile::fragment_half(i);
      const bool masked = kMasked and s[i] == -kInfinity;
      s[i] = stages::probability<DeviceOps>(s[i], rows.a[r], addend[r]);
      if (masked) s[i] = 0.0f;
    }
    tile::pack_operand(codes[g], s + 16 * g);
    issue_values<Config>(t, codes[g], tile, g);
  }
  SoftmaxTurn<Config>::pass(consumer);
  // The next scores are multiplied while T is added to O.
  issue_scores<Config>(s, tile.q_low, tile.next_low);
  ptx::wgmma_wait_group<1>();
  ptx::pin(t);
  const std::int8_t tile_ev = TileFacts::ev(rows.tile_facts);
  if (tile_ev != rows.unit[0] or tile_ev != rows.unit[1]) {
    const Exponent ev = Exponent::stored(tile_ev);
    const bool saw[2] = {not kMasked or sees_any(rows.visible(0), tile.begin),
                         not kMasked or sees_any(rows.visible(1), tile.begin)};
    to_units(rows, t, {ev, ev}, saw);
  }
  promote(rows, t, {t[Config::kOutputs], t[Config::kOutputs + 2]}, alpha);
}

/// Step of any tile: factors of every key in the loop, h and hs packed apart. The same bits as
/// step_uniform for a row whose visible keys share EK and EV.
template <class Config>
__device__ __forceinline__ void step_general(Rows<Config>& rows, float (&s)[64],
                                             const KeyTile& tile, int consumer,
                                             const SharedStorage<Config>& shared,
                                             float score_scale) {
  SoftmaxTurn<Config>::take(consumer);
  const std::int8_t* const ek = shared.ek[tile.stage];
  const std::int8_t* const ev = shared.ev[tile.stage];
  const int column = 2 * (threadIdx.x % 4);
  const Range visible[2] = {rows.visible(0), rows.visible(1)};
  bool saw[2];
  Exponent c[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    saw[r] = sees_any(visible[r], tile.begin);
    c[r] = last_visible_exponent(ev, tile.begin, visible[r]);
  }
  float top[2] = {-kInfinity, -kInfinity};
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    const int r = tile::fragment_half(i);
    const int k = 8 * (i >> 2) + column + (i & 1);
    if (sees(visible[r], tile.begin + k)) {
      const float a = stages::score_factor(score_scale, rows.eq(r), Exponent::stored(ek[k]));
      top[r] = fmaxf(top[r], stages::score<DeviceOps>(s[i], a));
    }
  }
  float alpha[2], addend[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) top[r] = tile::quad_max(top[r]);
  raise_maximum<Config, true>(rows, top, alpha);
#pragma unroll
  for (int r = 0; r < 2; ++r) addend[r] = stages::forward_addend<DeviceOps>(rows.m[r]);

  float t[Config::kPartials];
  float sums[4];
#pragma unroll
  for (int g = 0; g < 4; ++g) {
    std::uint32_t weights[4], weighted[4];  // hs and h
#pragma unroll
    for (int i = 16 * g; i < 16 * (g + 1); ++i) {
      const int r = tile::fragment_half(i);
      const int k = 8 * (i >> 2) + column + (i & 1);
      const float a = stages::score_factor(score_scale, rows.eq(r), Exponent::stored(ek[k]));
      const float p = stages::probability<DeviceOps>(s[i], a, addend[r]);
      s[i] = sees(visible[r], tile.begin + k) ? p : 0.0f;
    }
    tile::pack_operand(weights, s + 16 * g);
#pragma unroll
    for (int i = 16 * g; i < 16 * (g + 1); ++i) {
      const int r = tile::fragment_half(i);
      const int k = 8 * (i >> 2) + column + (i & 1);
      const Exponent key_ev = Exponent::stored(ev[k]);
      // Equal exponents need no factor, NaN ones included: T carries their NaN.
      const float h = key_ev == c[r] ? s[i] : mul_rn(s[i], stages::factor(key_ev - c[r]));
      s[i] = sees(visible[r], tile.begin + k) ? h : 0.0f;
    }
    tile::pack_operand(weighted, s + 16 * g);
    ptx::wgmma_fence();
    using Ones = ptx::WgmmaE4m3<8>;
    const std::uint64_t ones =
        Layout<Config>::whole(tile.low + 2 * kKeyTile * Config::kDim / tile::kDescriptorUnit) +
        g * tile::kDescriptorStepK32;
    if (g == 0) {
      Ones::fresh_rs(sums, weights, ones);
    } else {
      Ones::add_rs(sums, weights, ones);
    }
    ptx::wgmma_commit_group();
    issue_values<Config>(t, weighted, tile, g);
    ptx::wgmma_wait_group<0>();
    ptx::pin(t);
    ptx::pin(sums);
  }
  SoftmaxTurn<Config>::pass(consumer);
  to_units(rows, t, c, saw);
  promote(rows, t, {sums[0], sums[2]}, alpha);
  ptx::wgmma_fence();
  issue_scores<Config>(s, tile.q_low, tile.next_low);
}

/// O, LSE, mu and L of the thread's rows; rows of the document only are written.
template <class Config>
__device__ __forceinline__ void store(const ForwardParams& params, const Work& work,
                                      Rows<Config>& rows, int first_row, std::uint16_t* staging) {
  const int lane = threadIdx.x % 32;
  const int warp_row = first_row + tile::fragment_row(threadIdx.x % 128 - lane, 0);
  const std::int64_t stats = work.item.head * params.total_q + work.document.q_token;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    // O / l in the units of both: what is left of them is one power of two.
    const float l = mul_rn(rows.l[r], pow2(-stages::kProbabilityShift));
    const float unit = pow2(rows.unit[r] == kNoUnit ? 0 : rows.unit[r]);
    const bool keyless = rows.visible(r).empty();
    const Divisor divisor(rows.l[r]);
#pragma unroll
    for (int i = 2 * r; i < Config::kOutputs; i += 4) {
#pragma unroll
      for (int j = i; j < i + 2; ++j) {
        rows.o[j] = keyless ? 0.0f : mul_rn(divisor.divide(rows.o[j]), unit);
      }
    }
    const int row = warp_row + lane / 4 + 8 * r;
    if (lane % 4 == 0 and row < work.document.q_len) {
      const bool finite = rows.m[r] != -kInfinity;
      const float mu = finite ? ceilf(rows.m[r]) : 0.0f;
      const float sum = finite ? mul_rn(l, DeviceOps::exp2(rows.m[r] - mu)) : (keyless ? 1.0f : l);
      params.row_reference[stats + row] = static_cast<int>(mu);
      params.row_sum[stats + row] = sum;
      params.lse[stats + row] =
          keyless ? -kInfinity : stages::log_sum_exp<DeviceOps>(finite ? rows.m[r] : 0.0f, l);
    }
  }

  store_warp_rows<Config::kDim>(rows.o, staging, params.out, work.item.head, work.document.q_token,
                                warp_row, work.document.q_len);
}

template <class Config>
__device__ void attend(const ForwardParams& params, SharedStorage<Config>& shared, int consumer) {
  const int warp = (threadIdx.x / 32) % 4;
  const bool leader = ptx::opaque(threadIdx.x % 32) == 0;
  SoftmaxTurn<Config>::open(consumer);

  constexpr std::uint32_t kStageStep = sizeof(shared.stages[0]) / tile::kDescriptorUnit;
  const std::uint32_t q_base = ptx::opaque(
      Layout<Config>::low(ptx::shared_address(shared.q[0]) + consumer * 64 * Config::kDim));
  const std::uint32_t k_base =
      ptx::opaque(Layout<Config>::low(ptx::shared_address(shared.stages[0].k)));
  tile::RingPosition<2> q_at;
  tile::RingPosition<Config::kStages> kv_at;
  Rows<Config> rows;
  rows.facts = shared.rows + consumer * 64 + tile::fragment_row(threadIdx.x % 128, 0);
  while (true) {
    shared.q_ring.wait_full(q_at);
    const Work& work = shared.work[q_at.stage];
    if (work.last) break;
    const int first_row = work.item.first + 64 * consumer;
    rows.start(params.mask, work, shared.eq[q_at.stage], first_row);
    const std::uint32_t q_low =
        ptx::opaque(q_base + q_at.stage * (sizeof(shared.q[0]) / tile::kDescriptorUnit));
    float s[64];
    int remaining = work.visits.size();
    std::uint32_t facts = 0;
    if (remaining > 0) {
      shared.kv_ring.wait_full(kv_at);
      ptx::wgmma_fence();
      issue_scores<Config>(s, q_low, k_base + kv_at.stage * kStageStep);
      facts = shared.facts[kv_at.stage];
      ptx::wgmma_wait_group<0>();
      ptx::pin(s);
    }
    int begin = (work.visits.end - 1) * kKeyTile;
    for (; remaining > 0; --remaining) {
      enter_tile(rows, facts, params.score_scale);
      KeyTile tile;
      tile.begin = begin;
      tile.stage = kv_at.stage;
      tile.low = k_base + kv_at.stage * kStageStep;
      tile.q_low = q_low;
      // The last step multiplies a tile that is there; nobody reads the result.
      tile::RingPosition<Config::kStages> next = kv_at;
      if (remaining > 1) {
        next.advance();
        shared.kv_ring.wait_full(next);
        facts = shared.facts[next.stage];
      }
      tile.next_low = k_base + next.stage * kStageStep;

      const Step step = TileFacts::step(rows.tile_facts, consumer);
      if (step == Step::kPlain) {
        step_uniform<Config, false>(rows, s, tile, consumer);
      } else if (step == Step::kMasked) {
        step_uniform<Config, true>(rows, s, tile, consumer);
      } else if (step == Step::kGeneral) {
        step_general(rows, s, tile, consumer, shared, params.score_scale);
      } else {
        SoftmaxTurn<Config>::take(consumer);
        SoftmaxTurn<Config>::pass(consumer);
        ptx::wgmma_fence();
        issue_scores<Config>(s, tile.q_low, tile.next_low);
      }
      if (leader) ptx::mbarrier_arrive(shared.kv_ring.empty_at(kv_at.stage));
      kv_at = next;
      begin -= kKeyTile;
      ptx::wgmma_wait_group<0>();
      ptx::pin(s);
    }
    if (not work.visits.empty()) kv_at.advance();
    store(params, work, rows, work.item.first + 64 * consumer,
          shared.out + (consumer * 64 + 16 * warp) * Config::kDim);
    if (leader) ptx::mbarrier_arrive(shared.q_ring.empty_at(q_at.stage));
    q_at.advance();
  }
  SoftmaxTurn<Config>::close(consumer);
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    forward_kernel(const __grid_constant__ ForwardParams params) {
  extern __shared__ std::uint8_t raw[];
  auto& shared = *reinterpret_cast<SharedStorage<Config>*>(raw);

  // The columns of ones behind every V^T tile; equal bytes need no swizzle.
  for (int i = threadIdx.x; i < Config::kStages * 8 * kKeyTile / 4; i += Config::kThreads) {
    auto& stage = shared.stages[i / (8 * kKeyTile / 4)];
    reinterpret_cast<std::uint32_t*>(stage.ones)[i % (8 * kKeyTile / 4)] = kOneE4m3x4;
  }
  if (threadIdx.x == 0) {
    shared.q_ring.initialise(4 * Config::kConsumers);
    shared.kv_ring.initialise(4 * Config::kConsumers);
    ptx::fence_mbarrier_init();
    ptx::prefetch_tensor_map(&params.q);
    ptx::prefetch_tensor_map(&params.k);
    ptx::prefetch_tensor_map(&params.v);
  }
  ptx::fence_proxy_async_shared();
  __syncthreads();

  const int warpgroup = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x) / 128, 0);
  if (warpgroup == 0) {
    ptx::set_max_registers_down<Config::kProducerRegisters>();
    if (threadIdx.x == 0) load(params, shared);
  } else {
    ptx::set_max_registers_up<Config::kConsumerRegisters>();
    attend(params, shared, warpgroup - 1);
  }
}

}  // namespace mxattn::kernels::sm90::forward
