// The calls: check everything, then work.
#pragma once

#include <mxattn/mxattn.h>

#include "api/problem.h"

namespace mxattn::api {

void forward(const Problem& problem, const mxattn_forward_args& args);
void backward(const Problem& problem, const mxattn_backward_args& args);
void quantize_operand(const Problem& problem, const mxattn_quantize_args& args);
void dequantize_operand(const Problem& problem, const mxattn_quantize_args& args);

}  // namespace mxattn::api
