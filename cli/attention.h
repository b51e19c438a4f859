// A layer of a capture through the library: quantisation, forward and backward.
#pragma once

#include <array>
#include <cstdint>
#include <mxattn/mxattn.hpp>
#include <string>
#include <vector>

#include "capture.h"

namespace cli {

/// BF16 bits and FP32 values as the library writes them.
struct Outputs {
  std::vector<std::uint16_t> out, dq, dk, dv;
  std::vector<float> lse;
};

class Attention {
 public:
  /// `layer` gives the shape. Throws mxattn::Error if the library refuses.
  Attention(const Capture& capture, const Layer& layer, const std::string& recipe,
            const std::string& backend, int threads);

  static mxattn::Config config(const Capture& capture, const Layer& layer,
                               const std::string& recipe, const std::string& backend, int threads);

  /// One training call: quantise, forward, backward. Returns the seconds it took.
  double run(const Layer& layer);

  const Outputs& outputs() const { return outputs_; }
  std::string backend() const { return problem_.backend(); }

 private:
  const Capture& capture_;
  mxattn::Problem problem_;
  mxattn::StateBuffers state_;
  Outputs outputs_;
};

/// How close a result is to the exact one: O, dQ, dK, dV.
struct Accuracy {
  std::array<double, 4> cosine{};
  std::array<double, 4> error{};  // ||x - exact|| / ||exact||
};

inline constexpr std::array<const char*, 4> kOutputNames = {"O", "dQ", "dK", "dV"};
inline constexpr std::array<const char*, 4> kOutputKeys = {"o", "dq", "dk", "dv"};

/// Of one query head, with the key head that it reads.
Accuracy accuracy(const Layer& shape, const Outputs& result, const Outputs& exact, int head);

float bf16_to_float(std::uint16_t bits);
std::uint16_t float_to_bf16(float value);  // nearest even; finite values

}  // namespace cli
