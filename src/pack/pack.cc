#include "pack/pack.h"

#include <string>
#include <string_view>

#include "base/error.h"

namespace mxattn {
namespace {

std::string at(std::string_view name, std::size_t position) {
  return detail::concat(name, '[', position, ']');
}

/// Checks one list of offsets. Texts are built on failure only: packs may hold many documents.
void check_offsets(std::string_view name, std::span<const std::int32_t> offsets,
                   std::string_view total_name, std::int64_t total) {
  require(total >= 0, total_name, total, "at least 0");
  require(offsets.size() >= 2, detail::concat("length of ", name), offsets.size(),
          "at least 2 (one document has a begin and an end)");
  require(offsets.front() == 0, at(name, 0), offsets.front(), "0 (the first offset)");
  for (std::size_t i = 1; i < offsets.size(); ++i) {
    if (offsets[i] >= offsets[i - 1]) continue;
    require(false, at(name, i), offsets[i], "at least ", at(name, i - 1), " = ", offsets[i - 1],
            " (offsets never decrease)");
  }
  const std::size_t last = offsets.size() - 1;
  require(offsets[last] <= total, at(name, last), offsets[last], "at most ", total_name, " = ",
          total, " (the rows of the tensor)");
}

}  // namespace

Pack make_pack(std::span<const std::int32_t> cu_seqlens_q,
               std::span<const std::int32_t> cu_seqlens_k, std::int64_t total_q,
               std::int64_t total_k) {
  check_offsets("cu_seqlens_q", cu_seqlens_q, "total_q", total_q);
  check_offsets("cu_seqlens_k", cu_seqlens_k, "total_k", total_k);
  require(cu_seqlens_q.size() == cu_seqlens_k.size(), "length of cu_seqlens_k", cu_seqlens_k.size(),
          "the length of cu_seqlens_q, ", cu_seqlens_q.size(), " (both list the same documents)");

  const int num_documents = static_cast<int>(cu_seqlens_q.size()) - 1;
  Pack pack{.documents = {},
            .total_q = total_q,
            .total_k = total_k,
            .q_slots = slot_capacity(total_q, num_documents),
            .k_slots = slot_capacity(total_k, num_documents)};
  pack.documents.reserve(num_documents);
  for (int i = 0; i < num_documents; ++i) {
    pack.documents.push_back({.q_token = cu_seqlens_q[i],
                              .k_token = cu_seqlens_k[i],
                              .q_slot = document_slot(cu_seqlens_q[i], i),
                              .k_slot = document_slot(cu_seqlens_k[i], i),
                              .q_len = cu_seqlens_q[i + 1] - cu_seqlens_q[i],
                              .k_len = cu_seqlens_k[i + 1] - cu_seqlens_k[i]});
  }
  return pack;
}

}  // namespace mxattn
