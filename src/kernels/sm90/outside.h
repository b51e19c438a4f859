// Rows of capacity behind the last document.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "base/view.h"

namespace mxattn::kernels::sm90 {

/// What to write behind the last document: zeros into the tensors (those with data), and into the
/// row statistics (heads, total) of the first one, where there are any, what a row that sees no key
/// has.
struct OutsideArgs {
  struct Rows {
    TensorView<std::uint16_t> tensor;
    const std::int32_t* end = nullptr;  // device: the last entry of its cu_seqlens
  };
  Rows rows[3];
  float* lse = nullptr;
  std::int32_t* row_reference = nullptr;
  float* row_sum = nullptr;
  std::int64_t total = 0;
  int heads = 0;
};

void fill_outside(const OutsideArgs& args, int num_ctas, cudaStream_t stream);

}  // namespace mxattn::kernels::sm90
