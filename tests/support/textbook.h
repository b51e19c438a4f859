// Exact attention as a textbook writes it: O(N^2) time and memory, FP64, no tile, no trick. What
// every backend is measured against.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "support/attention_case.h"

namespace mxattn::test {

/// Layouts as in Result; nothing is rounded. Rows outside documents and rows without keys: 0, and
/// lse -inf.
struct Exact {
  std::vector<double> out, dq, dk, dv, lse;
};

inline Exact textbook(const AttentionCase& test) {
  const CaseSpec& spec = test.spec();
  const Pack& pack = test.pack();
  Exact r;
  r.out.assign(test.q_size(), 0.0);
  r.dq.assign(test.q_size(), 0.0);
  r.dk.assign(test.k_size(), 0.0);
  r.dv.assign(test.k_size(), 0.0);
  r.lse.assign(static_cast<std::size_t>(pack.total_q * spec.heads_q),
               -std::numeric_limits<double>::infinity());
  const auto dim = static_cast<std::size_t>(spec.dim);
  const double scale = spec.softmax_scale;

  for (const Document& document : pack.documents) {
    for (int head = 0; head < spec.heads_q; ++head) {
      const int key_head = head / (spec.heads_q / spec.heads_k);
      for (int i = 0; i < document.q_len; ++i) {
        const std::size_t qi = test.q_at(document.q_token + i, head);
        const std::int64_t diagonal = i + document.k_len - document.q_len;
        const auto sees = [&](int j) {
          const Mask& mask = spec.mask;
          return not(mask.causal and j > diagonal) and
                 not(mask.window_left >= 0 and j < diagonal - mask.window_left) and
                 not(mask.window_right >= 0 and j > diagonal + mask.window_right);
        };
        const auto ki = [&](int j) { return test.k_at(document.k_token + j, key_head); };

        // Softmax.
        std::vector<double> p(static_cast<std::size_t>(document.k_len), 0.0);
        double top = -std::numeric_limits<double>::infinity(), sum = 0;
        for (int j = 0; j < document.k_len; ++j) {
          if (not sees(j)) continue;
          double s = 0;
          for (std::size_t c = 0; c < dim; ++c) {
            s += value_of(test.q[qi + c]) * value_of(test.k[ki(j) + c]);
          }
          p[static_cast<std::size_t>(j)] = s * scale;
          top = std::max(top, s * scale);
        }
        if (std::isinf(top)) continue;
        for (int j = 0; j < document.k_len; ++j) {
          double& x = p[static_cast<std::size_t>(j)];
          x = sees(j) ? std::exp(x - top) : 0.0;
          sum += x;
        }
        for (double& x : p) x /= sum;
        r.lse[static_cast<std::size_t>(head * pack.total_q + document.q_token + i)] =
            top + std::log(sum);

        // O, dP, D, and the three gradients.
        std::vector<double> dp(p.size(), 0.0);
        double delta = 0;
        for (int j = 0; j < document.k_len; ++j) {
          if (not sees(j)) continue;
          const auto n = static_cast<std::size_t>(j);
          for (std::size_t c = 0; c < dim; ++c) {
            const double v = value_of(test.v[ki(j) + c]), g = value_of(test.dout[qi + c]);
            r.out[qi + c] += p[n] * v;
            r.dv[ki(j) + c] += p[n] * g;
            dp[n] += g * v;
          }
          delta += p[n] * dp[n];
        }
        for (int j = 0; j < document.k_len; ++j) {
          if (not sees(j)) continue;
          const auto n = static_cast<std::size_t>(j);
          const double ds = p[n] * (dp[n] - delta) * scale;
          for (std::size_t c = 0; c < dim; ++c) {
            r.dq[qi + c] += ds * value_of(test.k[ki(j) + c]);
            r.dk[ki(j) + c] += ds * value_of(test.q[qi + c]);
          }
        }
      }
    }
  }
  return r;
}

}  // namespace mxattn::test
