// Inputs for AttentionCase: random normal values, and the hard cases of docs/numerics.md
// with the cosines expected there.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <vector>

#include "support/attention_case.h"

namespace mxattn::test {

/// Standard normal numbers of a seed, the same on every machine.
class Normal {
 public:
  explicit Normal(std::uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 1) {}

  double operator()() {
    if (has_spare_) {
      has_spare_ = false;
      return spare_;
    }
    constexpr double kTwoPi = 6.283185307179586;
    const double radius = std::sqrt(-2 * std::log(uniform())), angle = kTwoPi * uniform();
    spare_ = radius * std::sin(angle);
    has_spare_ = true;
    return radius * std::cos(angle);
  }

  /// In (0, 1).
  double uniform() { return (static_cast<double>(next() >> 11) + 0.5) * 0x1p-53; }
  int below(int n) { return static_cast<int>(uniform() * n); }

 private:
  // splitmix64
  std::uint64_t next() {
    std::uint64_t x = state_ += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
  }

  std::uint64_t state_;
  double spare_ = 0;
  bool has_spare_ = false;
};

inline void fill_normal(Bf16Vector& x, Normal& normal) {
  for (auto& bits : x) bits = float_to_bf16(static_cast<float>(normal()));
}

inline void fill_normal(AttentionCase& test, std::uint64_t seed) {
  Normal normal(seed);
  for (Bf16Vector* x : {&test.q, &test.k, &test.v, &test.dout}) fill_normal(*x, normal);
}

/// Multiplies `count` values from `first` on; rounds to BF16 again.
inline void multiply(Bf16Vector& x, std::size_t first, std::size_t count, double factor) {
  for (std::size_t i = first; i < first + count; ++i) {
    x[i] = double_to_bf16(value_of(x[i]) * factor);
  }
}
inline void multiply(Bf16Vector& x, double factor) { multiply(x, 0, x.size(), factor); }

struct Cosines {
  double o, dq, dk, dv;
};

/// One change to normal inputs of one document of 1024 tokens, one head, dim 128, causal.
struct HardCase {
  const char* name;
  void (*apply)(AttentionCase& test);
  Cosines expected;          // recipe fp8
  double tolerance = 0.002;  // between seeds
};

inline std::vector<HardCase> hard_cases() {
  constexpr std::size_t kDim = 128;
  return {
      {"key 3 times 16",
       [](AttentionCase& t) { multiply(t.k, 3 * kDim, kDim, 16); },
       {0.9979, 0.9797, 0.9905, 0.9979},
       // A few rows that the key dominates make dQ: six seeds of the model give 0.9688 to 0.9797.
       0.012},
      {"value 3 times 100",
       [](AttentionCase& t) { multiply(t.v, 3 * kDim, kDim, 100); },
       {0.9995, 0.9983, 0.9979, 0.9987}},
      {"value 500 times 100",
       [](AttentionCase& t) { multiply(t.v, 500 * kDim, kDim, 100); },
       {0.9988, 0.9981, 0.9981, 0.9987}},
      {"value 0 zero",
       [](AttentionCase& t) { multiply(t.v, 0, kDim, 0); },
       {0.9988, 0.9978, 0.9979, 0.9987}},
      {"keys and queries 2^30 apart",
       [](AttentionCase& t) {
         multiply(t.k, 0x1p-30);
         multiply(t.q, 0x1p30);
       },
       {0.9989, 0.9979, 0.9979, 0.9987}},
      {"gradients over 12 binades",
       [](AttentionCase& t) {
         Normal random(12);
         for (std::size_t i = 0; i < t.dout.size(); i += kDim) {
           multiply(t.dout, i, kDim, std::ldexp(1.0, -random.below(12)));
         }
       },
       {0.9989, 0.9979, 0.9981, 0.9986}},
      {"gradient 5 times 10^4",
       [](AttentionCase& t) { multiply(t.dout, 5 * kDim, kDim, 1e4); },
       {0.9989, 0.9991, 0.9995, 0.9995}},
      {"gradient 900 times 10^4",
       [](AttentionCase& t) { multiply(t.dout, 900 * kDim, kDim, 1e4); },
       {0.9989, 0.9986, 0.9980, 0.9987}},
      {"queries times 8",
       [](AttentionCase& t) { multiply(t.q, 8); },
       {0.9942, 0.9791, 0.9790, 0.9940}},
      {"channel 7 of keys times 30",
       [](AttentionCase& t) {
         for (std::size_t i = 7; i < t.k.size(); i += kDim) multiply(t.k, i, 1, 30);
       },
       {0.9940, 0.9843, 0.9919, 0.9937}},
  };
}

}  // namespace mxattn::test
