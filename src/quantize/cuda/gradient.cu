// Preparation of the backward: g = dO / L to codes, its norms and those of O, and D.
//
// As in quantize.cu CTAs stay, and the rows of their next tile are on their way while they work.
#include <algorithm>

#include "base/division.h"
#include "quantize/cuda/launch.h"
#include "quantize/cuda/quantize.h"
#include "quantize/cuda/tile.cuh"

namespace mxattn::cuda {
namespace {

constexpr int kCtas = 4;  // on a multiprocessor

/// Rows of O as BF16, 16-byte units of odd rows moved so that two rows spread over the banks.
template <class L>
struct OutputTile {
  uint4 units[L::kSlots * L::kDim / 8];

  __device__ __forceinline__ uint4* at(int slot, int unit) {
    return units + slot * (L::kDim / 8) + (unit ^ (slot & 1) << 2);
  }
};

template <class L>
struct Shared {
  RowBuffer<L> rows;  // of dO
  OutputTile<L> out;
  CodeTile<L> codes;
  Span spans[kWarps];  // where a warp stands, for itself
  Rows next[kWarps];
};

/// x / divisor, IEEE division. A divisor is a row sum L, between 1/2 and the number of tokens, or
/// NaN. Inf may become NaN: either gives the row exponent 127 and codes 0.
template <int kCount>
__device__ __forceinline__ void divide(float (&x)[kCount], float divisor) {
  const Divisor by(divisor);
  float largest = 0;
#pragma unroll
  for (int c = 0; c < kCount; ++c) largest = ptx::max_magnitude(largest, x[c]);
  if (largest < pow2(Divisor::kLimit - 1)) {
#pragma unroll
    for (int c = 0; c < kCount; ++c) x[c] = by.divide(x[c]);
  } else {
    // Values from 1 on are brought into Divisor's range, exactly; rarer than rare.
    constexpr int kShift = 70;
#pragma unroll
    for (int c = 0; c < kCount; ++c) {
      const bool large = fabsf(x[c]) >= 1;
      const float q = by.divide(mul_rn(x[c], large ? pow2(-kShift) : 1.0f));
      x[c] = mul_rn(q, large ? pow2(kShift) : 1.0f);
    }
  }
}

/// Of a unit of O, channels q and q + 4, q the lane's place in its row.
__device__ __forceinline__ void chain_outputs(const uint4& unit, float& low, float& high) {
  const std::uint32_t q = threadIdx.x % kRowLanes;
  const std::uint32_t selector = (2 * q + 1) << 12 | (2 * q) << 8;  // to the upper half
  low = __uint_as_float(ptx::permute_bytes(unit.x, unit.y, selector) & 0xFFFF0000u);
  high = __uint_as_float(ptx::permute_bytes(unit.z, unit.w, selector) & 0xFFFF0000u);
}

/// Largest and least magnitude of elements of O that are not 0, as BF16 bits, which order like
/// magnitudes, NaN last. Both are 0 where there are none.
class Extremes {
 public:
  /// Two elements.
  __device__ __forceinline__ void add(std::uint32_t pair) {
    most_ = __vmaxu2(most_, pair & 0x7FFF7FFFu);
    // Magnitudes less 1: zeros become the largest.
    below_ = __vminu2(below_, ((pair | 0x80008000u) - 0x00010001u) ^ 0x80008000u);
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
  const unsigned first = shared.codes.offset(slot, 0);
  const float restore = exponent == stages::kNanExponent ? kNan : pow2(exponent);
#pragma unroll 2
  for (int c = 0; c < L::kDim; c += 16) {
    float g[4], o[4];
    chain_codes(shared.codes.template at<uint4>(first ^ shared.codes.offset(0, c)), g);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4* const unit = shared.out.at(slot, c / 8 + half);
      chain_outputs(*unit, o[2 * half], o[2 * half + 1]);
      sums.extremes.add(reinterpret_cast<const std::uint32_t*>(unit)[threadIdx.x % kRowLanes]);
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
      chain_outputs(*tile.at(slot, unit), o[0], o[1]);
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

template <class L>
__global__ void __launch_bounds__(kThreads, kCtas)
    gradient_kernel(const __grid_constant__ GradientArgs args, ExponentRule rule, int items,
                    bool dout_aligned, bool out_aligned) {
  __shared__ Shared<L> shared;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int slot = warp * L::kWarpSlots;  // of the tile
  const int heads = args.g.heads;
  const int slots = static_cast<int>(args.g.slots);
  // Rows of the warp's slots in an item: tiles of all heads advance together.
  const auto find = [&](int item, Span span) {
    const int at = item / heads * L::kSlots + slot;
    if (not holds(span, at)) span = find_span(args.cu_seqlens, args.num_documents, at);
    Rows rows = rows_of(span, at);
    if (at >= slots) rows.left = 0;  // slots are a multiple of 16
    __syncwarp();
    if (lane == 0) {
      shared.spans[warp] = span;
      shared.next[warp] = rows;
    }
    __syncwarp();
  };
  // Two groups of copies a tile, each waited for while the other is on its way.
  const auto fetch_gradients = [&](int item) {
    if (item < items) shared.rows.fetch(args.dout, dout_aligned, item % heads, shared.next[warp]);
    ptx::copy_async_commit_group();
  };
  const auto fetch_outputs = [&](int item) {
    if (item < items) {
      fetch_rows<L>(args.out, out_aligned, item % heads, shared.next[warp], [&](int pass, int u) {
        return shared.out.at(slot + lane_row(pass), first_channel<L>(u) / 8);
      });
    }
    ptx::copy_async_commit_group();
  };
  // Row sums and LSE of the lane's rows, asked for a tile ahead.
  float sums[L::kPasses], lse[L::kPasses];
  const auto load_statistics = [&](int item) {
    const Rows rows = shared.next[warp];
#pragma unroll
    for (int pass = 0; pass < L::kPasses; ++pass) {
      sums[pass] = 0;
      lse[pass] = -kInfinity;
      if (lane_row(pass) >= rows.left) continue;
      const std::int64_t at = item % heads * args.dout.tokens + rows.token + lane_row(pass);
      sums[pass] = __ldg(args.row_sum + at);
      lse[pass] = __ldg(args.lse + at);
    }
  };

  int item = blockIdx.x;
  find(item, Span{});
  fetch_gradients(item);
  fetch_outputs(item);
  load_statistics(item);
  while (true) {
    const int next = item + static_cast<int>(gridDim.x);

    // A row that sees no key is a zero token, whatever its dO holds: no row sum is 0.
    float divisors[L::kPasses];
#pragma unroll
    for (int pass = 0; pass < L::kPasses; ++pass) {
      divisors[pass] = lse[pass] != -kInfinity ? sums[pass] : 0.0f;
    }
    if (next < items) {
      find(next, shared.spans[warp]);
      load_statistics(next);
    }
    LaneRows<L> values;
    int exponents[L::kPasses];
    ptx::copy_async_wait_group<1>();
    take_rows<L>(shared.rows, values);
#pragma unroll
    for (int pass = 0; pass < L::kPasses; ++pass) {
      if (divisors[pass] != 0) {
        divide(values[pass], divisors[pass]);
      } else {
#pragma unroll
        for (float& value : values[pass]) value = 0;
      }
    }
    token_exponents<L>(rule, values, 1.0f, exponents);
    __syncthreads();  // the codes of the tile before have been read
    const int first_slot = item / heads * L::kSlots;
    const std::int64_t head_slots = std::int64_t{item % heads} * slots;
    const bool present = first_slot + slot < slots;
    encode_rows<L>(values, exponents, 1.0f, slot,
                   args.g.codes + (head_slots + first_slot) * L::kDim, present, true, shared.codes);
    fetch_gradients(next);
    ptx::copy_async_wait_group<1>();
    __syncwarp();  // the lanes' parts of O are there

    const std::int64_t row = head_slots + first_slot + slot;
#pragma unroll
    for (int pass = 0; pass < L::kPasses; ++pass) {
      const int at = slot + lane_row(pass);
      const RowSums sums = sum_row<L>(shared, at, exponents[pass]);
      const int norm = output_norm<L>(shared.out, at, sums);
      if (not present or lane % kRowLanes != 0) continue;
      const bool sees = divisors[pass] != 0;
      const std::int64_t to = row + lane_row(pass);
      args.g.exponents[to] = static_cast<std::int8_t>(exponents[pass]);
      args.g.norms[to] =
          static_cast<std::int8_t>(exponents[pass] == stages::kNanExponent
                                       ? stages::kNanExponent
                                       : stages::norm_exponent(sums.squares, exponents[pass]));
      args.delta[to] = not sees ? 0.0f : (is_nan(sums.delta) ? kNan : sums.delta);
      args.output_norms[to] = static_cast<std::int8_t>(sees ? norm : stages::kNormExponentMin);
      args.live[to] = sums.squares != 0;  // of codes that are 0 or at least 2^-9
    }
    __syncwarp();  // the rows of O have been read
    fetch_outputs(next);
    if (args.transposed != nullptr) {
      __syncthreads();
      store_transposed<L>(shared.codes, args.transposed + head_slots * L::kDim + first_slot, slots,
                          0, slots - first_slot);
    }
    if (next >= items) return;
    item = next;
  }
}

}  // namespace

void prepare_gradient(const Recipe& recipe, const GradientArgs& args, int multiprocessors,
                      cudaStream_t stream) {
  with_layout(args.g.dim, [&]<class L>(L) {
    const int items = L::tiles(args.g.slots) * args.g.heads;
    if (items == 0) return;
    const int ctas = std::min(items, kCtas * multiprocessors);
    gradient_kernel<L><<<ctas, kThreads, 0, stream>>>(args, recipe.exponent_rule, items,
                                                      is_aligned(args.dout), is_aligned(args.out));
    MXATTN_CUDA_CHECK(cudaGetLastError());
  });
}

}  // namespace mxattn::cuda
