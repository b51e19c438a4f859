// What the Hopper kernels round and form by exponentials, element by element, against the
// restatement of the page (support/faithful_reference.h); and, given that, every sum behind it bit
// for bit: l, L, O, dQ, dK and dV.
//
// Instances that leave codes in memory run on what a call of the shipped ones left; their outputs
// have the same bits.
#include "support/sm90_dump.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "support/device_attention.h"
#include "support/faithful_reference.h"
#include "support/random_cases.h"
#include "support/sm90_bounds.h"
#include "support/sm90_model.h"

namespace mxattn::test {
namespace {

using kernels::sm90::ForwardConfig;

class Sm90Dump : public Hopper {};

/// How often codes differ from those of the restatement.
struct CodeCount {
  std::int64_t codes = 0, differing = 0;
};

/// The dump in place of the restatement's own roundings, each checked against it.
class DumpedWeights {
 public:
  DumpedWeights(const Dump& dump, int head, std::int64_t first_token, CodeCount& count)
      : dump_(dump), head_(head), first_token_(first_token), count_(count) {}

  float alpha(int query, int tile, float own) const {
    const std::size_t at = row(query) * static_cast<std::size_t>(dump_.keys / 128);
    const float dumped = dump_.alpha[at + static_cast<std::size_t>(tile)];
    if (own == 1.0f or own == 0.0f) {
      EXPECT_EQ(dumped, own) << "alpha of row " << query << ", tile " << tile;
    } else {
      EXPECT_NEAR(dumped, own, kWeight * own + 0x1p-126) << "row " << query << ", tile " << tile;
    }
    return dumped;
  }
  float row_weight(int query, int key, float value) const {
    return code(dump_.hs, query, key, value);
  }
  float value_weight(int query, int key, float value) const {
    return code(dump_.h, query, key, value);
  }
  float gradient_weight(int query, int key, float value) const {
    return code(dump_.t, query, key, value);
  }
  // dS = p (dP - D): p alone has an exponential's error, so dS has it relatively.
  float ds_of_dq(int query, int key, float value) const {
    return code(dump_.ds_dq, query, key, value);
  }
  float ds_of_dk(int query, int key, float value) const {
    return code(dump_.ds_dkv, query, key, value);
  }

 private:
  std::size_t row(int query) const { return dump_.row(head_, first_token_ + query); }

  /// Equal codes, or a border between them within the error of an exponential and the products
  /// behind it.
  float code(const std::vector<std::uint8_t>& codes, int query, int key, float value) const {
    const float dumped = e4m3_to_float(
        codes[row(query) * static_cast<std::size_t>(dump_.keys) + static_cast<std::size_t>(key)]);
    ++count_.codes;
    if (dumped == round_e4m3(value)) return dumped;
    if (is_nan(dumped) and is_nan(value)) return dumped;
    ++count_.differing;
    // dK's dS is t (acc' F - D'), one rounding more than the products counted in kProduct.
    const auto moved = [&](double by) {
      return round_e4m3(static_cast<float>(static_cast<double>(value) * (1 + by)));
    };
    EXPECT_TRUE(dumped == moved(2 * kProduct) or dumped == moved(-2 * kProduct))
        << "code " << dumped << " of " << value << ", row " << query << ", key " << key;
    return dumped;
  }

  const Dump& dump_;
  int head_;
  std::int64_t first_token_;
  CodeCount& count_;
};

/// O, L, mu and LSE of a row from the dump.
void expect_forward_row(const AttentionCase& test, const Result& device, const ReferenceHead& x,
                        const Document& d, int head, int i, const Dump& dump,
                        const DumpedWeights& weights) {
  const std::size_t at = dump.row(head, d.q_token + i);
  const ReferenceForward f(x, i, weights);
  std::vector<float> o(static_cast<std::size_t>(x.dim), 0.0f);
  if (x.keys_of(i).empty()) {
    expect_row("O", &device.out[test.q_at(d.q_token + i, head)], o, i);
    return;
  }
  for (std::size_t c = 0; c < o.size(); ++c) o[c] = div_rn(f.o[c], f.l);
  expect_row("O", &device.out[test.q_at(d.q_token + i, head)], o, i);
  const float mu = std::ceil(f.m);
  ASSERT_EQ(device.row_reference[at], static_cast<int>(mu));
  // Maxima take no exponential: equal without a dump.
  const int last_tile = x.keys_of(i).begin / 128;
  const std::size_t tiles = at * static_cast<std::size_t>(dump.keys / 128);
  ASSERT_EQ(bits_of(dump.maximum[tiles + static_cast<std::size_t>(last_tile)]), bits_of(f.m));
  const float correction = dump.correction[at];
  ASSERT_NEAR(correction, Fp32Ops::exp2(f.m - mu), kWeight);
  ASSERT_EQ(bits_of(device.row_sum[at]), bits_of(mul_rn(f.l, correction))) << "L of row " << i;
  const double lse = std::log(static_cast<double>(f.l)) + f.m * std::log(2.0);
  ASSERT_NEAR(device.lse[at], lse, 0x1p-21 * (1 + std::abs(lse)));
}

template <class Config>
void replay(const AttentionCase& test, bool with_backward) {
  const Sm90Model model(test);
  DeviceAttention device(test);
  const Result shipped = device.run();
  device.forward(nullptr);
  Dumper dumper(device, test);
  dumper.forward<Config>();
  ASSERT_EQ(device.result(), shipped) << "of the forward with a dump";
  if (with_backward) {
    device.backward(nullptr);
    dumper.backward();
    ASSERT_EQ(device.result(), shipped) << "of the backward with a dump";
  }

  const Sm90Model::Gradient gradient = model.gradient(shipped);
  Operand g = model.q();
  g.codes = const_cast<std::uint8_t*>(gradient.codes.data());
  g.exponents = const_cast<std::int8_t*>(gradient.exponents.data());
  g.norms = const_cast<std::int8_t*>(gradient.norms.data());
  const CaseSpec& spec = test.spec();
  const int group = spec.heads_q / spec.heads_k;
  CodeCount count;
  for (const Document& d : test.pack().documents) {
    std::vector<std::vector<float>> dk, dv;
    for (int head = 0; head < spec.heads_q; ++head) {
      if (head % group == 0) {
        dk.assign(static_cast<std::size_t>(d.k_len), std::vector<float>(spec.dim, 0.0f));
        dv = dk;
      }
      const ReferenceHead x = reference_head(test, d, head,
                                             {.q = model.q(),
                                              .k = model.k(),
                                              .v = model.v(),
                                              .g = g,
                                              .output_norms = gradient.output_norms,
                                              .delta = gradient.delta,
                                              .row_reference = shipped.row_reference});
      const DumpedWeights weights(dumper.dump(), head, d.q_token, count);
      for (int i = 0; i < d.q_len; ++i) {
        expect_forward_row(test, shipped, x, d, head, i, dumper.dump(), weights);
        if (with_backward) {
          expect_row("dQ", &shipped.dq[test.q_at(d.q_token + i, head)],
                     finished(test, reference_dq(x, i, weights)), i);
        }
        if (::testing::Test::HasFailure()) return;
      }
      if (not with_backward) continue;
      const ReferenceScales scales(x);
      for (int j = 0; j < d.k_len; ++j) {
        const auto key = static_cast<std::size_t>(j);
        reference_dkv(x, scales, j, dk[key], dv[key], weights);
        if (head % group != group - 1) continue;
        const std::size_t at = test.k_at(d.k_token + j, head / group);
        expect_row("dV", &shipped.dv[at], dv[key], j);
        expect_row("dK", &shipped.dk[at], finished(test, dk[key]), j);
        if (::testing::Test::HasFailure()) return;
      }
    }
  }
  std::printf("  %lld of %lld codes differ\n", static_cast<long long>(count.differing),
              static_cast<long long>(count.codes));
  EXPECT_GT(count.codes, 10000);
  EXPECT_LE(static_cast<double>(count.differing),
            static_cast<double>(count.codes) * kFlipChance + 10);
}

TEST_F(Sm90Dump, CodeEqualAndBitEqualBehindTheCodes) {
  Normal random(7);
  for (const Mask mask : {Mask{.causal = true}, Mask{.causal = true, .window_left = 150}, Mask{}}) {
    for (const int spread : {0, 5}) {
      SCOPED_TRACE("causal " + std::to_string(mask.causal) + " spread " + std::to_string(spread));
      AttentionCase test(
          {.q_lens = {290, 1, 130}, .heads_q = 2, .heads_k = 1, .mask = mask, .spare = 3});
      fill_normal(test, 95);
      for (Bf16Vector* x : {&test.q, &test.k, &test.v, &test.dout}) {
        if (spread > 0) spread_rows(*x, 128, spread, random);
      }
      poison_tails(test);
      replay<ForwardConfig<128>>(test, true);
      if (HasFailure()) return;
    }
  }
}

TEST_F(Sm90Dump, CodeEqualAndBitEqualForwardOfOtherTables) {
  Normal random(8);
  for (const Recipe& recipe : {recipes::mxfp8_token, recipes::mxfp8}) {
    SCOPED_TRACE(std::string(info_of(recipe).name));
    AttentionCase wide({.recipe = recipe, .q_lens = {280, 60}, .heads_q = 2});
    AttentionCase narrow({.recipe = recipe, .q_lens = {280, 60}, .heads_q = 2, .dim = 64});
    for (AttentionCase* test : {&wide, &narrow}) {
      fill_normal(*test, 96);
      for (Bf16Vector* x : {&test->q, &test->k, &test->v}) {
        spread_rows(*x, test->spec().dim, 4, random);
      }
    }
    replay<ForwardConfig<128>>(wide, false);
    replay<ForwardConfig<64>>(narrow, false);
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace mxattn::test
