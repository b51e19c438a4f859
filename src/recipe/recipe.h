// struct Recipe: every numeric choice of an attention scheme, as plain data.
//
// A Recipe is a structural type: kernels take one as a template argument, the oracle and the
// audits read it at run time. registry.inc lists them, one line a recipe; stages.h holds the
// formulas that the fields choose between.
#pragma once

#include <cstdint>
#include <string_view>

namespace mxattn {

/// How operands and probabilities are held.
enum class Element : std::uint8_t { kNone, kBf16, kE4m3 };  // kNone: FP64, no rounding at all

/// Which tokens share the scale of Q, K and V.
enum class ScaleGroup : std::uint8_t {
  kNone,     // no scale: BF16 or exact operands
  kRunning,  // running maximum of the document, rounded up to a multiple of 4: strictly causal
  kToken,    // one token: strictly causal
  kBlock32,  // 32 tokens counted from the document's start: leaks inside the 32
  kTensor,   // the whole tensor, all heads, FP32 scale 448 / amax: leaks everywhere
};

/// Which exponent a group of maximum A takes.
enum class ExponentRule : std::uint8_t {
  kRoundUp,  // least e with A 2^-e <= fmax: nothing saturates
  kFloor,    // floor(log2 A) - emax (OCP MX v1.0): clips up to half a binade
};

/// The forward's row reference m_i.
enum class RowReference : std::uint8_t {
  kMax,      // the real running maximum
  kInteger,  // its ceiling
  kLazy4,    // moves only when the maximum exceeds it by more than 4 (log2 units)
};

/// What the row sum adds up.
enum class RowSum : std::uint8_t { kCodes, kWeights };  // rounded codes of P / unrounded p

/// Order in which a query row meets its key tiles in the forward.
enum class KeyOrder : std::uint8_t { kDescending, kAscending };

/// What the backward quantises as the gradient operand.
enum class GradientOperand : std::uint8_t {
  kDividedByL,  // g = dO / L, one exponent a token; P relative to 2^mu
  kPlain,       // dO with the scale group of Q, K, V; P normalised by the row sum
};

/// The scale of dS (docs/numerics.md).
enum class DsScale : std::uint8_t {
  kNone,     // dS is not scaled (BF16 or exact)
  kNorm,     // from norms of operands: constant over a chunk, no maximum in the loop
  kRow,      // from the largest magnitude of a row and tile
  kBlock32,  // from the largest magnitude of a 32 x 32 block
  kTensor,   // 448 / amax over the tensor, known exactly
};

struct Recipe {
  std::uint8_t id = 0;       // position in the registry
  std::uint8_t version = 1;  // changes whenever bits change
  Element operand = Element::kE4m3;
  Element probability = Element::kE4m3;
  ScaleGroup scale_group = ScaleGroup::kRunning;
  ExponentRule exponent_rule = ExponentRule::kRoundUp;
  RowReference row_reference = RowReference::kMax;
  RowSum row_sum = RowSum::kCodes;
  KeyOrder key_order = KeyOrder::kDescending;
  GradientOperand gradient = GradientOperand::kDividedByL;
  DsScale ds_scale = DsScale::kNorm;
  Element output = Element::kBf16;  // kE4m3: O, dQ, dK, dV are rounded to scaled E4M3 first
  bool control = false;             // what others do: measured and audited, never a default

  constexpr bool operator==(const Recipe&) const = default;

  constexpr bool quantised() const { return operand == Element::kE4m3; }
  /// Whether Q and K are rotated before quantisation unless the caller says otherwise.
  constexpr bool rotates(int dim) const {
    return quantised() and scale_group != ScaleGroup::kTensor and dim == 128;
  }
  /// Changing a token leaves every bit of O, LSE and dQ of earlier tokens as it was.
  constexpr bool strictly_causal() const {
    return scale_group != ScaleGroup::kBlock32 && scale_group != ScaleGroup::kTensor;
  }
};

/// What a registry line adds to the numbers: what people read.
struct RecipeInfo {
  std::string_view name;
  std::string_view form;     // "folded", "literal" or "plain"
  std::string_view summary;  // one line
  Recipe recipe;
};

}  // namespace mxattn
