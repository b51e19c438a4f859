#include "api/abi.h"

namespace mxattn::api {
namespace {
thread_local std::string t_last_error;
}  // namespace

mxattn_status fail(Status status, const char* message) noexcept {
  try {
    t_last_error = message;
  } catch (...) {
    t_last_error.clear();  // no memory for the text: the status still tells
  }
  return static_cast<mxattn_status>(status);
}

}  // namespace mxattn::api

extern "C" const char* mxattn_last_error(void) { return mxattn::api::t_last_error.c_str(); }
