#include "api/state.h"

#include <initializer_list>
#include <string>
#include <type_traits>

#include "api/dtype.h"
#include "base/error.h"

namespace mxattn::api {
namespace {

/// Appends a buffer unless it is empty.
void append(std::vector<StateBuffer>& layout, const char* name, int operand, int dtype,
            std::initializer_list<std::int64_t> shape, void (*bind)(State&, void*)) {
  StateBuffer buffer{.name = name, .operand = operand, .bind = bind, .dtype = dtype};
  buffer.bytes = dtype_bytes(dtype);
  for (const std::int64_t size : shape) {
    buffer.shape[buffer.rank++] = size;
    buffer.bytes *= static_cast<std::uint64_t>(size);
  }
  if (buffer.bytes > 0) layout.push_back(buffer);
}

template <auto Member, auto Field>
void bind_operand(State& state, void* data) {
  auto& field = (state.*Member).*Field;
  field = static_cast<std::remove_reference_t<decltype(field)>>(data);
}

template <auto Field>
void bind_row(State& state, void* data) {
  state.*Field = static_cast<std::remove_reference_t<decltype(state.*Field)>>(data);
}

struct OperandNames {
  const char* codes;
  const char* exponents;
  const char* norms;
  const char* scale;
};

template <auto Member>
void append_operand(std::vector<StateBuffer>& layout, const OperandNames& names, int operand,
                    const Recipe& recipe, std::int64_t heads, std::int64_t slots,
                    std::int64_t dim) {
  append(layout, names.codes, operand, MXATTN_E4M3, {heads, slots, dim},
         bind_operand<Member, &Operand::codes>);
  append(layout, names.exponents, operand, MXATTN_I8, {heads, slots},
         bind_operand<Member, &Operand::exponents>);
  if (operand == MXATTN_V and recipe.gradient == GradientOperand::kDividedByL) {
    append(layout, names.norms, operand, MXATTN_I8, {heads, slots},
           bind_operand<Member, &Operand::norms>);
  }
  if (recipe.scale_group == ScaleGroup::kTensor) {
    append(layout, names.scale, operand, MXATTN_F32, {1}, bind_operand<Member, &Operand::scale>);
  }
}

}  // namespace

std::vector<StateBuffer> state_layout(const kernels::Problem& problem, std::int64_t total_q,
                                      std::int64_t total_k, int num_documents) {
  const Recipe& recipe = problem.recipe;
  std::vector<StateBuffer> layout;
  if (recipe.quantised()) {
    const std::int64_t q_slots = slot_capacity(total_q, num_documents);
    const std::int64_t k_slots = slot_capacity(total_k, num_documents);
    append_operand<&State::q>(layout, {"q_codes", "q_exponents", "q_norms", "q_scale"}, MXATTN_Q,
                              recipe, problem.heads_q, q_slots, problem.dim);
    append_operand<&State::k>(layout, {"k_codes", "k_exponents", "k_norms", "k_scale"}, MXATTN_K,
                              recipe, problem.heads_k, k_slots, problem.dim);
    append_operand<&State::v>(layout, {"v_codes", "v_exponents", "v_norms", "v_scale"}, MXATTN_V,
                              recipe, problem.heads_k, k_slots, problem.dim);
  }
  // kPlain keeps the bits of a float in the row reference.
  const int reference = recipe.gradient == GradientOperand::kDividedByL ? MXATTN_I32 : MXATTN_F32;
  append(layout, "row_reference", 0, reference, {problem.heads_q, total_q},
         bind_row<&State::row_reference>);
  append(layout, "row_sum", 0, MXATTN_F32, {problem.heads_q, total_q}, bind_row<&State::row_sum>);
  return layout;
}

void check_state(std::span<const StateBuffer> layout, const mxattn_buffer* buffers, int count) {
  require(count == static_cast<int>(layout.size()), "num_state", count, layout.size(),
          " buffers, as mxattn_state_count says");
  require(layout.empty() or buffers != nullptr, "state", "null", "an array of ", layout.size(),
          " buffers");
  for (std::size_t i = 0; i < layout.size(); ++i) {
    const std::string name = detail::concat("state[", i, "] (", layout[i].name, ")");
    const mxattn_buffer& buffer = buffers[i];
    require(buffer.data != nullptr, name + ".data", "null", "the address of ", layout[i].bytes,
            " bytes");
    require(buffer.bytes >= layout[i].bytes, name + ".bytes", buffer.bytes, "at least ",
            layout[i].bytes);
    require(reinterpret_cast<std::uintptr_t>(buffer.data) % kStateAlignment == 0, name + ".data",
            buffer.data, "a multiple of ", kStateAlignment);
  }
}

State bind_state(const kernels::Problem& problem, std::span<const StateBuffer> layout,
                 const mxattn_buffer* buffers, std::int64_t q_slots, std::int64_t k_slots) {
  State state;
  for (std::size_t i = 0; i < layout.size(); ++i) layout[i].bind(state, buffers[i].data);
  state.q.slots = q_slots;
  state.q.heads = problem.heads_q;
  state.k.slots = state.v.slots = k_slots;
  state.k.heads = state.v.heads = problem.heads_k;
  state.q.dim = state.k.dim = state.v.dim = problem.dim;
  return state;
}

}  // namespace mxattn::api
