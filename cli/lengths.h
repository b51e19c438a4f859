// Lengths of documents and masks as a user writes them.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace cli {

/// Reads "8192,256x224" (a document of 8192 tokens, then 224 of 256) into cu_seqlens: 0, then the
/// end of every document. Throws std::invalid_argument that names `option`, the entry and what was
/// expected.
std::vector<std::int32_t> parse_lengths(std::string_view text,
                                        std::string_view option = "--lengths");

struct MaskChoice {
  bool causal = false;
  int window_left = -1;  // -1: no bound
};

/// Reads "causal", "full", or "window:LEFT": causal, and at most LEFT keys before a query's own.
/// Throws std::invalid_argument.
MaskChoice parse_mask(std::string_view text);

}  // namespace cli
