// Does a recipe look into the future? Tested by changing it.
#pragma once

#include <cstdint>

#include "attention.h"
#include "capture.h"

namespace cli {

struct Causality {
  std::int64_t rows_changed = 0;  // rows (token, query head) before a change of which a bit moved
  std::int64_t rows_checked = 0;
  bool strict() const { return rows_changed == 0; }
};

inline constexpr int kCausalityRounds = 4;

/// Multiplies q, k, v and the gradient from a cut on in every document by powers of ten, at other
/// cuts each round, and compares O, LSE and dQ of the tokens before the cuts bit for bit.
Causality check_causality(const Capture& capture, const Layer& layer, Attention& attention);

}  // namespace cli
