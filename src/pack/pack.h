// Packed documents and masks: who sees whom.
//
// A pack is many documents in one row of tokens. Nothing crosses a document's border. Operand
// buffers keep documents at multiples of 16 rows ("slots"); inputs and outputs are packed without
// gaps ("tokens"). Lengths of queries and keys may differ; the mask is then bottom-right aligned.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "base/portability.h"

namespace mxattn {

/// Which keys a query sees inside its document. With offset = k_len - q_len, query i sees key j if
///   causal:       j <= i + offset
///   window_left:  j >= i + offset - window_left    (-1: no bound)
///   window_right: j <= i + offset + window_right   (-1: no bound)
struct Mask {
  bool causal = false;
  int window_left = -1;
  int window_right = -1;

  constexpr bool operator==(const Mask&) const = default;
};

/// [begin, end); empty if begin >= end.
struct Range {
  int begin = 0;
  int end = 0;

  MXATTN_HOST_DEVICE constexpr bool empty() const { return begin >= end; }
  MXATTN_HOST_DEVICE constexpr int size() const { return empty() ? 0 : end - begin; }
  MXATTN_HOST_DEVICE constexpr bool contains(int x) const { return begin <= x and x < end; }
  constexpr bool operator==(const Range&) const = default;
};

namespace detail {
// 64-bit sums: windows may be as large as an int holds.
MXATTN_HOST_DEVICE constexpr int clamp_to(std::int64_t x, int low, int high) {
  return x < low ? low : (x > high ? high : static_cast<int>(x));
}
}  // namespace detail

/// Keys of the document that query `i` sees (never outside [0, k_len)).
MXATTN_HOST_DEVICE constexpr Range visible_keys(const Mask& mask, int q_len, int k_len, int i) {
  const std::int64_t diagonal = std::int64_t{i} + k_len - q_len;
  Range keys{0, k_len};
  if (mask.causal) keys.end = detail::clamp_to(diagonal + 1, 0, keys.end);
  if (mask.window_right >= 0) {
    keys.end = detail::clamp_to(diagonal + mask.window_right + 1, 0, keys.end);
  }
  if (mask.window_left >= 0) {
    keys.begin = detail::clamp_to(diagonal - mask.window_left, 0, k_len);
  }
  return keys;
}

/// Queries of the document that see key `j`: a contiguous range, since the mask is a band.
MXATTN_HOST_DEVICE constexpr Range visible_queries(const Mask& mask, int q_len, int k_len, int j) {
  const std::int64_t diagonal = std::int64_t{j} - (k_len - q_len);  // the query aligned with j
  Range queries{0, q_len};
  if (mask.causal) queries.begin = detail::clamp_to(diagonal, 0, q_len);
  if (mask.window_right >= 0) {
    queries.begin =
        std::max(queries.begin, detail::clamp_to(diagonal - mask.window_right, 0, q_len));
  }
  if (mask.window_left >= 0) {
    queries.end = detail::clamp_to(diagonal + mask.window_left + 1, 0, q_len);
  }
  return queries;
}

/// One document: where its tokens lie in the packed tensors and its slots in operand buffers.
struct Document {
  std::int64_t q_token = 0;
  std::int64_t k_token = 0;
  std::int64_t q_slot = 0;  // multiple of 16
  std::int64_t k_slot = 0;
  int q_len = 0;
  int k_len = 0;
};

/// A validated pack.
struct Pack {
  std::vector<Document> documents;
  std::int64_t total_q = 0;  // rows of the packed tensors: capacity, may exceed the last document
  std::int64_t total_k = 0;
  std::int64_t q_slots = 0;  // rows of operand buffers: slot_capacity() of the totals
  std::int64_t k_slots = 0;
};

inline constexpr std::int64_t kSlotAlignment = 16;
// Rows of operand buffers come in lines of a device's cache: (heads, d, slots) of bytes, so that no
// row of a transposed copy begins inside a line.
inline constexpr std::int64_t kCapacityAlignment = 128;

/// First slot of a document, from its offset and position alone: no sum over the documents before
/// it, so a device can compute it in place. Gaps between documents are 1 to 31 slots.
constexpr std::int64_t document_slot(std::int64_t offset, int document) {
  return (offset + kSlotAlignment * document) / kSlotAlignment * kSlotAlignment;
}

/// Rows of an operand buffer that hold any pack of `total` tokens in `num_documents` documents:
/// known without reading the lengths, so that buffers can be sized without a host sync.
constexpr std::int64_t slot_capacity(std::int64_t total, int num_documents) {
  return (total + kSlotAlignment * num_documents + kCapacityAlignment - 1) / kCapacityAlignment *
         kCapacityAlignment;
}

/// Builds the pack; throws Error (kInvalidArgument) that names the argument, the position and what
/// was expected unless both lists start at 0, never decrease, end at most at the totals and have
/// the same, non-zero number of entries.
Pack make_pack(std::span<const std::int32_t> cu_seqlens_q,
               std::span<const std::int32_t> cu_seqlens_k, std::int64_t total_q,
               std::int64_t total_k);

}  // namespace mxattn
