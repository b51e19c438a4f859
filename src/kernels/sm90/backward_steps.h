// What the two backward passes share on the device: scores, exponents in tables and in shared
// memory, how a phase goes, scales of dS by rows, codes for tests.
#pragma once

#include <cstdint>

#include "kernels/sm90/backward.h"
#include "kernels/sm90/device_ops.h"
#include "ptx/wgmma.h"
#include "recipe/exponents.h"
#include "recipe/stages.h"
#include "tile/fragment.h"
#include "tile/swizzle.h"

namespace mxattn::kernels::sm90 {

__device__ __forceinline__ stages::Exponent exponent_of(std::int32_t value) {
  return value == cuda::kNanScale ? stages::Exponent(0, true) : stages::Exponent(value);
}
__device__ __forceinline__ std::int32_t value_of(stages::Exponent e) {
  return e.nan ? cuda::kNanScale : e.value;
}

/// How a phase goes: without masks, with masks, with factors in the loop, or, in the first step of
/// an item of keys, not at all, because everything is masked.
enum class Phase : std::uint32_t { kPlain, kMasked, kGeneral, kSkip };

/// Issues s = A_s B_s^T and dp = A_dp B_dp^T, 64 rows each, a group of MMAs each: scores and dP.
/// All operands lie in shared memory in the layout of rows.
template <class Config, int kColumns>
__device__ __forceinline__ void issue_scores(float (&s)[kColumns / 2], float (&dp)[kColumns / 2],
                                             std::uint32_t a_s, std::uint32_t a_dp,
                                             std::uint32_t b_s, std::uint32_t b_dp) {
  using Mma = ptx::WgmmaE4m3<kColumns>;
  const std::uint64_t as = tile::k_major_descriptor(Config::kRowSwizzle, a_s);
  const std::uint64_t ad = tile::k_major_descriptor(Config::kRowSwizzle, a_dp);
  const std::uint64_t bs = tile::k_major_descriptor(Config::kRowSwizzle, b_s);
  const std::uint64_t bd = tile::k_major_descriptor(Config::kRowSwizzle, b_dp);
  Mma::fresh_ss(s, as, bs);
#pragma unroll
  for (int k = 1; k < Config::kDim / stages::kMmaDepth; ++k) {
    Mma::add_ss(s, as + k * tile::kDescriptorStepK32, bs + k * tile::kDescriptorStepK32);
  }
  ptx::wgmma_commit_group();
  Mma::fresh_ss(dp, ad, bd);
#pragma unroll
  for (int k = 1; k < Config::kDim / stages::kMmaDepth; ++k) {
    Mma::add_ss(dp, ad + k * tile::kDescriptorStepK32, bd + k * tile::kDescriptorStepK32);
  }
  ptx::wgmma_commit_group();
}

/// By all threads of a CTA: rows of stages that its first items never fill must hold finite codes.
template <class Config, class Stage, int kStages>
__device__ __forceinline__ void clear_stages(Stage (&stages)[kStages]) {
  for (int i = threadIdx.x; i < static_cast<int>(sizeof(stages) / 16); i += Config::kThreads) {
    reinterpret_cast<uint4*>(stages)[i] = uint4{0, 0, 0, 0};
  }
}

/// DsScale::kRow: dS as 64-row accumulators hold it, to codes with one exponent a row, which
/// `largest`, the largest magnitude in the thread's registers, decides with those of the quad.
/// `dS 2^(... - r)` goes in; `scale` becomes the factor of what the codes are multiplied with.
template <int kRegisters>
__device__ __forceinline__ void encode_by_row(const float (&ds)[kRegisters],
                                              const float (&largest)[2],
                                              const stages::Exponent (&r)[2],
                                              std::uint32_t (&codes)[kRegisters / 16][4],
                                              float (&scale)[2]) {
  float down[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const stages::Exponent extra = stages::Exponent::stored(static_cast<std::int8_t>(
        stages::token_exponent(ExponentRule::kRoundUp, tile::quad_max(largest[h]))));
    down[h] = stages::factor(-extra);
    scale[h] = stages::factor(r[h] + extra);
  }
#pragma unroll
  for (int k = 0; k < kRegisters / 16; ++k) {
    float x[16];
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      x[j] = mul_rn(ds[16 * k + j], down[tile::fragment_half(j)]);
    }
    tile::pack_operand(codes[k], x);
  }
}

/// Instances for tests: calls put(half, column, code) for the codes of a packed operand, columns
/// counted from the operand's first.
template <class Put>
__device__ __forceinline__ void for_each_code(const std::uint32_t (&codes)[4], const Put& put) {
#pragma unroll
  for (int word = 0; word < 4; ++word) {
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      // As tile::pack_operand takes them.
      const int i = 8 * (word / 2) + 4 * (b / 2) + 2 * (word % 2) + b % 2;
      put(word % 2, tile::fragment_column(threadIdx.x, i),
          static_cast<std::uint8_t>(codes[word] >> (8 * b)));
    }
  }
}

}  // namespace mxattn::kernels::sm90
