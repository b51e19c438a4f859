// Operands back to FP32: code times 2^exponent, rotated back where asked.
#include "quantize/cuda/launch.h"
#include "quantize/cuda/quantize.h"
#include "quantize/cuda/tile.cuh"

namespace mxattn::cuda {
namespace {

template <class L>
__global__ void __launch_bounds__(kThreads)
    restore_kernel(const Operand operand, const std::int32_t* cu_seqlens, int num_documents,
                   bool rotate_back, const TensorView<float> y) {
  const int head = blockIdx.y;
  const int slot = static_cast<int>(blockIdx.x) * L::kSlots +
                   static_cast<int>(threadIdx.x) / 32 * L::kWarpSlots;  // of the warp
  if (slot >= operand.slots) return;
  const Rows rows = rows_of(find_span(cu_seqlens, num_documents, slot), slot);
  LaneRows<L> values;
#pragma unroll
  for (int pass = 0; pass < L::kPasses; ++pass) {
    const std::int64_t row = head * operand.slots + slot + lane_row(pass);
    const float factor = stages::factor(stages::Exponent::stored(operand.exponents[row]));
#pragma unroll
    for (int u = 0; u < L::kUnits; ++u) {
      const uint2 codes =
          *reinterpret_cast<const uint2*>(operand.codes + row * L::kDim + first_channel<L>(u));
      const std::uint32_t words[2] = {codes.x, codes.y};
#pragma unroll
      for (int c = 0; c < 8; c += 2) {
        float* const x = values[pass] + 8 * u + c;
        ptx::from_e4m3x2(static_cast<std::uint16_t>(words[c / 4] >> (8 * (c % 4))), x[0], x[1]);
        x[0] = mul_rn(x[0], factor);
        x[1] = mul_rn(x[1], factor);
      }
    }
  }
  if (rotate_back) rotate<L>(values);
  const float norm = rotate_back ? L::kRotationNorm : 1.0f;
#pragma unroll
  for (int pass = 0; pass < L::kPasses; ++pass) {
    if (lane_row(pass) >= rows.left) continue;
    float* const to = y.row(rows.token + lane_row(pass), head);
#pragma unroll
    for (int u = 0; u < L::kUnits; ++u) {
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        to[first_channel<L>(u) + c] = mul_rn(values[pass][8 * u + c], norm);
      }
    }
  }
}

}  // namespace

void restore(const Operand& operand, const std::int32_t* cu_seqlens, int num_documents,
             bool rotate_back, const TensorView<float>& y, cudaStream_t stream) {
  if (operand.slots == 0) return;
  with_layout(operand.dim, [&]<class L>(L) {
    const dim3 grid(static_cast<unsigned>(L::tiles(operand.slots)),
                    static_cast<unsigned>(operand.heads));
    // The first kernel of a call, and nothing lies between it and those of the caller.
    restore_kernel<L>
        <<<grid, kThreads, 0, stream>>>(operand, cu_seqlens, num_documents, rotate_back, y);
    MXATTN_CUDA_CHECK(cudaGetLastError());
  });
}

}  // namespace mxattn::cuda
