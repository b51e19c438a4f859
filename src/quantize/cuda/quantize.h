// BF16 tensors to operands on a device: the codes, exponents and norms of quantize/quantize.h, bit
// for bit, in one pass over the tensor.
//
// Nothing here allocates or waits; everything works inside a captured graph. Head dimensions 64 and
// 128; a call's tensors have the same.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>

#include "base/view.h"
#include "pack/pack.h"
#include "quantize/operand.h"
#include "recipe/recipe.h"

namespace mxattn::cuda {

inline constexpr int kMaxTensors = 3;  // of one call: Q, K and V

/// What one tensor becomes.
struct QuantizeArgs {
  TensorView<const std::uint16_t> x;         // BF16 (total, heads, d)
  const std::int32_t* cu_seqlens = nullptr;  // device, num_documents + 1
  int num_documents = 0;
  bool rotate = false;
  Operand out;                         // device; norms may be null
  std::uint8_t* transposed = nullptr;  // (heads, d, slots), fragment order; may be null
};

/// Words of scratch memory for each tensor of a call, to be added up.
std::int64_t quantize_scratch_words(int heads, std::int64_t slots);

/// Q, K and V, or some of them, in one launch. ScaleGroup::kRunning, kToken and kBlock32. `scratch`
/// must be zero: the caller clears it together with whatever else must be.
void quantize(const Recipe& recipe, std::span<const QuantizeArgs> tensors, std::uint32_t* scratch,
              int multiprocessors, cudaStream_t stream);

/// Maxima of bytes of tokens over their document's chunks (stages::chunk_begin), up to each token:
/// what a scale of dS takes of nV.
struct ChunkMaximaArgs {
  const std::int8_t* values = nullptr;  // (heads, slots): norms; 127, NaN, is largest
  std::int8_t* maxima = nullptr;        // (heads, slots); gap slots may hold anything
  const std::int32_t* cu_seqlens = nullptr;
  int num_documents = 0;
  int heads = 0;
  std::int64_t slots = 0;
};

void make_chunk_maxima(const ChunkMaximaArgs& args, cudaStream_t stream);

/// An operand whose codes are to be copied to (heads, d, slots), as in QuantizeArgs::transposed.
struct Transposition {
  Operand operand;
  std::uint8_t* transposed = nullptr;
};

/// Up to kMaxTensors operands in one launch, from their codes.
void transpose_codes(std::span<const Transposition> operands, cudaStream_t stream);

/// Restored values of the documents' tokens, (tokens, heads, d); NaN where the exponent says so.
void restore(const Operand& operand, const std::int32_t* cu_seqlens, int num_documents,
             bool rotate_back, const TensorView<float>& y, cudaStream_t stream);

/// dO: g = dO / L with its own exponent a token, norms of g and O, and D.
struct GradientArgs {
  TensorView<const std::uint16_t> dout, out;   // BF16 (total_q, heads_q, d)
  const float* row_sum = nullptr;              // L (heads_q, total_q)
  const std::int32_t* cu_seqlens = nullptr;    // of queries
  const std::int32_t* cu_seqlens_k = nullptr;  // tells with the mask which rows see no key
  int num_documents = 0;
  Mask mask;
  Operand g;                            // codes, exponents, norms
  std::uint8_t* transposed = nullptr;   // of g; may be null
  std::int8_t* output_norms = nullptr;  // (heads_q, q_slots)
  float* delta = nullptr;               // (heads_q, q_slots)
  std::uint8_t* live = nullptr;         // (heads_q, q_slots): 1 if any code of g is not 0
};

void prepare_gradient(const Recipe& recipe, const GradientArgs& args, int multiprocessors,
                      cudaStream_t stream);

/// Scales of the dK/dV pass that are in force at a query tile (stages::ChunkScales), and whether it
/// holds any gradient. Tables of them are indexed by (head, slot / 16) of the tile's first slot:
/// documents start at multiples of 16 slots, so no two tiles share an entry.
struct TileScales {
  std::int32_t a, b, c;  // kNanScale: NaN
  std::int32_t live;
};
inline constexpr std::int32_t kNanScale = 0x3FFFFFFF;
inline constexpr std::int32_t kNoScale = -400;  // the maximum of no token

/// Makes the table from what quantize() and prepare_gradient() left; (heads_q, q_slots) each.
struct ScalesArgs {
  const std::int8_t* q_exponents = nullptr;
  const std::int8_t* g_exponents = nullptr;
  const std::int8_t* g_norms = nullptr;
  const std::int8_t* output_norms = nullptr;
  const std::uint8_t* live = nullptr;
  const std::int32_t* cu_seqlens = nullptr;
  int num_documents = 0;
  int heads = 0;
  std::int64_t slots = 0;
  TileScales* scales = nullptr;  // (heads_q, q_slots / 16)
};

void make_tile_scales(const ScalesArgs& args, cudaStream_t stream);

}  // namespace mxattn::cuda
