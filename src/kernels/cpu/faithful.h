// The fast CPU backend: the folded recipes and bf16, tile by tile, forward and backward.
//
// One loop, two engines: with Problem::sm90_accumulator every product goes through the model of the
// H200's FP8 accumulator and results equal the GPU's bit for bit; without it the same loops run on
// the fastest matrix engine of the CPU with FP32 accumulators.
#pragma once

#include "kernels/kernel.h"

namespace mxattn::kernels {

/// Runs fp8, mxfp8, mxfp8_token, mxfp8_floor, fp8_ds_row, fp8_integer_ref and bf16 with d <= 256.
/// Memory beyond inputs, outputs and the state is O(threads), and small tables with an entry per
/// item or per query tile and head: the backward keeps the quantised gradient in dq until it writes
/// dQ there.
const Backend& faithful_backend();

}  // namespace mxattn::kernels
