// Parameters of the two backward passes of sm_90a: what the host and the device agree on.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "base/view.h"
#include "kernels/sm90/pass.h"
#include "quantize/cuda/quantize.h"
#include "recipe/recipe.h"
#include "recipe/stages.h"
#include "tile/swizzle.h"

namespace mxattn::kernels::sm90 {

/// Where the FP32 sums of an accumulator stay. kGlobal: in memory that stays in L2, which adds.
enum class SumPlace : std::uint8_t { kShared, kGlobal };

/// Whether the FP32 sums of dV and of dK, 128 keys each, have room in shared memory beside the
/// operands. Else they stay in L2: bytes of global memory that a CTA of the dK/dV pass needs.
constexpr bool sums_fit_shared(int dim) { return dim <= 64; }
constexpr std::int64_t sum_bytes_per_cta(int dim) {
  return sums_fit_shared(dim)
             ? 0
             : std::int64_t{2} * stages::kKeyTile * dim * static_cast<int>(sizeof(float));
}

/// Where instances for tests (kDumpCodes) leave codes: (heads_q, total_q, keys), the query by its
/// token, the key by its position in the query's document. What is masked is 0; what no step visits
/// is not written. Null: not wanted.
struct CodeDump {
  std::uint8_t* t = nullptr;       // dK/dV pass: codes of t
  std::uint8_t* ds_dkv = nullptr;  // codes of dS of either pass
  std::uint8_t* ds_dq = nullptr;
  std::int64_t keys = 0;  // of the longest document
};

struct BackwardParams : PassParams {
  // Codes by rows, boxes of 64 (dK/dV: q, g) or 128 rows of d bytes, in the layout
  // tile::swizzle_of(d); transposed codes (heads, d, slots) in pi order, boxes of d x 64 (dK/dV: q,
  // g; 64-byte swizzle) or d x 128 (128-byte swizzle).
  CUtensorMap q, k, v, g;
  CUtensorMap q_transposed = {}, g_transposed = {};  // dK/dV only
  CUtensorMap k_transposed = {};                     // dQ only

  // Bytes (heads, slots).
  const std::int8_t* g_exponents = nullptr;
  const std::int8_t* g_norms = nullptr;
  const std::int8_t* o_norms = nullptr;
  const std::int8_t* v_norms = nullptr;
  const std::int8_t* v_running_norms = nullptr;   // maximum so far in the key chunk
  const float* delta = nullptr;                   // D (heads_q, q_slots)
  const cuda::TileScales* tile_scales = nullptr;  // (heads_q, q_slots / 16)
  const std::int32_t* row_reference = nullptr;    // mu (heads_q, total_q)

  TensorView<std::uint16_t> dq, dk, dv;  // BF16
  float4* sums = nullptr;                // dK/dV: workspace, sum_bytes_per_cta() a CTA
  float softmax_scale = 0;
  bool rotate = false;
  CodeDump dump;  // instances for tests only
};

}  // namespace mxattn::kernels::sm90
