// The matrix instructions of x86 CPUs as engines of tile_gemm.h. Null where the CPU or the
// operating system lacks them, and on other processors.
#pragma once

#include "kernels/cpu/tile_gemm.h"

namespace mxattn::kernels::cpu {

const TileGemm* avx512_bf16_tile_gemm();
const TileGemm* amx_tile_gemm();

}  // namespace mxattn::kernels::cpu
