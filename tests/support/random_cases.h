// Random attention problems for the GPU kernels: lengths at every border, masks, grouped heads,
// scales that make exponents non-uniform, and NaN behind the last document.
#pragma once

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <vector>

#include "support/attention_case.h"
#include "support/inputs.h"

namespace mxattn::test {

inline constexpr std::uint16_t kNanBits = 0xFFFF;

/// Fills the rows behind the last document with NaN.
inline void poison_tails(AttentionCase& test) {
  const Pack& pack = test.pack();
  const Document& last = pack.documents.back();
  const auto q = static_cast<std::ptrdiff_t>(test.q_at(last.q_token + last.q_len));
  const auto k = static_cast<std::ptrdiff_t>(test.k_at(last.k_token + last.k_len));
  std::fill(test.q.begin() + q, test.q.end(), kNanBits);
  std::fill(test.dout.begin() + q, test.dout.end(), kNanBits);
  std::fill(test.k.begin() + k, test.k.end(), kNanBits);
  std::fill(test.v.begin() + k, test.v.end(), kNanBits);
}

/// Multiplies every row of a tensor by a power of two in [2^-spread, 2^spread].
inline void spread_rows(Bf16Vector& x, int dim, int spread, Normal& random) {
  for (std::size_t i = 0; i < x.size(); i += static_cast<std::size_t>(dim)) {
    multiply(x, i, static_cast<std::size_t>(dim),
             std::ldexp(1.0, random.below(2 * spread + 1) - spread));
  }
}

/// Sets half of the rows to 0, in runs of up to 150.
inline void zero_rows(Bf16Vector& x, int dim, Normal& random) {
  const auto row = static_cast<std::size_t>(dim);
  for (std::size_t at = 0; at < x.size();) {
    const std::size_t end =
        std::min(x.size(), at + row * static_cast<std::size_t>(1 + random.below(150)));
    if (random.below(2) == 0) multiply(x, at, end - at, 0);
    at = end;
  }
}

inline Mask random_mask(Normal& random) {
  switch (random.below(6)) {
    case 0:
      return {};
    case 1:
      return {.causal = true, .window_left = random.below(200)};
    case 2:
      return {.window_left = random.below(150), .window_right = random.below(150)};
    case 3:
      return {.window_right = random.below(100)};
    default:
      return {.causal = true};
  }
}

inline int random_length(Normal& random, int most) {
  constexpr int kBorders[] = {0, 1, 16, 31, 32, 33, 63, 64, 65, 127, 128, 129};
  const int length = random.below(2) == 0
                         ? kBorders[random.below(static_cast<int>(std::size(kBorders)))]
                         : random.below(most + 1);
  return std::min(length, most);
}

/// A pack of at most `most` tokens or so.
inline AttentionCase random_case(std::uint64_t seed, int most, const Recipe& recipe = recipes::fp8,
                                 int dim = 128) {
  Normal random(seed);
  CaseSpec spec;
  spec.recipe = recipe;
  spec.dim = dim;
  const int documents = 1 + random.below(6);
  const bool other_keys = random.below(3) == 0;
  int left = most;
  for (int i = 0; i < documents; ++i) {
    // Skewed: the first document may take most of it.
    const int length = random_length(random, i == 0 ? left : std::min(left, most / 3));
    left -= length;
    spec.q_lens.push_back(length);
    spec.k_lens.push_back(other_keys ? random_length(random, most / 2) : length);
  }
  constexpr int kHeads[][2] = {{1, 1}, {2, 1}, {2, 2}, {3, 1}, {8, 1}, {4, 2}};
  const auto& heads = kHeads[random.below(static_cast<int>(std::size(kHeads)))];
  spec.heads_q = heads[0];
  spec.heads_k = heads[1];
  spec.mask = random_mask(random);
  spec.spare = random.below(2) * random.below(70);
  constexpr float kScales[] = {0, 0, 0, 0.3f, 0.01f, -0.1f};
  spec.softmax_scale = kScales[random.below(static_cast<int>(std::size(kScales)))];
  spec.rotate = random.below(4) != 0;
  spec.rotation_requested = true;
  AttentionCase test(spec);
  fill_normal(test, seed);
  switch (random.below(5)) {
    case 0:  // every row its own scale: exponents change inside tiles
      for (Bf16Vector* x : {&test.q, &test.k, &test.v, &test.dout}) {
        spread_rows(*x, spec.dim, 6, random);
      }
      break;
    case 1:  // scales of gradients that spread over a chunk
      spread_rows(test.dout, spec.dim, 10, random);
      break;
    case 2:  // values that are large late
      for (Bf16Vector* x : {&test.v, &test.k}) {
        if (not x->empty()) multiply(*x, x->size() / 2, x->size() - x->size() / 2, 12);
      }
      break;
    case 3:  // runs of zeros, below which nothing is, beside tiny gradients
      multiply(test.dout, 0x1p-24);
      for (Bf16Vector* x : {&test.q, &test.k, &test.v, &test.dout}) zero_rows(*x, spec.dim, random);
      break;
    default:
      break;
  }
  poison_tails(test);
  return test;
}

}  // namespace mxattn::test
