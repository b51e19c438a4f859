// Names and sizes of the public dtypes.
#pragma once

#include <mxattn/mxattn.h>

#include <cstdint>

namespace mxattn::api {

constexpr const char* dtype_name(std::int32_t dtype) {
  switch (dtype) {
    case MXATTN_BF16:
      return "bf16";
    case MXATTN_F32:
      return "f32";
    case MXATTN_E4M3:
      return "e4m3";
    case MXATTN_I8:
      return "i8";
    case MXATTN_I32:
      return "i32";
    default:
      return "unknown";
  }
}

/// Bytes of an element, which is also its alignment.
constexpr std::uint64_t dtype_bytes(std::int32_t dtype) {
  switch (dtype) {
    case MXATTN_BF16:
      return 2;
    case MXATTN_F32:
    case MXATTN_I32:
      return 4;
    default:
      return 1;
  }
}

}  // namespace mxattn::api
