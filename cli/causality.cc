#include "causality.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace cli {
namespace {

struct Round {
  double place;  // of the cut in each document
  float factor;
};
constexpr std::array<Round, kCausalityRounds> kRounds = {Round{0.1, 1e1f}, Round{0.4, 1e4f},
                                                         Round{0.7, 1e2f}, Round{0.95, 1e3f}};

/// First token that changes; odd, so that it lies inside any block of 32 tokens.
std::int64_t cut_of(std::int64_t length, double place) {
  const auto token = static_cast<std::int64_t>(place * static_cast<double>(length));
  return std::clamp<std::int64_t>(token | 1, std::min<std::int64_t>(1, length), length);
}

void scale_rows(std::vector<std::uint16_t>& x, std::size_t row, std::int64_t begin,
                std::int64_t end, float factor) {
  for (std::size_t i = static_cast<std::size_t>(begin) * row;
       i < static_cast<std::size_t>(end) * row; ++i) {
    x[i] = float_to_bf16(bf16_to_float(x[i]) * factor);
  }
}

}  // namespace

Causality check_causality(const Capture& capture, const Layer& layer, Attention& attention) {
  Causality result;
  attention.run(layer);
  const Outputs before = attention.outputs();
  const auto dim = static_cast<std::size_t>(layer.dim);
  const std::size_t q_row = dim * static_cast<std::size_t>(layer.heads_q);
  const std::size_t k_row = dim * static_cast<std::size_t>(layer.heads_k);

  for (const Round& round : kRounds) {
    Layer changed = layer;
    for (std::size_t d = 0; d + 1 < capture.cu_seqlens.size(); ++d) {
      const std::int64_t begin = capture.cu_seqlens[d], end = capture.cu_seqlens[d + 1];
      const std::int64_t cut = begin + cut_of(end - begin, round.place);
      scale_rows(changed.q, q_row, cut, end, round.factor);
      scale_rows(changed.dout, q_row, cut, end, round.factor);
      scale_rows(changed.k, k_row, cut, end, round.factor);
      scale_rows(changed.v, k_row, cut, end, round.factor);
    }
    attention.run(changed);
    const Outputs& after = attention.outputs();

    for (std::size_t d = 0; d + 1 < capture.cu_seqlens.size(); ++d) {
      const std::int64_t begin = capture.cu_seqlens[d], end = capture.cu_seqlens[d + 1];
      const std::int64_t cut = begin + cut_of(end - begin, round.place);
      for (std::int64_t token = begin; token < cut; ++token) {
        for (int head = 0; head < layer.heads_q; ++head) {
          const auto at =
              static_cast<std::size_t>(token) * q_row + static_cast<std::size_t>(head) * dim;
          const auto row = static_cast<std::size_t>(head * capture.tokens + token);
          const auto differs = [&](const auto& a, const auto& b, std::size_t i, std::size_t n) {
            return std::memcmp(&a[i], &b[i], n * sizeof a[i]) != 0;
          };
          ++result.rows_checked;
          if (differs(before.out, after.out, at, dim) or differs(before.dq, after.dq, at, dim) or
              differs(before.lse, after.lse, row, 1)) {
            ++result.rows_changed;
          }
        }
      }
    }
  }
  return result;
}

}  // namespace cli
