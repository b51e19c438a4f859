// Double precision as an arithmetic of recipe/stages.h, and rounding of doubles to an Element.
//
// The oracle rounds where a recipe rounds an element (E4M3, BF16, FP16) and nowhere else. Sums of
// products of E4M3 codes over a tile are exact in double precision, so that neither their order,
// nor promotion, nor accumulation in place can move a bit of them: none of these exists here.
#pragma once

#include <cmath>
#include <limits>

#include "formats/bf16.h"
#include "formats/fp16.h"
#include "formats/fp8.h"
#include "recipe/recipe.h"
#include "recipe/stages.h"

namespace mxattn::kernels {

struct Fp64Ops {
  using F = double;
  static F set(float x) { return x; }
  static F add(F a, F b) { return a + b; }
  static F sub(F a, F b) { return a - b; }
  static F mul(F a, F b) { return a * b; }
  static F fma(F a, F b, F c) { return a * b + c; }
  static F sub_from_product(F a, F b, F c) { return a * b - c; }
  static F exp2(F x) { return std::exp2(x); }
  static F log2(F x) { return std::log2(x); }
  static F flush(F x) { return x; }
  static F round_fp16(F x) { return mxattn::round_fp16(x); }
};

/// x rounded once to the element, nearest even; kNone keeps it.
inline double round_to_element(Element element, double x) {
  switch (element) {
    case Element::kE4m3:
      return round_e4m3(x);
    case Element::kBf16:
      return round_bf16(x);
    case Element::kNone:
      break;
  }
  return x;
}

/// An exponent as the addend of an exponential: NaN if it is.
inline double addend_of(stages::Exponent e) {
  return e.nan ? std::numeric_limits<double>::quiet_NaN() : static_cast<double>(e.value);
}

}  // namespace mxattn::kernels
