#include "tile/tensor_map.h"

#include <cuda_runtime_api.h>

#include "base/error.h"

namespace mxattn::tile {
namespace {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// Found through the runtime, so that the library does not link the driver and loads on machines
// without one.
EncodeTiled encode_tiled() {
  static const EncodeTiled function = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found{};
    const cudaError_t status = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry,
                                                                12000, cudaEnableDefault, &found);
    if (status != cudaSuccess or found != cudaDriverEntryPointSuccess) entry = nullptr;
    return reinterpret_cast<EncodeTiled>(entry);
  }();
  if (function == nullptr) {
    throw Error(Status::kCuda, "the driver has no cuTensorMapEncodeTiled: CUDA 12 or newer needed");
  }
  return function;
}

}  // namespace

CUtensorMap make_byte_tensor_map(const void* data, std::int64_t inner, std::int64_t middle,
                                 std::int64_t outer, std::int64_t middle_stride,
                                 std::int64_t outer_stride, int box_inner, int box_middle,
                                 Swizzle swizzle) {
  const cuuint64_t dims[3] = {static_cast<cuuint64_t>(inner), static_cast<cuuint64_t>(middle),
                              static_cast<cuuint64_t>(outer)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(middle_stride),
                                 static_cast<cuuint64_t>(outer_stride)};
  const cuuint32_t box[3] = {static_cast<cuuint32_t>(box_inner),
                             static_cast<cuuint32_t>(box_middle), 1};
  const cuuint32_t element_strides[3] = {1, 1, 1};
  CUtensorMap map;
  const CUresult result = encode_tiled()(
      &map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, const_cast<void*>(data), dims, strides, box,
      element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
      swizzle == Swizzle::k128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw Error(Status::kCuda,
                detail::concat("cuTensorMapEncodeTiled refused (", inner, ", ", middle, ", ", outer,
                               ") with strides ", middle_stride, ", ", outer_stride, ": error ",
                               static_cast<int>(result)));
  }
  return map;
}

}  // namespace mxattn::tile
