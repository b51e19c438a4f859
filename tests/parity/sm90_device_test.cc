// The Hopper backend on a device against the CPU's model of it, through the C interface.
//
// Sm90Sanitize is small, for compute-sanitizer. Without a Hopper device every test skips, and says
// so.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

#include "support/device_attention.h"
#include "support/random_cases.h"
#include "support/sm90_bounds.h"
#include "support/sm90_model.h"

namespace mxattn::test {
namespace {

class Sm90Device : public HopperEach {};
class Sm90Sanitize : public HopperEach {};
MXATTN_FOR_EACH_HOPPER_INSTANCE(Sm90Device);
MXATTN_FOR_EACH_HOPPER_INSTANCE(Sm90Sanitize);

/// Counts over all cases of a test.
struct Counts {
  FlipCount out{"O and L"}, dq{"dQ"}, dk{"dK"}, dv{"dV"};
  std::int64_t equal_elements = 0, elements = 0;

  void check() const {
    for (const FlipCount* count : {&out, &dq, &dk, &dv}) {
      std::printf("  %-8s %lld of %lld rows differ, %.1f expected at most\n", count->name,
                  static_cast<long long>(count->differing), static_cast<long long>(count->rows),
                  count->expected);
      EXPECT_LE(static_cast<double>(count->differing), count->most()) << count->name;
    }
    std::printf("  %.5f %% of output elements have equal bits\n",
                100.0 * static_cast<double>(equal_elements) / static_cast<double>(elements));
  }
};

template <class T>
void expect_equal(const char* what, const std::vector<T>& device, const T* host) {
  for (std::size_t i = 0; i < device.size(); ++i) {
    // NOLINTNEXTLINE(bugprone-suspicious-memory-comparison): bits, as of NaN and -0
    if (std::memcmp(&device[i], host + i, sizeof(T)) != 0) {
      ADD_FAILURE() << what << "[" << i << "] of " << device.size() << ": "
                    << static_cast<double>(device[i]) << ", expected "
                    << static_cast<double>(host[i]);
      return;
    }
  }
}

/// Everything that is promised to be equal, given the device's own O, L and mu.
void expect_equal_codes(const DeviceAttention& device, const Sm90Model& model,
                        const Result& result) {
  for (const auto& [name, operand] :
       {std::pair{"q", &model.q()}, std::pair{"k", &model.k()}, std::pair{"v", &model.v()}}) {
    const HostOperand x = device.operand(name);
    expect_equal((std::string(name) + " codes").c_str(), x.codes, operand->codes);
    expect_equal((std::string(name) + " exponents").c_str(), x.exponents, operand->exponents);
    expect_equal((std::string(name) + " norms").c_str(), x.norms, operand->norms);
  }
  const DeviceAttention::Gradient g = device.gradient();
  const Sm90Model::Gradient expected = model.gradient(result);
  expect_equal("g codes", g.g.codes, expected.codes.data());
  expect_equal("g exponents", g.g.exponents, expected.exponents.data());
  expect_equal("g norms", g.g.norms, expected.norms.data());
  expect_equal("norms of O", g.output_norms, expected.output_norms.data());
  expect_equal("D", g.delta, expected.delta.data());
}

/// Whether the rows of `dim` channels at `at` are the same bits. Counts elements.
bool same_row(const Bf16Vector& a, const Bf16Vector& b, std::size_t at, int dim, Counts& counts) {
  std::int64_t equal = 0;
  for (int c = 0; c < dim; ++c) equal += a[at + c] == b[at + c] ? 1 : 0;
  counts.equal_elements += equal;
  counts.elements += dim;
  return equal == dim;
}

void expect_near_row(const char* what, const Bf16Vector& a, const Bf16Vector& b, std::size_t at,
                     int dim, double bound) {
  for (std::size_t c = at; c < at + static_cast<std::size_t>(dim); ++c) {
    // One rounding to BF16 may go the other way.
    const double most = bound + 0x1p-7 * std::abs(value_of(b[c]));
    ASSERT_LE(std::abs(value_of(a[c]) - value_of(b[c])), most) << what << " at " << c;
  }
}

/// O, LSE, mu and L of one document and head.
void compare_forward(const AttentionCase& test, const Sm90Model& model, const Result& device,
                     const Result& host, const Document& d, int head, Counts& counts) {
  const CaseSpec& spec = test.spec();
  const int key_head = head / (spec.heads_q / spec.heads_k);
  const std::vector<double> values = row_maxima(model.v());
  for (int i = 0; i < d.q_len; ++i) {
    const auto stat = static_cast<std::size_t>(head * test.pack().total_q + d.q_token + i);
    const std::size_t row = test.q_at(d.q_token + i, head);
    const Range keys = visible_keys(spec.mask, d.q_len, d.k_len, i);
    ASSERT_EQ(device.row_reference[stat], host.row_reference[stat]) << "mu of row " << i;
    const double codes = 2.0 * keys.size();  // h and hs
    double largest = 0;
    for (int j = keys.begin; j < keys.end; ++j) {
      largest = std::max(
          largest, values[static_cast<std::size_t>(key_head * test.pack().k_slots + d.k_slot + j)]);
    }
    // Without a flip: one alpha a key tile, the FMAs around it, and the scale of L.
    const double tiles = keys.size() / 128 + 2;
    const double drift = tiles * (kWeight + 2 * 0x1p-24);
    const double l = host.row_sum[stat];
    const double l_off = std::abs(device.row_sum[stat] - l) / l;
    double out_off = 0;
    for (std::size_t c = row; c < row + static_cast<std::size_t>(spec.dim); ++c) {
      const double expected = value_of(host.out[c]);
      out_off = std::max(
          out_off, std::abs(value_of(device.out[c]) - expected) - 0x1p-7 * std::abs(expected));
    }
    static_cast<void>(same_row(device.out, host.out, row, spec.dim, counts));
    const bool differs = not(l_off <= drift and out_off <= 4 * drift * largest);
    counts.out.add(codes, differs);
    // With kMostFlips of them: each moves l by a step of a code that is at most l, and O by twice
    // as much of the largest value. Codes below 2^-6 have steps of 2^-9.
    const double flipped = kMostFlips * (kRelativeStep + 0x1p-17 / l);
    ASSERT_LE(l_off, drift + flipped) << "L of row " << i;
    ASSERT_LE(out_off, (4 * drift + 2 * flipped) * largest) << "O of row " << i;
    if (keys.empty()) {
      ASSERT_EQ(device.lse[stat], -kInfinity);
    } else {
      const double off = std::abs(device.lse[stat] - host.lse[stat]);
      const double roundings = 0x1p-21 * (1 + std::abs(host.lse[stat]));
      ASSERT_LE(off, (differs ? drift + flipped : drift) * 2 + roundings) << "LSE of row " << i;
    }
  }
}

/// dQ, dK and dV given the device's O, L and mu: equal bits, but for rows in which a code flipped.
void compare_backward(const AttentionCase& test, const Sm90Model& model, const Result& device,
                      const Result& host, Counts& counts) {
  const CaseSpec& spec = test.spec();
  const Pack& pack = test.pack();
  const int group = spec.heads_q / spec.heads_k;
  const Sm90Model::Gradient g = model.gradient(device);
  const double scale = std::abs(spec.softmax_scale);
  // H has entries 1 / sqrt(d): a rotated row of equal magnitudes grows by sqrt(d) at most.
  const double rotated = std::sqrt(static_cast<double>(spec.dim));
  // The scale of `norm` is the bound of |dS| less two bits; that of `row` reaches the bound, and
  // rounding up to a power of two adds another bit.
  const int slack = spec.recipe.ds_scale == DsScale::kRow ? 3 : 0;
  const double flip = kMostFlips * kLargestStep * kLargestCode;
  for (const Document& d : pack.documents) {
    // Largest exponents of scales anywhere in the document.
    int c = -400, r = -400, nv = -400, ek = -400;
    for (int h = 0; h < spec.heads_k; ++h) {
      for (int j = 0; j < d.k_len; ++j) {
        nv = std::max<int>(nv, model.v().norms_of(h)[d.k_slot + j]);
        ek = std::max<int>(ek, model.k().exponents_of(h)[d.k_slot + j]);
      }
    }
    int r_dq = -400;
    for (int h = 0; h < spec.heads_q; ++h) {
      for (int i = 0; i < d.q_len; ++i) {
        const auto at = static_cast<std::size_t>(h * pack.q_slots + d.q_slot + i);
        const int norms = std::max<int>(g.output_norms[at], nv) + g.norms[at];
        c = std::max<int>(c, g.exponents[at]);
        r = std::max(r, norms + model.q().exponents_of(h)[d.q_slot + i]);
        r_dq = std::max(r_dq, norms + ek);
      }
    }
    const double dv_bound = flip * std::ldexp(1.0, c - 8);
    const double dk_bound = flip * std::ldexp(scale, r - 10 + slack) * rotated;
    const double dq_bound = flip * std::ldexp(scale, r_dq - 10 + slack) * rotated;
    for (int h = 0; h < spec.heads_q; ++h) {
      for (int i = 0; i < d.q_len; ++i) {
        const std::size_t row = test.q_at(d.q_token + i, h);
        const int n = visible_keys(spec.mask, d.q_len, d.k_len, i).size();
        counts.dq.add(n, not same_row(device.dq, host.dq, row, spec.dim, counts));
        expect_near_row("dQ", device.dq, host.dq, row, spec.dim, dq_bound);
      }
    }
    for (int h = 0; h < spec.heads_k; ++h) {
      for (int j = 0; j < d.k_len; ++j) {
        const std::size_t row = test.k_at(d.k_token + j, h);
        const int n = group * visible_queries(spec.mask, d.q_len, d.k_len, j).size();
        counts.dk.add(n, not same_row(device.dk, host.dk, row, spec.dim, counts));
        counts.dv.add(n, not same_row(device.dv, host.dv, row, spec.dim, counts));
        expect_near_row("dK", device.dk, host.dk, row, spec.dim, dk_bound);
        expect_near_row("dV", device.dv, host.dv, row, spec.dim, dv_bound);
      }
    }
  }
}

/// Rows behind the last document.
void expect_outside(const AttentionCase& test, const Result& r) {
  const Pack& pack = test.pack();
  const Document& last = pack.documents.back();
  const auto zero = [](const Bf16Vector& x, std::size_t from) {
    return std::all_of(x.begin() + static_cast<std::ptrdiff_t>(from), x.end(),
                       [](std::uint16_t bits) { return bits == 0; });
  };
  EXPECT_TRUE(zero(r.out, test.q_at(last.q_token + last.q_len)));
  EXPECT_TRUE(zero(r.dq, test.q_at(last.q_token + last.q_len)));
  EXPECT_TRUE(zero(r.dk, test.k_at(last.k_token + last.k_len)));
  EXPECT_TRUE(zero(r.dv, test.k_at(last.k_token + last.k_len)));
  for (int h = 0; h < test.spec().heads_q; ++h) {
    for (std::int64_t t = last.q_token + last.q_len; t < pack.total_q; ++t) {
      const auto at = static_cast<std::size_t>(h * pack.total_q + t);
      ASSERT_EQ(r.lse[at], -kInfinity);
      ASSERT_EQ(r.row_reference[at], 0);
      ASSERT_EQ(r.row_sum[at], 1.0f);
    }
  }
}

void compare(const AttentionCase& test, DeviceOptions options, Counts& counts) {
  const Sm90Model model(test);
  DeviceAttention attention(test, options);
  const Result device = attention.run();
  if (::testing::Test::HasFailure()) return;
  expect_equal_codes(attention, model, device);
  const Result forward = model.forward();
  for (const Document& d : test.pack().documents) {
    for (int head = 0; head < test.spec().heads_q; ++head) {
      compare_forward(test, model, device, forward, d, head, counts);
    }
  }
  compare_backward(test, model, device, model.backward(device), counts);
  expect_outside(test, device);
}

std::string describe(const AttentionCase& test) {
  const CaseSpec& spec = test.spec();
  std::ostringstream text;
  text << "q";
  for (const int n : spec.q_lens) text << " " << n;
  text << " k";
  for (const int n : spec.k_lens) text << " " << n;
  text << " heads " << spec.heads_q << "/" << spec.heads_k << " causal " << spec.mask.causal
       << " window " << spec.mask.window_left << " " << spec.mask.window_right << " spare "
       << spec.spare << " scale " << spec.softmax_scale << " rotate " << spec.rotate;
  return text.str();
}

void compare_random(const HopperInstance& instance, std::uint64_t first, int cases, int most,
                    Counts& counts) {
  constexpr int kPads[] = {0, 8, 1, 0};
  for (int i = 0; i < cases; ++i) {
    const AttentionCase test =
        random_case(first + static_cast<std::uint64_t>(i), most, instance.recipe, instance.dim);
    SCOPED_TRACE("case " + std::to_string(i) + ": " + describe(test));
    compare(test, {.pad = kPads[i % 4], .planned = i % 3 == 0}, counts);
    if (::testing::Test::HasFailure()) return;
  }
}

// ---- against the model ------------------------------------------------------------------------

TEST_P(Sm90Sanitize, BoundedSmallPacks) {
  Counts counts;
  compare_random(GetParam(), 1, 8, 150, counts);
  counts.check();
}

TEST_P(Sm90Sanitize, BoundedDocumentsWithoutQueriesOrKeys) {
  Counts counts;
  for (const Mask mask : {Mask{}, Mask{.causal = true}}) {
    AttentionCase test({.recipe = GetParam().recipe,
                        .q_lens = {0, 5, 40, 0},
                        .k_lens = {7, 0, 3, 0},
                        .heads_q = 2,
                        .dim = GetParam().dim,
                        .mask = mask,
                        .spare = 3});
    fill_normal(test, 5);
    poison_tails(test);
    compare(test, {}, counts);
  }
  // Nothing at all: capacity only.
  AttentionCase empty(
      {.recipe = GetParam().recipe, .q_lens = {0}, .dim = GetParam().dim, .spare = 20});
  fill_normal(empty, 6);
  poison_tails(empty);
  compare(empty, {}, counts);
  AttentionCase none({.recipe = GetParam().recipe, .q_lens = {0}, .dim = GetParam().dim});
  compare(none, {}, counts);
}

TEST_P(Sm90Device, BoundedRandomPacks) {
  Counts counts;
  const bool is_default = GetParam().recipe == recipes::fp8 and GetParam().dim == 128;
  compare_random(GetParam(), 1000, is_default ? 200 : 60, 360, counts);
  counts.check();
}

// Zeros have the exponent -96: as far below others as any.
TEST_P(Sm90Device, BoundedAmongZeros) {
  Counts counts;
  const auto dim = static_cast<std::size_t>(GetParam().dim);
  const struct {
    int first, count;
  } runs[] = {{128, 1}, {128, 32}, {256, 128}, {0, 128}, {300, 300}, {512, 88}};
  for (const auto& [first, count] : runs) {
    for (Bf16Vector AttentionCase::*const x :
         {&AttentionCase::q, &AttentionCase::k, &AttentionCase::v, &AttentionCase::dout}) {
      AttentionCase test({.recipe = GetParam().recipe,
                          .q_lens = {600},
                          .dim = GetParam().dim,
                          .mask = {.causal = true}});
      fill_normal(test, 13);
      multiply(test.dout, 0x1p-24);
      multiply(test.*x, static_cast<std::size_t>(first) * dim,
               static_cast<std::size_t>(count) * dim, 0);
      SCOPED_TRACE("zeros from " + std::to_string(first));
      compare(test, {}, counts);
      if (HasFailure()) return;
    }
  }
  counts.check();
}

TEST_P(Sm90Device, BoundedLongDocumentsReachPromotions) {
  Counts counts;
  for (const Mask mask : {Mask{.causal = true}, Mask{}, Mask{.causal = true, .window_left = 900}}) {
    AttentionCase test({.recipe = GetParam().recipe,
                        .q_lens = {2500, 40},
                        .dim = GetParam().dim,
                        .mask = mask,
                        .spare = 9});
    fill_normal(test, 11);
    poison_tails(test);
    compare(test, {}, counts);
  }
  AttentionCase grouped(
      {.recipe = GetParam().recipe, .q_lens = {1300}, .heads_q = 2, .dim = GetParam().dim});
  fill_normal(grouped, 12);
  Normal random(3);
  for (Bf16Vector* x : {&grouped.q, &grouped.k, &grouped.v, &grouped.dout}) {
    spread_rows(*x, GetParam().dim, 12, random);
  }
  compare(grouped, {.planned = true}, counts);
  counts.check();
}

}  // namespace
}  // namespace mxattn::test
