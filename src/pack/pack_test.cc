#include "pack/pack.h"

#include <gtest/gtest.h>

#include <climits>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "base/error.h"

namespace mxattn {
namespace {

/// The mask in words: bottom-right aligned, each bound by itself.
bool sees(const Mask& mask, int q_len, int k_len, int i, int j) {
  const long long diagonal = static_cast<long long>(i) + k_len - q_len;
  const bool causal = not mask.causal or j <= diagonal;
  const bool left = mask.window_left < 0 or j >= diagonal - mask.window_left;
  const bool right = mask.window_right < 0 or j <= diagonal + mask.window_right;
  return causal and left and right;
}

std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), Status::kInvalidArgument);
    return error.what();
  }
  return "(nothing thrown)";
}

std::string rejection(std::vector<std::int32_t> q, std::vector<std::int32_t> k,
                      std::int64_t total_q = 100, std::int64_t total_k = 100) {
  return message_of([&] { make_pack(q, k, total_q, total_k); });
}

TEST(Mask, BitEqualVisibleRangesAgainstThePredicate) {
  const int windows[] = {-1, 0, 1, 2, 5, 8, 9, 100, INT_MAX - 1, INT_MAX};
  int num_partial = 0;  // (visible, masked) pairs of one query: the cases that can go wrong
  for (const bool causal : {false, true}) {
    for (const int left : windows) {
      for (const int right : windows) {
        const Mask mask{.causal = causal, .window_left = left, .window_right = right};
        for (int q_len = 0; q_len <= 9; ++q_len) {
          for (int k_len = 0; k_len <= 9; ++k_len) {
            for (int i = 0; i < q_len; ++i) {
              const Range keys = visible_keys(mask, q_len, k_len, i);
              ASSERT_TRUE(keys.empty() or (keys.begin >= 0 and keys.end <= k_len));
              num_partial += not keys.empty() and keys.size() < k_len;
              for (int j = 0; j < k_len; ++j) {
                ASSERT_EQ(keys.contains(j), sees(mask, q_len, k_len, i, j))
                    << "causal " << causal << " window " << left << ' ' << right << " lengths "
                    << q_len << ' ' << k_len << " at " << i << ' ' << j;
              }
            }
            for (int j = 0; j < k_len; ++j) {
              const Range queries = visible_queries(mask, q_len, k_len, j);
              ASSERT_TRUE(queries.empty() or (queries.begin >= 0 and queries.end <= q_len));
              for (int i = 0; i < q_len; ++i) {
                ASSERT_EQ(queries.contains(i), sees(mask, q_len, k_len, i, j))
                    << "causal " << causal << " window " << left << ' ' << right << " lengths "
                    << q_len << ' ' << k_len << " at " << i << ' ' << j;
              }
            }
          }
        }
      }
    }
  }
  EXPECT_GT(num_partial, 1000);
}

TEST(Mask, BitEqualHugeLengths) {
  // Sums of a position, a length and a window pass 2^31 here.
  const int n = INT_MAX;
  const Mask mask{.causal = false, .window_left = INT_MAX, .window_right = INT_MAX};
  EXPECT_EQ(visible_keys(mask, n, n, n - 1), (Range{0, n}));
  EXPECT_EQ(visible_keys(mask, 1, n, 0), (Range{0, n}));
  EXPECT_EQ(visible_queries(mask, n, n, n - 1), (Range{0, n}));
  EXPECT_EQ(visible_queries(mask, n, 1, 0), (Range{0, n}));
  const Mask causal{.causal = true, .window_left = 3, .window_right = -1};
  EXPECT_EQ(visible_keys(causal, n, n, n - 1), (Range{n - 4, n}));
  EXPECT_EQ(visible_queries(causal, n, n, n - 1), (Range{n - 1, n}));
}

TEST(Mask, BitEqualWindowsAsWideAsTheDocumentAreCausal) {
  const int n = 16384;
  const Mask causal{.causal = true};
  const Mask same[] = {{.window_left = -1, .window_right = 0},
                       {.window_left = n, .window_right = 0},
                       {.window_left = n - 1, .window_right = 0}};
  for (const Mask& mask : same) {
    for (int i = 0; i < n; ++i) {
      ASSERT_EQ(visible_keys(mask, n, n, i), visible_keys(causal, n, n, i)) << i;
      ASSERT_EQ(visible_queries(mask, n, n, i), visible_queries(causal, n, n, i)) << i;
    }
  }
  const Mask narrower{.window_left = n - 2, .window_right = 0};
  EXPECT_NE(visible_keys(narrower, n, n, n - 1), visible_keys(causal, n, n, n - 1));
}

TEST(Mask, BitEqualCausalIsBottomRight) {
  const Mask causal{.causal = true};
  for (const int k_len : {1560, 3120, 4680}) {
    EXPECT_EQ(visible_keys(causal, 1560, k_len, 1559), (Range{0, k_len}));
    EXPECT_EQ(visible_keys(causal, 1560, k_len, 0), (Range{0, k_len - 1559}));
  }
  // More queries than keys: the first rows see nothing.
  EXPECT_TRUE(visible_keys(causal, 5, 3, 1).empty());
  EXPECT_EQ(visible_keys(causal, 5, 3, 2), (Range{0, 1}));
}

TEST(Pack, BitEqualLengthsOneZeroOneAgainstThreeZeroFive) {
  const std::vector<std::int32_t> q{0, 1, 1, 2}, k{0, 3, 3, 8};
  const Pack pack = make_pack(q, k, 2, 8);
  ASSERT_EQ(pack.documents.size(), 3u);
  const Document& last = pack.documents[2];
  EXPECT_EQ(last.q_token, 1);
  EXPECT_EQ(last.k_token, 3);
  EXPECT_EQ(last.q_len, 1);
  EXPECT_EQ(last.k_len, 5);
  EXPECT_EQ(pack.documents[1].q_len, 0);
  EXPECT_EQ(visible_keys({.causal = true}, last.q_len, last.k_len, 0), (Range{0, 5}));
}

TEST(Pack, BitEqualRandomPacksHoldTheirPromises) {
  std::mt19937 random(1);
  const auto draw = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  for (int repeat = 0; repeat < 200; ++repeat) {
    std::vector<std::int32_t> q{0}, k{0};
    const int num_documents = draw(1, 20), longest = draw(0, 300);
    for (int i = 0; i < num_documents; ++i) {
      q.push_back(q.back() + (draw(0, 3) == 0 ? 0 : draw(0, longest)));
      k.push_back(k.back() + (draw(0, 3) == 0 ? 0 : draw(0, longest)));
    }
    const int spare = draw(0, 40);
    const Pack pack = make_pack(q, k, q.back() + spare, k.back() + spare);
    ASSERT_EQ(pack.q_slots, slot_capacity(q.back() + spare, num_documents));
    ASSERT_EQ(pack.k_slots, slot_capacity(k.back() + spare, num_documents));
    ASSERT_EQ(pack.q_slots % 128, 0);
    ASSERT_LT(pack.q_slots, q.back() + spare + 16 * num_documents + 128);
    ASSERT_EQ(pack.documents.size(), q.size() - 1);

    // Every token and every slot belongs to one document at most; slots are aligned and fit.
    std::vector<int> q_tokens(pack.total_q), k_tokens(pack.total_k);
    std::vector<int> q_slots(pack.q_slots), k_slots(pack.k_slots);
    for (const Document& document : pack.documents) {
      ASSERT_EQ(document.q_slot % kSlotAlignment, 0);
      ASSERT_EQ(document.k_slot % kSlotAlignment, 0);
      ASSERT_LE(document.q_slot + document.q_len, pack.q_slots);
      ASSERT_LE(document.k_slot + document.k_len, pack.k_slots);
      for (int i = 0; i < document.q_len; ++i) {
        ASSERT_EQ(++q_tokens[document.q_token + i], 1);
        ASSERT_EQ(++q_slots[document.q_slot + i], 1);
      }
      for (int i = 0; i < document.k_len; ++i) {
        ASSERT_EQ(++k_tokens[document.k_token + i], 1);
        ASSERT_EQ(++k_slots[document.k_slot + i], 1);
      }
    }
    for (std::int64_t t = 0; t < pack.total_q; ++t) ASSERT_EQ(q_tokens[t], t < q.back() ? 1 : 0);
    for (std::int64_t t = 0; t < pack.total_k; ++t) ASSERT_EQ(k_tokens[t], t < k.back() ? 1 : 0);
  }
}

TEST(Pack, BitEqualRejectionsNameArgumentValueAndExpectation) {
  EXPECT_EQ(rejection({0, 3, 7, 5}, {0, 1, 2, 3}),
            "cu_seqlens_q[3] = 5: expected at least cu_seqlens_q[2] = 7 (offsets never decrease)");
  EXPECT_EQ(rejection({0, 3}, {0, 4, 3}),
            "cu_seqlens_k[2] = 3: expected at least cu_seqlens_k[1] = 4 (offsets never decrease)");
  EXPECT_EQ(rejection({1, 3}, {0, 3}), "cu_seqlens_q[0] = 1: expected 0 (the first offset)");
  EXPECT_EQ(rejection({0, 3}, {-1, 3}), "cu_seqlens_k[0] = -1: expected 0 (the first offset)");
  EXPECT_EQ(rejection({0, 256, 512, 768}, {0, 256, 512, 768}, 256, 768),
            "cu_seqlens_q[3] = 768: expected at most total_q = 256 (the rows of the tensor)");
  EXPECT_EQ(rejection({0, 100}, {0, 101}),
            "cu_seqlens_k[1] = 101: expected at most total_k = 100 (the rows of the tensor)");
  EXPECT_EQ(rejection({0, 3}, {0, 3, 4}),
            "length of cu_seqlens_k = 3: expected the length of cu_seqlens_q, 2 (both list the "
            "same documents)");
  for (const std::vector<std::int32_t>& short_list : {std::vector<std::int32_t>{}, {0}}) {
    EXPECT_EQ(rejection(short_list, {0, 3}),
              "length of cu_seqlens_q = " + std::to_string(short_list.size()) +
                  ": expected at least 2 (one document has a begin and an end)");
  }
  EXPECT_EQ(rejection({0, 0}, {0, 0}, -1, 0), "total_q = -1: expected at least 0");
  // Legal: no token at all, and capacity beyond the last document.
  EXPECT_EQ(rejection({0, 0}, {0, 0}, 0, 0), "(nothing thrown)");
  EXPECT_EQ(rejection({0, 3}, {0, 0}), "(nothing thrown)");
}

}  // namespace
}  // namespace mxattn
