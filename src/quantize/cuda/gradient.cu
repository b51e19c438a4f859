// Preparation of the backward: g = dO / L to codes, its norms and those of O, and D.
#include "base/cuda_check.h"
#include "base/division.h"
#include "quantize/cuda/quantize.h"
#include "quantize/cuda/tile.cuh"

namespace mxattn::cuda {
namespace {

/// Rows of O as BF16, 16-byte units permuted so that reading down the slots spreads over the banks.
struct OutputTile {
  alignas(16) std::uint16_t elements[kTileSlots * kDim];

  __device__ __forceinline__ uint4* unit(int slot, int index) {
    return reinterpret_cast<uint4*>(elements + slot * kDim) + (index ^ (slot & 15));
  }
};

struct Shared {
  CodeTile codes;
  OutputTile out;
  std::int8_t exponents[kTileSlots];
  std::int32_t token[kTileSlots];  // from the packed tensors' start, -1 in gaps
};

/// Copies the group's rows of O to shared memory.
__device__ __forceinline__ void stage_output(const TensorView<const std::uint16_t>& out, int head,
                                             const Group& group, int group_slot, OutputTile& tile) {
  const int lane = threadIdx.x % 32;
  const bool aligned = reinterpret_cast<std::uintptr_t>(out.data) % 16 == 0 and
                       out.token_stride % 8 == 0 and out.head_stride % 8 == 0;
  for (int i = lane; i < kWarpSlots * kDim / 8; i += 32) {
    const int row = i / (kDim / 8);
    const int unit = i % (kDim / 8);
    union {
      uint4 word;
      std::uint16_t elements[8];
    } raw;
    raw.word = uint4{0, 0, 0, 0};
    if (row < group.rows) {
      const std::uint16_t* from = out.row(group.token + row, head) + unit * 8;
      if (aligned) {
        raw.word = __ldg(reinterpret_cast<const uint4*>(from));
      } else {
#pragma unroll
        for (int c = 0; c < 8; ++c) raw.elements[c] = from[c];
      }
    }
    *tile.unit(group_slot + row, unit) = raw.word;
  }
}

/// x / divisor, IEEE division. A divisor is a row sum L > 1/2, or NaN.
__device__ __forceinline__ void divide(float (&x)[kLaneChannels], float divisor) {
  float largest = 0;
#pragma unroll
  for (int c = 0; c < kLaneChannels; ++c) largest = fmaxf(largest, fabsf(x[c]));
  // Gradients that Divisor cannot take are rarer than rare; NaN goes either way.
  if (largest < pow2(Divisor::kLimit - 1) and divisor < pow2(Divisor::kLimit)) {
    const Divisor by(divisor);
#pragma unroll
    for (int c = 0; c < kLaneChannels; ++c) x[c] = by.divide(x[c]);
  } else {
#pragma unroll
    for (int c = 0; c < kLaneChannels; ++c) x[c] = div_rn(x[c], divisor);
  }
}

/// body(channel, value) for a row of O, channels ascending.
template <class Body>
__device__ __forceinline__ void for_each_output(OutputTile& tile, int slot, Body body) {
#pragma unroll 1
  for (int u = 0; u < kDim / 8; ++u) {
    const uint4 unit = *tile.unit(slot, u);
    const std::uint32_t words[4] = {unit.x, unit.y, unit.z, unit.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      body(8 * u + 2 * w, __uint_as_float(words[w] << 16));
      body(8 * u + 2 * w + 1, __uint_as_float(words[w] & 0xFFFF0000u));
    }
  }
}

/// Norm exponent of a row of O: of the row times the power of two that brings its largest magnitude
/// into [1, 2), that power added afterwards.
__device__ __forceinline__ int output_norm(OutputTile& tile, int slot) {
  std::uint32_t largest = 0;
  for_each_output(tile, slot,
                  [&](int, float v) { largest = max(largest, __float_as_uint(v) & 0x7FFFFFFFu); });
  const float magnitude = __uint_as_float(largest);
  if (not(magnitude < kInfinity)) return stages::kNanExponent;
  if (largest == 0) return stages::kNormExponentMin;
  const int exponent = mxattn::detail::normalise(magnitude).exponent;
  // Beyond the powers of two that FP32 holds as normal numbers in two steps.
  const int first = clamp_int(-exponent, stages::kFactorExponentMin, stages::kFactorExponentMax);
  const float factor = pow2(first);
  const float second = pow2(-exponent - first);
  Chains squares;
  for_each_output(tile, slot, [&](int c, float v) {
    const float x = mul_rn(mul_rn(v, factor), second);
    squares.add(c, x, x);
  });
  return stages::norm_exponent(squares.total(), exponent);
}

__global__ void __launch_bounds__(kThreads, 2)
    gradient_kernel(const GradientArgs args, ExponentRule rule, std::int64_t total_q) {
  extern __shared__ std::uint8_t raw[];
  Shared& shared = *reinterpret_cast<Shared*>(raw);
  const int head = blockIdx.y;
  const std::int64_t first_slot = std::int64_t{blockIdx.x} * kTileSlots;
  const int slots = static_cast<int>(min(std::int64_t{kTileSlots}, args.g.slots - first_slot));
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const std::int64_t row = std::int64_t{head} * args.g.slots + first_slot;

  if (warp * kWarpSlots < slots) {
    const Group group =
        find_group(args.cu_seqlens, args.num_documents, first_slot + warp * kWarpSlots);
    LaneRows values;
    int exponents[kPasses];
    load_rows(args.dout, head, group, values);
    stage_output(args.out, head, group, warp * kWarpSlots, shared.out);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int r = pass * kRowsAtOnce + lane / 8;
      const bool token = r < group.rows;
      const std::int64_t stat = head * total_q + group.token + r;
      // A row that sees no key is a zero token, whatever its dO holds.
      const bool seeing = token and args.lse[stat] != -kInfinity;
      const float sum = seeing ? args.row_sum[stat] : 1.0f;
      divide(values[pass], sum);
#pragma unroll
      for (int c = 0; c < kLaneChannels; ++c) values[pass][c] = seeing ? values[pass][c] : 0.0f;
    }
    token_exponents(rule, values, exponents);
    encode_rows(values, exponents, warp * kWarpSlots, args.g.codes + row * kDim, shared.codes);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int r = pass * kRowsAtOnce + lane / 8;
      if (lane % 8 == 0) {
        const int slot = warp * kWarpSlots + r;
        shared.exponents[slot] = static_cast<std::int8_t>(exponents[pass]);
        const bool seeing =
            r < group.rows and args.lse[head * total_q + group.token + r] != -kInfinity;
        shared.token[slot] = seeing ? static_cast<std::int32_t>(group.token + r) : -1;
      }
    }
  }
  __syncthreads();

  // One thread a row: sums over channels have one fixed order.
  const int slot = threadIdx.x;
  if (slot < slots) {
    const int exponent = shared.exponents[slot];
    args.g.exponents[row + slot] = static_cast<std::int8_t>(exponent);
    Chains squares, delta;
    std::uint32_t any = 0;
    const float restore = exponent == stages::kNanExponent ? kNan : pow2(exponent);
    // Codes and O walk the channels together.
#pragma unroll 1
    for (int u = 0; u < kDim / 16; ++u) {
      const uint4 codes = *reinterpret_cast<const uint4*>(shared.codes.unit(slot, u));
      const uint4 outs[2] = {*shared.out.unit(slot, 2 * u), *shared.out.unit(slot, 2 * u + 1)};
      const std::uint32_t code_words[4] = {codes.x, codes.y, codes.z, codes.w};
      const std::uint32_t out_words[8] = {outs[0].x, outs[0].y, outs[0].z, outs[0].w,
                                          outs[1].x, outs[1].y, outs[1].z, outs[1].w};
      any |= (codes.x | codes.y | codes.z | codes.w) & 0x7F7F7F7Fu;
#pragma unroll
      for (int pair = 0; pair < 8; ++pair) {
        float low, high;
        ptx::from_e4m3x2(static_cast<std::uint16_t>(code_words[pair / 2] >> (16 * (pair % 2))), low,
                         high);
        const int c = 16 * u + 2 * pair;
        squares.add(c, low, low);
        squares.add(c + 1, high, high);
        delta.add(c, mul_rn(low, restore), __uint_as_float(out_words[pair] << 16));
        delta.add(c + 1, mul_rn(high, restore), __uint_as_float(out_words[pair] & 0xFFFF0000u));
      }
    }
    const bool seeing = shared.token[slot] >= 0;
    args.g.norms[row + slot] =
        static_cast<std::int8_t>(stages::norm_exponent(squares.total(), exponent));
    const float d = delta.total();
    args.delta[row + slot] = not seeing ? 0.0f : (is_nan(d) ? kNan : d);
    args.output_norms[row + slot] =
        static_cast<std::int8_t>(seeing ? output_norm(shared.out, slot) : stages::kNormExponentMin);
    args.live[row + slot] = any != 0;
  }
  if (args.transposed != nullptr) {
    store_transposed(shared.codes,
                     args.transposed + std::int64_t{head} * kDim * args.g.slots + first_slot,
                     args.g.slots, slots);
  }
}

}  // namespace

void prepare_gradient(const Recipe& recipe, const GradientArgs& args, cudaStream_t stream) {
  const int tiles = static_cast<int>((args.g.slots + kTileSlots - 1) / kTileSlots);
  MXATTN_CUDA_CHECK(cudaFuncSetAttribute(
      gradient_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared)));
  gradient_kernel<<<dim3(tiles, args.g.heads), kThreads, sizeof(Shared), stream>>>(
      args, recipe.exponent_rule, args.dout.tokens);
  MXATTN_CUDA_CHECK(cudaGetLastError());
}

}  // namespace mxattn::cuda
