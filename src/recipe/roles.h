// The operand-role table: which factors enter which matrix product, along which axis a product
// contracts, and what a recipe must satisfy for the products to be possible at all.
//
// The axis decides where a token's exponent goes. A product over channels leaves it outside: it
// multiplies the finished element. A product over tokens has it inside the sum, where no matrix
// instruction of these recipes can apply it: it is folded into P or dS before they are rounded.
#pragma once

#include <cstdint>

#include "recipe/recipe.h"

namespace mxattn {

/// Which tensor an operand comes from.
enum class Role : std::uint8_t { kQ, kK, kV, kGradient };

/// Whether the tokens of a role are the pack's queries; else they are its keys.
constexpr bool is_query_role(Role role) { return role == Role::kQ or role == Role::kGradient; }

/// Whether a role is rotated when the problem says `rotate`: Q and K, with a power of two of
/// channels. A rotation of both leaves their product alone.
constexpr bool is_rotated(Role role, int dim, bool rotate) {
  return rotate and (role == Role::kQ or role == Role::kK) and (dim & (dim - 1)) == 0;
}

enum class Axis : std::uint8_t { kChannels, kKeys, kQueries };

/// What a tensor's role is multiplied with: another role's tensor, or a matrix made on the way.
enum class Partner : std::uint8_t { kTensor, kProbability, kDs };

/// One matrix product: `left` (or P, or dS) by `right`, summed over `axis`.
struct Product {
  const char* formula;
  Partner partner;  // what stands on the left
  Role left;        // meaningful for Partner::kTensor
  Role right;
  Axis axis;
  bool backward;

  /// Whether the exponents of `right`'s tokens lie along the sum and are folded into the left.
  constexpr bool folds() const { return axis != Axis::kChannels; }
};

inline constexpr Product kProducts[] = {
    {"S = Q K^T", Partner::kTensor, Role::kQ, Role::kK, Axis::kChannels, false},
    {"O = P V", Partner::kProbability, {}, Role::kV, Axis::kKeys, false},
    {"dP = g V^T", Partner::kTensor, Role::kGradient, Role::kV, Axis::kChannels, true},
    {"dV = P^T g", Partner::kProbability, {}, Role::kGradient, Axis::kQueries, true},
    {"dQ = dS K", Partner::kDs, {}, Role::kK, Axis::kKeys, true},
    {"dK = dS^T Q", Partner::kDs, {}, Role::kQ, Axis::kQueries, true},
};

static_assert(
    [] {
      for (const Product& product : kProducts) {
        const Axis tokens = is_query_role(product.right) ? Axis::kQueries : Axis::kKeys;
        if (product.folds() and product.axis != tokens) return false;
      }
      return true;
    }(),
    "a product over tokens sums over those of its right factor");

/// The format of a product's left factor.
constexpr Element left_element(const Recipe& recipe, const Product& product) {
  switch (product.partner) {
    case Partner::kTensor:
      return recipe.operand;
    case Partner::kProbability:
      return recipe.probability;
    case Partner::kDs:  // scaled exactly where it is rounded to eight bits
      return recipe.ds_scale == DsScale::kNone ? recipe.probability : Element::kE4m3;
  }
  return Element::kNone;
}

/// Why a recipe cannot work, or null. The registry asserts null for every line when it compiles.
constexpr const char* fault(const Recipe& recipe) {
  for (const Product& product : kProducts) {
    if (left_element(recipe, product) != recipe.operand) {
      return "a product's factors have different formats";
    }
  }
  const bool tensor_scale = recipe.scale_group == ScaleGroup::kTensor;
  if (recipe.quantised() != (recipe.scale_group != ScaleGroup::kNone)) {
    return "E4M3 operands need a scale group, others take none";
  }
  if (recipe.quantised() != (recipe.ds_scale != DsScale::kNone)) {
    return "dS in E4M3 needs a scale, dS in other formats takes none";
  }
  if (recipe.gradient == GradientOperand::kDividedByL and
      (not recipe.quantised() or tensor_scale)) {
    return "g = dO / L has one exponent a token, so Q, K and V must have exponents too";
  }
  if (tensor_scale != (recipe.ds_scale == DsScale::kTensor)) {
    return "one scale a tensor goes with a tensor scale of dS, and only with it";
  }
  if (recipe.output == Element::kE4m3 and not tensor_scale) {
    return "outputs in E4M3 need one scale a tensor";
  }
  if (recipe.strictly_causal() and recipe.ds_scale == DsScale::kBlock32) {
    return "a block of 32 x 32 of dS spans later keys: dQ would not be causal";
  }
  // C1: what the row sum counts is what the products see; otherwise a recipe is a control.
  if (recipe.quantised() and not recipe.control and recipe.row_sum != RowSum::kCodes) {
    return "the row sum of a recipe to train with comes from the codes of P";
  }
  if (recipe.quantised() and not recipe.control and
      recipe.exponent_rule != ExponentRule::kRoundUp) {
    return "a recipe to train with does not saturate";
  }
  return nullptr;
}

}  // namespace mxattn
