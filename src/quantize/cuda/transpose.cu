// Transposed copies of codes that are there already: what the backward makes of Q and K.
#include "ptx/grid.h"
#include "quantize/cuda/launch.h"
#include "quantize/cuda/quantize.h"
#include "quantize/cuda/tile.cuh"

namespace mxattn::cuda {
namespace {

constexpr int kTiles = 2;  // of a CTA: 128 bytes of a channel at d = 128, 256 at d = 64

/// The tiles of all operands, one operand after the other.
struct Batch {
  Transposition operands[kMaxTensors];
  int ends[kMaxTensors] = {};  // of each operand's items, kTiles tiles each
  int items = 0;
};

template <class L>
__global__ void __launch_bounds__(kThreads, 6)
    transpose_kernel(const __grid_constant__ Batch batch) {
  __shared__ CodeTile<L, kTiles> tile;
  ptx::launch_dependents();
  ptx::wait_on_dependencies();
  constexpr int kSlots = kTiles * L::kSlots;
  int index = 0, begin = 0;
  const int item = blockIdx.x;
  while (item >= batch.ends[index]) begin = batch.ends[index++];
  const Operand& operand = batch.operands[index].operand;
  const int head = (item - begin) % operand.heads;
  const std::int64_t first_slot = (item - begin) / operand.heads * kSlots;
  const int slots = static_cast<int>(min(std::int64_t{kSlots}, operand.slots - first_slot));

  constexpr int kUnits = L::kDim / 16;  // of a row
  constexpr int kThreadUnits = kSlots * kUnits / kThreads;
  const uint4* const from =
      reinterpret_cast<const uint4*>(operand.codes + (head * operand.slots + first_slot) * L::kDim);
  uint4 units[kThreadUnits];
#pragma unroll
  for (int i = 0; i < kThreadUnits; ++i) {
    const int at = i * kThreads + static_cast<int>(threadIdx.x);
    if (at < slots * kUnits) units[i] = __ldg(from + at);
  }
#pragma unroll
  for (int i = 0; i < kThreadUnits; ++i) {
    const int at = i * kThreads + static_cast<int>(threadIdx.x);
    if (at < slots * kUnits) {
      tile.template at<uint4>(tile.offset(at / kUnits, at % kUnits * 16)) = units[i];
    }
  }
  __syncthreads();
  store_transposed(tile,
                   batch.operands[index].transposed + head * operand.slots * L::kDim + first_slot,
                   operand.slots, 0, slots);
}

}  // namespace

void transpose_codes(std::span<const Transposition> operands, cudaStream_t stream) {
  if (operands.empty()) return;
  const int dim = operands.front().operand.dim;
  MXATTN_CHECK(operands.size() <= kMaxTensors, operands.size(), " operands");
  for (const Transposition& x : operands) {
    MXATTN_CHECK(x.operand.dim == dim, "operands of dim ", dim, " and ", x.operand.dim);
  }
  with_layout(dim, [&]<class L>(L) {
    Batch batch;
    for (std::size_t i = 0; i < operands.size(); ++i) {
      batch.operands[i] = operands[i];
      batch.items +=
          operands[i].operand.heads * ((L::tiles(operands[i].operand.slots) + kTiles - 1) / kTiles);
      batch.ends[i] = batch.items;
    }
    if (batch.items == 0) return;
    launch_overlapping(transpose_kernel<L>, dim3(static_cast<unsigned>(batch.items)), kThreads, 0,
                       stream, batch);
  });
}

}  // namespace mxattn::cuda
