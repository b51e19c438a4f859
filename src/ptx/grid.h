// Grids that overlap: what kernels of base/cuda_launch.h begin with.
#pragma once

namespace mxattn::ptx {

/// Lets the grid after this one start as soon as every CTA of this one has called it or ended. PTX
/// ISA 9.7.13.13 griddepcontrol.
__device__ __forceinline__ void launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

/// Waits until the grids before this one have ended and their writes are visible. The same section.
__device__ __forceinline__ void wait_on_dependencies() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

}  // namespace mxattn::ptx
