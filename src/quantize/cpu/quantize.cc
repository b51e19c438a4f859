#include "quantize/quantize.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/error.h"
#include "base/numeric.h"
#include "quantize/cpu/rows.h"
#include "recipe/exponents.h"
#include "recipe/roles.h"

namespace mxattn {
namespace {

/// Consecutive tokens of one document, and where they lie.
struct Chunk {
  const Document* document;
  int first;  // counted from the document's start
  int count;
  std::int64_t token;  // of `first`, in packed tensors
  std::int64_t slot;   // of `first`, in operand buffers
};

constexpr int kChunkTokens = 128;
constexpr int kWholeDocument = 1 << 30;

struct Side {
  std::int64_t total = 0;  // rows of packed tensors
  std::int64_t slots = 0;
  std::vector<Chunk> documents, chunks;
};

struct Gap {
  std::int64_t begin, end;
};

std::vector<Chunk> chunks_of(const Pack& pack, bool query_side, int size) {
  std::vector<Chunk> chunks;
  for (const Document& document : pack.documents) {
    const int length = query_side ? document.q_len : document.k_len;
    const std::int64_t token = query_side ? document.q_token : document.k_token;
    const std::int64_t slot = query_side ? document.q_slot : document.k_slot;
    for (std::int64_t first = 0; first < length; first += size) {
      const int begin = static_cast<int>(first);
      chunks.push_back(
          {&document, begin, std::min(size, length - begin), token + first, slot + first});
    }
  }
  return chunks;
}

Side side_of(const Pack& pack, bool query_side) {
  return {.total = query_side ? pack.total_q : pack.total_k,
          .slots = query_side ? pack.q_slots : pack.k_slots,
          .documents = chunks_of(pack, query_side, kWholeDocument),
          .chunks = chunks_of(pack, query_side, kChunkTokens)};
}

/// The rows of [0, end) that no document holds, for positions named by `begin_of`.
template <class BeginOf>
std::vector<Gap> gaps_of(const std::vector<Chunk>& documents, BeginOf begin_of, std::int64_t end) {
  std::vector<Gap> gaps;
  std::int64_t covered = 0;
  for (const Chunk& document : documents) {
    const std::int64_t begin = begin_of(document);
    if (begin > covered) gaps.push_back({covered, begin});
    covered = begin + document.count;
  }
  if (end > covered) gaps.push_back({covered, end});
  return gaps;
}

std::vector<Gap> slot_gaps(const Side& side, std::int64_t slots) {
  return gaps_of(
      side.documents, [](const Chunk& chunk) { return chunk.slot; }, slots);
}

/// body(head, chunk, index) for every head and chunk, on `threads` threads. Heads run innermost:
/// their rows share pages and cache lines' neighbours.
template <class Body>
void for_each(int heads, const std::vector<Chunk>& chunks, int threads, const Body& body) {
  const std::int64_t num_items = static_cast<std::int64_t>(chunks.size()) * heads;
#pragma omp parallel for num_threads(threads) schedule(dynamic, heads) if (threads > 1)
  for (std::int64_t i = 0; i < num_items; ++i) {
    body(static_cast<int>(i % heads), chunks[static_cast<std::size_t>(i / heads)], i);
  }
}

/// Writes slots of one head of an operand as zero tokens.
void clear_slots(const Operand& out, int head, const Gap& gap, int exponent) {
  const auto count = static_cast<std::size_t>(gap.end - gap.begin);
  std::memset(out.row(head, gap.begin), 0, count * static_cast<std::size_t>(out.dim));
  std::memset(out.exponents_of(head) + gap.begin, exponent, count);
  if (out.norms == nullptr) return;
  std::memset(out.norms_of(head) + gap.begin, stages::kNormExponentMin, count);
}

/// The same for what the backward prepares.
void clear_slots(const GradientState& state, int head, const Gap& gap) {
  clear_slots(state.g, head, gap, stages::kTokenExponentMin);
  const std::int64_t at = head * state.g.slots + gap.begin;
  const std::int64_t count = gap.end - gap.begin;
  std::memset(state.output_norms + at, stages::kNormExponentMin, static_cast<std::size_t>(count));
  std::fill_n(state.delta + at, count, 0.0f);
}

/// Exponents of single tokens to exponents of the scale group, in place, for one document.
void group_exponents(ScaleGroup group, std::int8_t* exponents, int count) {
  if (group == ScaleGroup::kRunning) {
    std::int8_t maximum = stages::kTokenExponentMin;
    for (int i = 0; i < count; ++i) {
      maximum = std::max(maximum, exponents[i]);
      exponents[i] = static_cast<std::int8_t>(stages::running_exponent(maximum));
    }
  } else if (group == ScaleGroup::kBlock32) {
    for (int i = 0; i < count; i += stages::kBlockTokens) {
      std::int8_t* const end = exponents + std::min(count, i + stages::kBlockTokens);
      std::fill(exponents + i, end, *std::max_element(exponents + i, end));
    }
  } else if (group == ScaleGroup::kTensor) {
    for (int i = 0; i < count; ++i) {
      if (exponents[i] != stages::kNanExponent) exponents[i] = 0;
    }
  }
}

rows::Bf16Rows rows_of(const TensorView<const std::uint16_t>& x, int head, std::int64_t token,
                       int count, bool rotate) {
  return {.data = x.row(token, head),
          .stride = x.token_stride,
          .count = count,
          .dim = x.dim,
          .rotate = rotate};
}

void check_operand(const Operand& operand, const Side& side, int heads, int dim) {
  MXATTN_CHECK(operand.codes != nullptr and operand.exponents != nullptr, "no buffer");
  MXATTN_CHECK(operand.slots >= side.slots, operand.slots, " slots, needed ", side.slots);
  MXATTN_CHECK(operand.heads == heads and operand.dim == dim, operand.heads, " heads, dim ",
               operand.dim, "; the tensor has ", heads, ", ", dim);
  MXATTN_CHECK(dim >= 1 and dim <= rows::kMaxDim, "dim ", dim);
}

}  // namespace

void quantize(const Recipe& recipe, Role role, const TensorView<const std::uint16_t>& x,
              const Pack& pack, bool rotate, int threads, const Operand& out) {
  const Side side = side_of(pack, is_query_role(role));
  const bool whole_tensor = recipe.scale_group == ScaleGroup::kTensor;
  check_operand(out, side, x.heads, x.dim);
  MXATTN_CHECK(recipe.quantised(), "a recipe without codes");
  MXATTN_CHECK(x.tokens == side.total, x.tokens, " tokens, the pack has ", side.total);
  MXATTN_CHECK(whole_tensor == (out.scale != nullptr), "a scale of the whole tensor has a place");
  MXATTN_CHECK(not(whole_tensor and out.norms != nullptr), "norms need a power-of-two scale");
  const bool rotated = is_rotated(role, x.dim, rotate);

  // Exponents of tokens, then of their groups. Rows are read, and rotated, once more below: cheaper
  // than to keep them.
  std::vector<float> maxima(side.chunks.size() * static_cast<std::size_t>(x.heads));
  for_each(x.heads, side.chunks, threads, [&](int head, const Chunk& chunk, std::int64_t item) {
    maxima[static_cast<std::size_t>(item)] =
        rows::token_exponents(rows_of(x, head, chunk.token, chunk.count, rotated),
                              recipe.exponent_rule, out.exponents_of(head) + chunk.slot);
  });
  for_each(x.heads, side.documents, threads, [&](int head, const Chunk& document, std::int64_t) {
    group_exponents(recipe.scale_group, out.exponents_of(head) + document.slot, document.count);
  });

  float tensor_scale = 0;
  if (whole_tensor) {
    const float amax = maxima.empty() ? 0 : *std::max_element(maxima.begin(), maxima.end());
    tensor_scale = stages::tensor_scale(amax);
    *out.scale = div_rn(1.0f, tensor_scale);
  }

  for_each(x.heads, side.chunks, threads, [&](int head, const Chunk& chunk, std::int64_t) {
    rows::encode_rows(rows_of(x, head, chunk.token, chunk.count, rotated),
                      out.exponents_of(head) + chunk.slot, tensor_scale, out.row(head, chunk.slot),
                      out.norms == nullptr ? nullptr : out.norms_of(head) + chunk.slot);
  });
  for (const Gap& gap : slot_gaps(side, out.slots)) {
    for (int head = 0; head < out.heads; ++head) {
      clear_slots(out, head, gap, whole_tensor ? 0 : stages::kTokenExponentMin);
    }
  }
}

void prepare_gradient(const Recipe& recipe, const Mask& mask,
                      const TensorView<const std::uint16_t>& out,
                      const TensorView<const std::uint16_t>& dout, const float* row_sum,
                      const Pack& pack, int threads, const GradientState& state) {
  const Side side = side_of(pack, true);
  const Operand& g = state.g;
  check_operand(g, side, dout.heads, dout.dim);
  MXATTN_CHECK(recipe.gradient == GradientOperand::kDividedByL, "the recipe keeps dO plain");
  MXATTN_CHECK(g.norms != nullptr and state.output_norms != nullptr and state.delta != nullptr,
               "no buffer");
  MXATTN_CHECK(out.tokens == side.total and dout.tokens == side.total, out.tokens, " and ",
               dout.tokens, " tokens, the pack has ", side.total);

  for_each(dout.heads, side.chunks, threads, [&](int head, const Chunk& chunk, std::int64_t) {
    const std::int64_t at = head * g.slots + chunk.slot;
    GradientState rows{.g = g, .output_norms = state.output_norms + at, .delta = state.delta + at};
    rows.g.codes = g.row(head, chunk.slot);
    rows.g.exponents = g.exponents + at;
    rows.g.norms = g.norms + at;
    rows.g.slots = chunk.count;
    rows.g.heads = 1;
    prepare_gradient_rows(recipe, mask, out, dout, row_sum, *chunk.document, head,
                          {chunk.first, chunk.first + chunk.count}, rows);
  });
  for (const Gap& gap : slot_gaps(side, g.slots)) {
    for (int head = 0; head < g.heads; ++head) clear_slots(state, head, gap);
  }
}

void prepare_gradient_rows(const Recipe& recipe, const Mask& mask,
                           const TensorView<const std::uint16_t>& out,
                           const TensorView<const std::uint16_t>& dout, const float* row_sum,
                           const Document& document, int head, Range queries,
                           const GradientState& state) {
  // A mask is a band aligned at the bottom right: rows that see no key come first.
  int first = queries.begin;
  while (first < queries.end and
         visible_keys(mask, document.q_len, document.k_len, first).empty()) {
    ++first;
  }
  const std::int64_t keyless = first - queries.begin;
  clear_slots(state, 0, {0, keyless});

  const std::int64_t token = document.q_token + first;
  const int count = queries.end - first;
  rows::gradient_rows(rows_of(dout, head, token, count, false),
                      rows_of(out, head, token, count, false), recipe.exponent_rule,
                      {.row_sum = row_sum + head * dout.tokens + token,
                       .codes = state.g.row(0, keyless),
                       .exponents = state.g.exponents + keyless,
                       .norms = state.g.norms + keyless,
                       .output_norms = state.output_norms + keyless,
                       .delta = state.delta + keyless});
}

void restore(const Operand& operand, Role role, const Pack& pack, bool rotate_back, int threads,
             const TensorView<float>& y) {
  const Side side = side_of(pack, is_query_role(role));
  check_operand(operand, side, y.heads, y.dim);
  MXATTN_CHECK(y.tokens == side.total, y.tokens, " tokens, the pack has ", side.total);
  for_each(y.heads, side.chunks, threads, [&](int head, const Chunk& chunk, std::int64_t) {
    rows::restore_rows(operand.row(head, chunk.slot), operand.exponents_of(head) + chunk.slot,
                       operand.scale, chunk.count, y.dim, rotate_back, y.row(chunk.token, head),
                       y.token_stride);
  });
  const auto token_of = [](const Chunk& chunk) { return chunk.token; };
  for (const Gap& gap : gaps_of(side.documents, token_of, side.total)) {
    for (std::int64_t token = gap.begin; token < gap.end; ++token) {
      for (int head = 0; head < y.heads; ++head) std::fill_n(y.row(token, head), y.dim, 0.0f);
    }
  }
}

void rotate_rows(float* x, std::int64_t count, int dim, std::int64_t stride, int threads) {
  MXATTN_CHECK(dim >= 1 and dim <= rows::kMaxDim and (dim & (dim - 1)) == 0, "dim ", dim);
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (std::int64_t i = 0; i < count; i += kChunkTokens) {
    rows::rotate_rows(x + i * stride, std::min<std::int64_t>(kChunkTokens, count - i), dim, stride);
  }
}

void transpose_codes(const Operand& operand, TokenOrder order, int threads,
                     std::uint8_t* transposed) {
  MXATTN_CHECK(operand.slots % kSlotAlignment == 0, operand.slots, " slots");
  constexpr int kGroup = static_cast<int>(kSlotAlignment);
  int token_at[kGroup];
  for (int p = 0; p < kGroup; ++p)
    token_at[p] = order == TokenOrder::kNatural ? p : fragment_token(p);

  const std::int64_t groups = operand.slots / kGroup;
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (std::int64_t item = 0; item < groups * operand.heads; ++item) {
    const int head = static_cast<int>(item / groups);
    const std::int64_t slot = item % groups * kGroup;
    const std::uint8_t* source = operand.row(head, slot);
    std::uint8_t* target =
        transposed + static_cast<std::int64_t>(head) * operand.dim * operand.slots;
    for (int c = 0; c < operand.dim; ++c) {
      std::uint8_t* group = target + c * operand.slots + slot;
      for (int p = 0; p < kGroup; ++p) group[p] = source[token_at[p] * operand.dim + c];
    }
  }
}

void norm_maxima(const Operand& operand, Role role, const Pack& pack, int threads,
                 const NormMaxima& maxima) {
  const Side side = side_of(pack, is_query_role(role));
  MXATTN_CHECK(operand.norms != nullptr, "no norms");
  // 127, a NaN, is larger than every norm exponent: plain maxima keep it.
  for_each(operand.heads, side.documents, threads,
           [&](int head, const Chunk& document, std::int64_t) {
             const std::int64_t offset = head * operand.slots + document.slot;
             const std::int8_t* norms = operand.norms + offset;
             for (int first = 0; first < document.count; first += stages::kKeyTile) {
               const int end = std::min(document.count, first + stages::kKeyTile);
               std::fill(maxima.tile + offset + first, maxima.tile + offset + end,
                         *std::max_element(norms + first, norms + end));
             }
             for (int i = 0; i < document.count; ++i) {
               const bool restarts = i == stages::chunk_begin(stages::chunk_of(i));
               maxima.running[offset + i] =
                   restarts ? norms[i] : std::max(norms[i], maxima.running[offset + i - 1]);
             }
           });
  for (int head = 0; head < operand.heads; ++head) {
    for (const Gap& gap : slot_gaps(side, operand.slots)) {
      const auto count = static_cast<std::size_t>(gap.end - gap.begin);
      std::memset(maxima.tile + head * operand.slots + gap.begin, stages::kNormExponentMin, count);
      std::memset(maxima.running + head * operand.slots + gap.begin, stages::kNormExponentMin,
                  count);
    }
  }
}

}  // namespace mxattn
