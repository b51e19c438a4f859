// The oracle: exact attention, and every recipe's roundings, in FP64 with plain loops.
//
// It reads the codes and exponents that the quantiser made and rounds P, dS, D' and the outputs
// exactly as the recipe says; everything else is double precision. One structure serves all
// recipes: they differ in fields of Recipe, never in a loop. Bits depend neither on the thread
// count nor on the place of a document in the pack. Memory is O(tile) a thread and, in the
// backward, O(N): the quantised gradient, D, and outputs whose scale is known at the end only.
#pragma once

#include "kernels/kernel.h"

namespace mxattn::kernels {

const Backend& exact_backend();

}  // namespace mxattn::kernels
