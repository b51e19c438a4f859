// The transposed copy of codes that are there already: what the backward makes of Q and K.
#include "base/cuda_check.h"
#include "quantize/cuda/quantize.h"
#include "quantize/cuda/tile.cuh"

namespace mxattn::cuda {
namespace {

__global__ void __launch_bounds__(kThreads)
    transpose_kernel(const std::uint8_t* codes, std::uint8_t* transposed, std::int64_t total) {
  __shared__ CodeTile tile;
  const int head = blockIdx.y;
  const std::int64_t first_slot = std::int64_t{blockIdx.x} * kTileSlots;
  const int slots = static_cast<int>(min(std::int64_t{kTileSlots}, total - first_slot));
  const uint4* from = reinterpret_cast<const uint4*>(codes + (head * total + first_slot) * kDim);
  constexpr int kUnits = kDim / 16;  // of a row
  for (int i = threadIdx.x; i < slots * kUnits; i += kThreads) {
    *reinterpret_cast<uint4*>(tile.unit(i / kUnits, i % kUnits)) = __ldg(from + i);
  }
  __syncthreads();
  store_transposed(tile, transposed + std::int64_t{head} * kDim * total + first_slot, total, slots);
}

}  // namespace

void transpose_codes(const Operand& operand, std::uint8_t* transposed, cudaStream_t stream) {
  const auto tiles = static_cast<unsigned>((operand.slots + kTileSlots - 1) / kTileSlots);
  const dim3 grid(tiles, static_cast<unsigned>(operand.heads));
  transpose_kernel<<<grid, kThreads, 0, stream>>>(operand.codes, transposed, operand.slots);
  MXATTN_CUDA_CHECK(cudaGetLastError());
}

}  // namespace mxattn::cuda
