// The FP8 tensor core of the H200 (sm_90, wgmma with E4M3 operands) bit for bit.
//
// Per k32 step: the exact products and the incoming accumulator are aligned to the largest of their
// exponents and truncated toward zero to 13 fraction bits; their exact sum is truncated toward zero
// to 13 fraction bits of FP32's exponent range. The exponent of a product is the sum of its
// operands' exponents, of which none is below -6 (subnormal E4M3 values are not normalised) and no
// carry counts. Zero products and a zero accumulator take no part. A NaN operand or accumulator
// makes the NaN 0x7FFFFFFF. Steps ascend in k; the order within a step does not matter.
#pragma once

#include "kernels/cpu/tile_gemm.h"

namespace mxattn::kernels::cpu {

/// Interface of TileGemm. Operands hold E4M3 values exactly (or NaN); without `accumulate` the
/// first step has no accumulator.
const TileGemm& sm90_tile_gemm();

}  // namespace mxattn::kernels::cpu
