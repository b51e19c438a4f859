// What this CPU offers, in words. Strings live as long as the library.
#pragma once

namespace mxattn::api {

/// SIMD targets that the build holds and the CPU runs, best first, separated by commas.
const char* simd_targets();

/// What multiplies the fast kernels' matrices on this CPU.
const char* matrix_engine();

}  // namespace mxattn::api
