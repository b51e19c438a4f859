// BF16 tensors to operands and back, on the CPU.
//
// Every function is deterministic to the bit, whatever `threads` is and wherever a document lies in
// its pack: the unit of work is one row, and sums over channels have one fixed order.
// Gap slots (between documents and beyond the last) are written like zero tokens: code 0, exponent
// and norm -96 (exponent 0 with ScaleGroup::kTensor), D 0.
#pragma once

#include <cstdint>

#include "base/portability.h"
#include "base/view.h"
#include "pack/pack.h"
#include "quantize/operand.h"
#include "recipe/recipe.h"
#include "recipe/roles.h"
#include "recipe/stages.h"

namespace mxattn {

static_assert(kSlotAlignment == stages::kSlotAlignment);

/// x (tokens, heads, dim), BF16, to codes and exponents by the recipe's scale group and exponent
/// rule; norms too where out.norms is given (not with ScaleGroup::kTensor). out's buffers have
/// at least the pack's slots; all of them are written. With ScaleGroup::kTensor *out.scale takes
/// the factor that restores: the largest magnitude of all documents and heads over 448, or 1.
void quantize(const Recipe& recipe, Role role, const TensorView<const std::uint16_t>& x,
              const Pack& pack, bool rotate, int threads, const Operand& out);

/// What the backward prepares once (GradientOperand::kDividedByL): g = dO / L with norms nG, and
/// two arrays (heads_q, q_slots).
struct GradientState {
  Operand g;                            // codes, exponents eG, norms nG
  std::int8_t* output_norms = nullptr;  // nO
  float* delta = nullptr;               // D = sum over channels of restored g times O
};

/// out and dout: (total_q, heads_q, dim); row_sum: L, (heads_q, total_q). Rows that see no key
/// become zero tokens, whatever their dO holds.
void prepare_gradient(const Recipe& recipe, const Mask& mask,
                      const TensorView<const std::uint16_t>& out,
                      const TensorView<const std::uint16_t>& dout, const float* row_sum,
                      const Pack& pack, int threads, const GradientState& state);

/// The same for `queries` of one document and head: row i of `state`, whose operand has one head
/// and at least queries.size() slots, takes query queries.begin + i.
void prepare_gradient_rows(const Recipe& recipe, const Mask& mask,
                           const TensorView<const std::uint16_t>& out,
                           const TensorView<const std::uint16_t>& dout, const float* row_sum,
                           const Document& document, int head, Range queries,
                           const GradientState& state);

/// Restored values, (tokens, heads, dim); NaN where the exponent is NaN, 0 outside documents. The
/// rotation is undone if `rotate_back` (a caller passes is_rotated()).
void restore(const Operand& operand, Role role, const Pack& pack, bool rotate_back, int threads,
             const TensorView<float>& y);

/// Multiplies each of `count` rows, `stride` elements apart, by the normalised Walsh-Hadamard
/// matrix, FP32. dim is a power of two. Its own inverse up to rounding.
void rotate_rows(float* x, std::int64_t count, int dim, std::int64_t stride, int threads);

/// Order of the tokens of each group of 16 slots in a transposed copy.
enum class TokenOrder : std::uint8_t {
  kNatural,
  kFragment,  // position p holds token fragment_token(p): what a P fragment of sm_90 contracts with
};

/// 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15.
MXATTN_HOST_DEVICE constexpr int fragment_token(int position) {
  return 8 * ((position >> 1) & 1) + 2 * (position / 4) + (position & 1);
}

/// Copies codes to (heads, dim, slots): bytes only, never a second quantisation. slots is a
/// multiple of 16.
void transpose_codes(const Operand& operand, TokenOrder order, int threads,
                     std::uint8_t* transposed);

/// Maxima of norms that the scale of dS needs, (heads, slots) each; -96 in gap slots.
struct NormMaxima {
  std::int8_t* tile = nullptr;     // over the document's tokens of the 128-token tile
  std::int8_t* running = nullptr;  // from the start of the token's chunk up to the token
};

void norm_maxima(const Operand& operand, Role role, const Pack& pack, int threads,
                 const NormMaxima& maxima);

/// Whether all tokens of a tile share one exponent. `exponents` points to the tile's first token,
/// `count` counts the document's tokens in it. Running exponents never decrease: their ends tell.
MXATTN_HOST_DEVICE constexpr bool is_uniform_tile(ScaleGroup group, const std::int8_t* exponents,
                                                  int count) {
  if (count <= 1) return true;
  if (group == ScaleGroup::kRunning) return exponents[0] == exponents[count - 1];
  for (int i = 1; i < count; ++i) {
    if (exponents[i] != exponents[0]) return false;
  }
  return true;
}

}  // namespace mxattn
