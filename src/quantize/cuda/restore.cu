// Operands back to FP32: code times 2^exponent, rotated back where asked.
#include "base/cuda_check.h"
#include "quantize/cuda/quantize.h"
#include "quantize/cuda/tile.cuh"

namespace mxattn::cuda {
namespace {

__global__ void __launch_bounds__(kThreads)
    restore_kernel(const Operand operand, const std::int32_t* cu_seqlens, int num_documents,
                   bool rotate_back, const TensorView<float> y) {
  const int head = blockIdx.y;
  const int lane = threadIdx.x % 32;
  const std::int64_t slot =
      std::int64_t{blockIdx.x} * kTileSlots + threadIdx.x / 32 * kWarpSlots;  // of the warp
  if (slot >= operand.slots) return;
  const Group group = find_group(cu_seqlens, num_documents, slot);
  LaneRows values;
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const std::int64_t row =
        std::int64_t{head} * operand.slots + slot + pass * kRowsAtOnce + lane / 8;
    const uint4 codes = *reinterpret_cast<const uint4*>(operand.codes + row * kDim + lane % 8 * 16);
    const float factor = stages::factor(stages::Exponent::stored(operand.exponents[row]));
    const std::uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
    for (int c = 0; c < kLaneChannels; c += 2) {
      const auto pair = static_cast<std::uint16_t>(words[c / 4] >> (16 * (c / 2 % 2)));
      ptx::from_e4m3x2(pair, values[pass][c], values[pass][c + 1]);
      values[pass][c] = mul_rn(values[pass][c], factor);
      values[pass][c + 1] = mul_rn(values[pass][c + 1], factor);
    }
  }
  if (rotate_back) rotate(values);
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int row = pass * kRowsAtOnce + lane / 8;
    if (row >= group.rows) continue;
    float* const to = y.row(group.token + row, head) + lane % 8 * kLaneChannels;
#pragma unroll
    for (int c = 0; c < kLaneChannels; ++c) to[c] = values[pass][c];
  }
}

}  // namespace

void restore(const Operand& operand, const std::int32_t* cu_seqlens, int num_documents,
             bool rotate_back, const TensorView<float>& y, cudaStream_t stream) {
  const auto tiles = static_cast<unsigned>((operand.slots + kTileSlots - 1) / kTileSlots);
  const dim3 grid(tiles, static_cast<unsigned>(operand.heads));
  restore_kernel<<<grid, kThreads, 0, stream>>>(operand, cu_seqlens, num_documents, rotate_back, y);
  MXATTN_CUDA_CHECK(cudaGetLastError());
}

}  // namespace mxattn::cuda
