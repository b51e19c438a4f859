// Preparation of the backward: g = dO / L to codes, its norms and those of O, and D.
//
// As in quantize.cu CTAs stay, and the rows of their next tile are on their way while they work.
#include <algorithm>

#include "base/division.h"
#include "ptx/grid.h"
#include "quantize/cuda/launch.h"
#include "quantize/cuda/quantize.h"
#include "quantize/cuda/tile.cuh"

namespace mxattn::cuda {
namespace {

constexpr int kCtas = 4;      // on a multiprocessor
constexpr int kMinTurns = 6;  // runs of a CTA, where they are as long

/// Rows of O as BF16, one 16-byte unit more apart than they are long: the same unit of eight rows
/// spreads over the banks.
template <class L>
struct OutputTile {
  static constexpr unsigned kRowBytes = L::kDim * 2 + 16;
  alignas(128) std::uint8_t bytes[L::kSlots * kRowBytes];

  __device__ __forceinline__ std::uint8_t* at(int slot, int unit) {
    return bytes + (slot * kRowBytes + unit * 16);
  }
};

template <class L>
struct Shared {
  RowBuffer<L> rows;  // of dO
  OutputTile<L> out;
  CodeTile<L> codes;
  Rows places[kWarps];  // of the warps' slots, each for its warp alone
};

/// x / divisor, IEEE division, and so for `largest`, the largest magnitude of their row. A divisor
/// is a row sum L: 1/2 or more but for roundings, up to 2^126 where it is that of more keys than
/// the state has seen (ring attention), less, or 0, of scores beyond 2^25, or NaN.
template <int kCount>
__device__ __forceinline__ void divide(float (&x)[kCount], float& largest, float divisor) {
  // Beyond this range of Divisor::divide(): rarer than rare.
  if (largest < pow2(Divisor::kLimit - 1) and divisor >= 0.25f and divisor <= pow2(126)) {
    const Divisor by(divisor);
#pragma unroll
    for (int c = 0; c < kCount; ++c) x[c] = by.divide(x[c]);
    largest = by.divide(largest);
  } else {
#pragma unroll
    for (int c = 0; c < kCount; ++c) x[c] = div_rn(x[c], divisor);
    largest = div_rn(largest, divisor);
  }
}

/// Channels q and q + 4 of a unit of O, q the lane's place in its row.
__device__ __forceinline__ std::uint32_t chain_outputs(const std::uint8_t* unit) {
  const std::uint32_t q = threadIdx.x % kRowLanes;
  const auto* const words = reinterpret_cast<const std::uint32_t*>(unit) + q / 2;
  return ptx::permute_bytes(words[0], words[2], q % 2 == 0 ? 0x5410 : 0x7632);
}

/// Largest and least magnitude of elements of O that are not 0, as BF16 bits, which order like
/// magnitudes, NaN last. Both are 0 where there are none.
class Extremes {
 public:
  /// Two elements.
  __device__ __forceinline__ void add(std::uint32_t pair) {
    const std::uint32_t magnitudes = pair & 0x7FFF7FFFu;
    most_ = __vmaxu2(most_, magnitudes);
    // Magnitudes less 1: zeros become the largest.
    below_ = __viaddmin_u16x2(magnitudes, 0xFFFFFFFFu, below_);
  }
  /// Over the lanes of the row.
  __device__ __forceinline__ void reduce() {
#pragma unroll
    for (int lanes = 1; lanes < kRowLanes; lanes *= 2) {
      most_ = __vmaxu2(most_, __shfl_xor_sync(0xFFFFFFFFu, most_, lanes));
      below_ = __vminu2(below_, __shfl_xor_sync(0xFFFFFFFFu, below_, lanes));
    }
  }
  __device__ __forceinline__ int most() const {
    return static_cast<int>(max(most_ & 0xFFFFu, most_ >> 16));
  }
  __device__ __forceinline__ int least() const {
    return static_cast<std::int16_t>(min(below_ & 0xFFFFu, below_ >> 16)) + 1;
  }

 private:
  std::uint32_t most_ = 0, below_ = 0xFFFFFFFFu;
};

/// What is summed over the channels of a row; lanes of the row agree.
struct RowSums {
  float squares;  // of the codes
  float delta;    // of restored codes times O
  float outputs;  // of O
  Extremes extremes;
};

template <class L>
__device__ __forceinline__ RowSums sum_row(Shared<L>& shared, int slot, int exponent) {
  Chain squares, delta, outputs;
  RowSums sums;
  const unsigned first_code = shared.codes.offset(slot, 0);
  const float restore = exponent == stages::kNanExponent ? kNan : pow2(exponent);
#pragma unroll
  for (int c = 0; c < L::kDim; c += 16) {
    float g[4], o[4];
    chain_codes(shared.codes.template at<uint4>(first_code ^ shared.codes.offset(0, c)), g);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::uint32_t pair = chain_outputs(shared.out.at(slot, c / 8 + half));
      unpack_pair(pair, o[2 * half], o[2 * half + 1]);
      sums.extremes.add(pair);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      squares.add(g[i], g[i]);
      delta.add(mul_rn(g[i], restore), o[i]);
      outputs.add(o[i], o[i]);
    }
  }
  sums.squares = squares.total();
  sums.delta = delta.total();
  sums.outputs = outputs.total();
  sums.extremes.reduce();
  return sums;
}

/// Norm exponent of a row of O: of the row times the power of two that brings its largest magnitude
/// into [1, 2), that power added afterwards. Warps call it together.
template <class L>
__device__ __forceinline__ int output_norm(OutputTile<L>& tile, int slot, const RowSums& sums) {
  // In this range that power changes nothing: no square and no sum leaves FP32's normal range,
  // whether the row is scaled or not.
  constexpr int kRange = 30;
  constexpr auto bits = [](int exponent) { return (127 + exponent) << 7; };  // of BF16
  const int most = sums.extremes.most();
  const float largest = __uint_as_float(static_cast<std::uint32_t>(most) << 16);
  const bool finite = largest < kInfinity;
  const bool inside =
      most == 0 or not finite or (most < bits(kRange) and sums.extremes.least() >= bits(-kRange));
  float sum = sums.outputs;
  int exponent = 0;
  if (__any_sync(0xFFFFFFFFu, not inside)) {
    exponent = mxattn::detail::normalise(largest).exponent;
    // Beyond the powers of two that FP32 holds as normal numbers in two steps.
    const int first = clamp_int(-exponent, stages::kFactorExponentMin, stages::kFactorExponentMax);
    const int second =
        clamp_int(-exponent - first, stages::kFactorExponentMin, stages::kFactorExponentMax);
    Chain squares;
#pragma unroll 1
    for (int unit = 0; unit < L::kDim / 8; ++unit) {
      float o[2];
      unpack_pair(chain_outputs(tile.at(slot, unit)), o[0], o[1]);
#pragma unroll
      for (const float v : o) {
        const float x = mul_rn(mul_rn(v, pow2(first)), pow2(second));
        squares.add(x, x);
      }
    }
    sum = squares.total();
  }
  if (not finite) return stages::kNanExponent;
  if (most == 0) return stages::kNormExponentMin;
  return stages::norm_exponent(sum, exponent);
}

/// A tile of one head.
struct Item {
  int tile, head;
};

/// A CTA takes runs of heads of a tile, every gridDim.x-th one. Tiles of all heads advance
/// together.
struct Order {
  int tiles;
  int heads;     // of a tile
  int runs;      // of a tile
  int run_bits;  // 2^run_bits heads make a run

  __device__ __forceinline__ Item first_of(int run) const {
    return {run / runs, run % runs << run_bits};
  }
  __device__ __forceinline__ Item next_of(const Item& item) const {
    const int head = item.head + 1;
    if (head >> run_bits == item.head >> run_bits and head < heads) return {item.tile, head};
    return first_of(item.tile * runs + (item.head >> run_bits) + static_cast<int>(gridDim.x));
  }
};

template <class L>
__global__ void __launch_bounds__(kThreads, kCtas)
    gradient_kernel(const __grid_constant__ GradientArgs args, ExponentRule rule, Order order,
                    bool dout_aligned, bool out_aligned) {
  __shared__ Shared<L> shared;
  ptx::launch_dependents();
  ptx::wait_on_dependencies();
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int slot = warp * L::kWarpSlots;  // of the tile
  const int slots = static_cast<int>(args.g.slots);
  // Rows of the warp's slots in a tile, and of the lane's which see any key, a bit a pass.
  unsigned seeing = 0;
  const auto find = [&](int tile) {
    const int at = tile * L::kSlots + slot;
    const int document = find_document(args.cu_seqlens, args.num_documents, at);
    const Span span = span_of(args.cu_seqlens, args.num_documents, document);
    const int keys = __ldg(args.cu_seqlens_k + document + 1) - __ldg(args.cu_seqlens_k + document);
    Rows rows = rows_of(span, at);
    if (at >= slots) rows.left = 0;  // slots are a multiple of 16
    seeing = 0;
#pragma unroll
    for (int pass = 0; pass < L::kPasses; ++pass) {
      const int row = rows.first + lane_row(pass);
      if (lane_row(pass) < rows.left and
          not visible_keys(args.mask, span.length, keys, row).empty()) {
        seeing |= 1u << pass;
      }
    }
    __syncwarp();
    if (lane == 0) shared.places[warp] = rows;
    __syncwarp();
  };
  // Two groups of copies a tile, each waited for while the other is on its way.
  const auto fetch_gradients = [&](const Item& item) {
    if (item.tile < order.tiles) {
      shared.rows.fetch(args.dout, dout_aligned, item.head, shared.places[warp]);
    }
    ptx::copy_async_commit_group();
  };
  const auto fetch_outputs = [&](const Item& item) {
    if (item.tile < order.tiles) {
      fetch_rows<L>(args.out, out_aligned, item.head, shared.places[warp], OutputTile<L>::kRowBytes,
                    [&](int row, int unit) { return shared.out.at(slot + row, unit); });
    }
    ptx::copy_async_commit_group();
  };
  // Row sums of the lane's rows, asked for a tile ahead.
  float sums[L::kPasses];
  const auto load_sums = [&](const Item& item) {
    const Rows rows = shared.places[warp];
#pragma unroll
    for (int pass = 0; pass < L::kPasses; ++pass) {
      sums[pass] = 1;
      if (lane_row(pass) >= rows.left) continue;
      sums[pass] =
          __ldg(args.row_sum + (item.head * args.dout.tokens + rows.token + lane_row(pass)));
    }
  };

  Item item = order.first_of(blockIdx.x);
  find(item.tile);
  fetch_gradients(item);
  fetch_outputs(item);
  load_sums(item);
  while (true) {
    LaneRows<L> values;
    int exponents[L::kPasses];
    const unsigned seen = seeing;  // of this tile
    const auto sees = [&](int pass) { return (seen >> pass & 1u) != 0; };
    ptx::copy_async_wait_group<1>();
    __syncwarp();  // the lanes' parts of dO are there
    take_rows<L>(shared.rows, values);
#pragma unroll
    for (int pass = 0; pass < L::kPasses; ++pass) {
      if (not sees(pass)) {
        // A zero token, whatever dO holds.
#pragma unroll
        for (float& value : values[pass]) value = 0;
      }
      float largest = row_maximum(values[pass]);
      divide(values[pass], largest, sees(pass) ? sums[pass] : 1.0f);
      exponents[pass] = stages::token_exponent(rule, largest);
    }
    __syncthreads();  // the codes of the tile before have been read
    const int first_slot = item.tile * L::kSlots;
    const std::int64_t head_slots = std::int64_t{item.head} * slots;
    const bool present = first_slot + slot < slots;
    encode_rows<L>(values, exponents, 1.0f, slot, shared.codes);

    const Item next = order.next_of(item);
    const bool ends = next.tile >= order.tiles;
    if (not ends and next.tile != item.tile) find(next.tile);
    fetch_gradients(next);
    ptx::copy_async_wait_group<1>();
    __syncwarp();  // the lanes' codes and their parts of O are there
    if (present) {
      store_rows<L>(shared.codes, slot, args.g.codes + (head_slots + first_slot) * L::kDim);
    }

    const std::int64_t row = head_slots + first_slot + slot;
#pragma unroll
    for (int pass = 0; pass < L::kPasses; ++pass) {
      const int at = slot + lane_row(pass);
      const RowSums sums = sum_row<L>(shared, at, exponents[pass]);
      const int norm = output_norm<L>(shared.out, at, sums);
      if (not present or lane % kRowLanes != 0) continue;
      const std::int64_t to = row + lane_row(pass);
      args.g.exponents[to] = static_cast<std::int8_t>(exponents[pass]);
      args.g.norms[to] =
          static_cast<std::int8_t>(exponents[pass] == stages::kNanExponent
                                       ? stages::kNanExponent
                                       : stages::norm_exponent(sums.squares, exponents[pass]));
      args.delta[to] = not sees(pass) ? 0.0f : (is_nan(sums.delta) ? kNan : sums.delta);
      args.output_norms[to] =
          static_cast<std::int8_t>(sees(pass) ? norm : stages::kNormExponentMin);
      args.live[to] = sums.squares != 0;  // of codes that are 0 or at least 2^-9
    }
    if (not ends) load_sums(next);
    __syncwarp();  // the rows of O have been read
    fetch_outputs(next);
    if (args.transposed != nullptr) {
      __syncthreads();
      store_transposed<L>(shared.codes, args.transposed + head_slots * L::kDim + first_slot, slots,
                          0, slots - first_slot);
    }
    if (ends) return;
    item = next;
  }
}

}  // namespace

void prepare_gradient(const Recipe& recipe, const GradientArgs& args, int multiprocessors,
                      cudaStream_t stream) {
  with_layout(args.g.dim, [&]<class L>(L) {
    Order order;
    order.heads = args.g.heads;
    order.tiles = L::tiles(args.g.slots);
    const std::int64_t items = std::int64_t{order.tiles} * order.heads;
    if (items == 0) return;
    const int most = kCtas * multiprocessors;
    order.run_bits = items >= kMinTurns * 4 * most ? 2 : items >= kMinTurns * 2 * most ? 1 : 0;
    order.runs = ((order.heads - 1) >> order.run_bits) + 1;
    const auto ctas =
        static_cast<unsigned>(std::min<std::int64_t>(std::int64_t{order.tiles} * order.runs, most));
    launch_overlapping(gradient_kernel<L>, dim3(ctas), kThreads, 0, stream, args,
                       recipe.exponent_rule, order, args.dout.has_aligned_rows(),
                       args.out.has_aligned_rows());
  });
}

}  // namespace mxattn::cuda
