// The passes of the oracle. They write every row of their outputs.
#pragma once

#include "kernels/kernel.h"

namespace mxattn::kernels::exact {

void forward(const Problem& problem, const ForwardArgs& args);
void backward(const Problem& problem, const BackwardArgs& args);

}  // namespace mxattn::kernels::exact
