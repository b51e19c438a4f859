// The saved state as a list of the caller's buffers.
#pragma once

#include <mxattn/mxattn.h>

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/kernel.h"
#include "quantize/operand.h"

namespace mxattn::api {

/// Address that every buffer of the state must be a multiple of.
inline constexpr std::uint64_t kStateAlignment = 16;

struct StateBuffer {
  const char* name = nullptr;
  int operand = 0;  // MXATTN_Q, MXATTN_K, MXATTN_V, or 0 for the row statistics
  void (*bind)(State& state, void* data) = nullptr;
  int dtype = 0;
  int rank = 0;
  std::int64_t shape[MXATTN_MAX_RANK] = {};
  std::uint64_t bytes = 0;
};

/// The buffers of a problem, none of them empty, from sizes known without the lengths.
std::vector<StateBuffer> state_layout(const kernels::Problem& problem, std::int64_t total_q,
                                      std::int64_t total_k, int num_documents);

/// Checks the caller's buffers (number, size, alignment).
void check_state(std::span<const StateBuffer> layout, const mxattn_buffer* buffers, int count);

/// The state over checked buffers. Operands get the capacity of the layout as their slots.
State bind_state(const kernels::Problem& problem, std::span<const StateBuffer> layout,
                 const mxattn_buffer* buffers, std::int64_t q_slots, std::int64_t k_slots);

}  // namespace mxattn::api
