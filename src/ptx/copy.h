// The bulk copy engine (TMA) and matrix moves between registers and shared memory (sm_90).
#pragma once

#include <cuda.h>

#include <cstdint>

namespace mxattn::ptx {

/// Brings a tensor map into the descriptor cache. PTX ISA 9.7.9.16 prefetch.
__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/// Copies the box at (x, y, z), x innermost, to shared memory; completes on `barrier` by bytes.
/// PTX ISA 9.7.9.27.1.2 cp.async.bulk.tensor.
__device__ __forceinline__ void copy_tensor_3d(std::uint32_t shared, const CUtensorMap* map, int x,
                                               int y, int z, std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(shared),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier)
      : "memory");
}

/// Copies `bytes` (a multiple of 16, both addresses aligned to 16) to shared memory; completes on
/// `barrier` by bytes. PTX ISA 9.7.9.25.4.1 cp.async.bulk.
__device__ __forceinline__ void copy_bulk(std::uint32_t shared, const void* global,
                                          std::uint32_t bytes, std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared),
      "l"(global), "r"(bytes), "r"(barrier)
      : "memory");
}

/// Adds to four floats in global memory, aligned to 16, and does not wait; subnormal results become
/// 0. What one thread adds to one place is added in the order of the program. PTX ISA 9.7.13.7 red.
__device__ __forceinline__ void reduce_add_f32x4(float4* global, const float4& x) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(global), "f"(x.x),
               "f"(x.y), "f"(x.z), "f"(x.w)
               : "memory");
}

/// Stores four 8x8 matrices of 16-bit elements; lanes 8m..8m+7 give the row addresses of matrix m.
/// PTX ISA 9.7.14.5.16 stmatrix.
__device__ __forceinline__ void store_matrix_x4(std::uint32_t shared, std::uint32_t m0,
                                                std::uint32_t m1, std::uint32_t m2,
                                                std::uint32_t m3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared),
               "r"(m0), "r"(m1), "r"(m2), "r"(m3)
               : "memory");
}

/// Copies 16 bytes (both addresses aligned to 16) to shared memory past the first-level cache, of
/// which the first `bytes` come from global memory and the rest are 0. PTX ISA 9.7.9.25.3.1
/// cp.async.
__device__ __forceinline__ void copy_async_16(std::uint32_t shared, const void* global,
                                              std::uint32_t bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(bytes)
               : "memory");
}

/// Closes the thread's group of copy_async, and waits until at most kPending groups are in flight.
/// PTX ISA 9.7.9.25.3.2 cp.async.commit_group, 9.7.9.25.3.3 cp.async.wait_group.
__device__ __forceinline__ void copy_async_commit_group() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <unsigned kPending>
__device__ __forceinline__ void copy_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace mxattn::ptx
