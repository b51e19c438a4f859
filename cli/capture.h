// Captured activations: packed documents, and q, k, v and the gradient of the output of some
// layers, as a training step saw them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace cli {

/// BF16 bits, (tokens, heads, dim), contiguous; k and v have heads_k heads.
struct Layer {
  std::string name;
  int heads_q = 0;
  int heads_k = 0;
  int dim = 0;
  std::vector<std::uint16_t> q, k, v, dout;
};

struct Capture {
  std::string name;  // of the file
  std::int64_t tokens = 0;
  std::vector<std::int32_t> cu_seqlens;
  std::vector<Layer> layers;

  int documents() const { return static_cast<int>(cu_seqlens.size()) - 1; }
  /// Pairs of a query and a key that it sees, causal.
  std::int64_t visible_pairs() const;
};

/// Reads a safetensors file with `cu_seqlens` and NAME.q, .k, .v, .do for each layer. Throws
/// std::runtime_error that names file, tensor, what it is and what was expected; NaN and Inf are
/// faults too.
Capture load_capture(const std::filesystem::path& path);

}  // namespace cli
