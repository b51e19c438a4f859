// A document as a device finds it: from the offsets alone.
#pragma once

#include <cstdint>

#include "pack/pack.h"

namespace mxattn::kernels::sm90 {

__device__ __forceinline__ Document load_document(const std::int32_t* cu_seqlens_q,
                                                  const std::int32_t* cu_seqlens_k, int document) {
  Document d;
  d.q_token = cu_seqlens_q[document];
  d.k_token = cu_seqlens_k[document];
  d.q_len = static_cast<int>(cu_seqlens_q[document + 1] - d.q_token);
  d.k_len = static_cast<int>(cu_seqlens_k[document + 1] - d.k_token);
  d.q_slot = document_slot(d.q_token, document);
  d.k_slot = document_slot(d.k_token, document);
  return d;
}

}  // namespace mxattn::kernels::sm90
