// The quantisers of a device against those of the CPU: the same bits.
//
// Skips where no device is found, and says so. QuantizeDevice.DISABLED_Speed prints times:
//   mxattn_quantize_cuda_device_test --gtest_also_run_disabled_tests --gtest_filter=*Speed
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "quantize/cuda/quantize.h"
#include "quantize/quantize.h"
#include "recipe/exponents.h"
#include "recipe/roles.h"
#include "support/device_array.h"
#include "support/operands.h"

namespace mxattn::quantize_test {
namespace {

constexpr int kThreads = 2;  // of the CPU's quantisers
// For as many kernels are launched that stay: few, so that small packs make them go round often.
constexpr int kFewMultiprocessors = 2;
constexpr std::uint16_t kNanBits = 0x7FC0;

class QuantizeDevice : public testing::Test {
 protected:
  void SetUp() override {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess or devices == 0) {
      GTEST_SKIP() << "no CUDA device here";
    }
    alarm(120);  // a kernel that hangs holds the device until its process ends
  }
  void TearDown() override { alarm(0); }
};

// ---- tensors, operands and lengths on a device -------------------------------------------------

/// A copy of a tensor, `pad` elements of NaN behind every row; with an odd pad no row is aligned.
class DeviceTensor {
 public:
  explicit DeviceTensor(const Tensor& x, int pad = 0)
      : offset_(pad % 2), array_(rows_of(x, pad, offset_)) {
    const std::int64_t row = x.dim + pad;
    view_ = {array_.data() + offset_, x.tokens, x.heads, x.dim, x.heads * row, row};
  }
  const TensorView<const std::uint16_t>& view() const { return view_; }

 private:
  static std::vector<std::uint16_t> rows_of(const Tensor& x, int pad, int offset) {
    std::vector<std::uint16_t> rows(static_cast<std::size_t>(offset), kNanBits);
    for (std::size_t at = 0; at < x.data.size(); at += static_cast<std::size_t>(x.dim)) {
      rows.insert(rows.end(), x.data.begin() + static_cast<std::ptrdiff_t>(at),
                  x.data.begin() + static_cast<std::ptrdiff_t>(at) + x.dim);
      rows.insert(rows.end(), static_cast<std::size_t>(pad), kNanBits);
    }
    return rows;
  }
  int offset_;
  DeviceArray<std::uint16_t> array_;
  TensorView<const std::uint16_t> view_;
};

/// An operand filled with rubbish, and a transposed copy of its codes.
struct DeviceOperand {
  DeviceArray<std::uint8_t> codes, transposed;
  DeviceArray<std::int8_t> exponents, norms;
  Operand operand;

  DeviceOperand(std::int64_t slots, int heads, int dim)
      : codes(std::vector<std::uint8_t>(static_cast<std::size_t>(heads * slots * dim), 0xA5)),
        transposed(std::vector<std::uint8_t>(static_cast<std::size_t>(heads * slots * dim), 0xA5)),
        exponents(std::vector<std::int8_t>(static_cast<std::size_t>(heads * slots), 77)),
        norms(std::vector<std::int8_t>(static_cast<std::size_t>(heads * slots), 77)),
        operand{.codes = codes.data(),
                .exponents = exponents.data(),
                .norms = norms.data(),
                .scale = nullptr,
                .slots = slots,
                .heads = heads,
                .dim = dim} {}
};

std::vector<std::int32_t> offsets_of(const Pack& pack, bool query_side) {
  std::vector<std::int32_t> offsets{0};
  for (const Document& d : pack.documents) {
    offsets.push_back(
        static_cast<std::int32_t>(query_side ? d.q_token + d.q_len : d.k_token + d.k_len));
  }
  return offsets;
}

std::vector<std::uint8_t> transposed_codes(const Operand& operand) {
  std::vector<std::uint8_t> result(
      static_cast<std::size_t>(operand.heads * operand.slots * operand.dim));
  transpose_codes(operand, TokenOrder::kFragment, kThreads, result.data());
  return result;
}

template <class T>
void expect_equal(const char* what, const std::vector<T>& device, const std::vector<T>& host,
                  int row = 1) {
  ASSERT_EQ(device.size(), host.size()) << what;
  for (std::size_t i = 0; i < host.size(); ++i) {
    ASSERT_EQ(+device[i], +host[i])
        << what << " " << i << ", row " << i / static_cast<std::size_t>(row);
  }
}

// ---- Q, K and V -------------------------------------------------------------------------------

struct Input {
  Role role;
  Tensor x;
  int pad = 0;
  bool norms = false;
  bool transposed = false;
};

/// Some tensors of a pack in one call, against the CPU's.
void compare(const Recipe& recipe, const Pack& pack, bool rotate,
             const std::vector<Input>& inputs) {
  DeviceArray<std::int32_t> cu_q(offsets_of(pack, true)), cu_k(offsets_of(pack, false));
  std::vector<std::unique_ptr<DeviceTensor>> tensors;
  std::vector<std::unique_ptr<DeviceOperand>> operands;
  std::vector<cuda::QuantizeArgs> args;
  std::int64_t words = 0;
  for (const Input& in : inputs) {
    const bool query = is_query_role(in.role);
    const std::int64_t slots = query ? pack.q_slots : pack.k_slots;
    tensors.push_back(std::make_unique<DeviceTensor>(in.x, in.pad));
    operands.push_back(std::make_unique<DeviceOperand>(slots, in.x.heads, in.x.dim));
    DeviceOperand& out = *operands.back();
    args.push_back({.x = tensors.back()->view(),
                    .cu_seqlens = query ? cu_q.data() : cu_k.data(),
                    .num_documents = static_cast<int>(pack.documents.size()),
                    .rotate = is_rotated(in.role, in.x.dim, rotate),
                    .out = out.operand,
                    .transposed = in.transposed ? out.transposed.data() : nullptr});
    if (not in.norms) args.back().out.norms = nullptr;
    words += cuda::quantize_scratch_words(in.x.heads, slots);
  }
  DeviceArray<std::uint32_t> scratch(
      std::vector<std::uint32_t>(static_cast<std::size_t>(words), 0));
  cuda::quantize(recipe, args, scratch.data(), kFewMultiprocessors, nullptr);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);

  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const Input& in = inputs[i];
    SCOPED_TRACE(testing::Message() << "tensor " << i << " dim " << in.x.dim << " heads "
                                    << in.x.heads << " pad " << in.pad);
    Buffers host(operands[i]->operand.slots, in.x.heads, in.x.dim, in.norms, false);
    quantize(recipe, in.role, in.x.view(), pack, rotate, kThreads, host.operand);
    expect_equal("exponent", operands[i]->exponents.to_host(), host.exponents);
    expect_equal("code", operands[i]->codes.to_host(), host.codes, in.x.dim);
    if (in.norms) expect_equal("norm", operands[i]->norms.to_host(), host.norms);
    if (in.transposed) {
      expect_equal("transposed code", operands[i]->transposed.to_host(),
                   transposed_codes(host.operand), static_cast<int>(host.operand.slots));
    }
    if (testing::Test::HasFatalFailure()) return;
  }
}

/// Tokens of NaN, Inf, zeros (also negative), and very small and large ones, among the others.
void spoil(Random& random, Tensor& x) {
  const std::int64_t rows = x.tokens * x.heads;
  if (rows == 0) return;
  for (int i = 0; i < 6; ++i) {
    const auto row = static_cast<std::int64_t>(draw(random, 0, static_cast<int>(rows) - 1));
    std::uint16_t* const at = x.data.data() + row * x.dim;
    const int kind = draw(random, 0, 7);
    const int channel = draw(random, 0, x.dim - 1);
    if (kind == 0) at[channel] = kNanBits;
    if (kind == 1) at[channel] = 0x7F80;  // Inf
    if (kind == 2) at[channel] = 0xFF80;
    if (kind == 3) std::fill_n(at, x.dim, std::uint16_t{0});
    if (kind == 4) std::fill_n(at, x.dim, std::uint16_t{0x8000});
    for (int c = 0; c < x.dim and kind > 4; ++c) {
      const int shift = kind == 5 ? -120 : kind == 6 ? 100 : 12;
      at[c] = nearest_bf16(std::ldexp(value_of_bf16(at[c]), shift));
    }
  }
}

Tensor input(Random& random, std::int64_t tokens, int heads, int dim) {
  Tensor x = heavy_tailed(random, tokens, heads, dim, draw(random, 0, 6));
  if (draw(random, 0, 2) == 0) spoil(random, x);
  return x;
}

const Recipe kDeviceRecipes[] = {recipes::fp8, recipes::mxfp8, recipes::mxfp8_token,
                                 recipes::mxfp8_floor};
constexpr int kPads[] = {0, 8, 1, 0, 24};

TEST_F(QuantizeDevice, BitEqualCpuOverRandomPacks) {
  Random random(1);
  for (int repeat = 0; repeat < 160; ++repeat) {
    const Recipe& recipe = kDeviceRecipes[repeat % 4];
    const int dim = repeat / 4 % 2 == 0 ? 128 : 64;
    const int heads_k = draw(random, 1, 4);
    const int heads_q = heads_k * draw(random, 1, 2);
    const Pack pack = random_pack(random, repeat % 10 == 0 ? 1500 : 300);
    const auto pad = [&] { return kPads[draw(random, 0, 4)]; };
    const auto maybe = [&] { return draw(random, 0, 1) == 1; };
    SCOPED_TRACE(testing::Message() << "repeat " << repeat << " " << info_of(recipe).name);
    compare(recipe, pack, maybe(),
            {{Role::kQ, input(random, pack.total_q, heads_q, dim), pad(), maybe(), maybe()},
             {Role::kK, input(random, pack.total_k, heads_k, dim), pad(), maybe(), maybe()},
             {Role::kV, input(random, pack.total_k, heads_k, dim), pad(), true, true}});
    if (HasFatalFailure()) return;
  }
}

TEST_F(QuantizeDevice, BitEqualLongDocumentsLookBackFar) {
  Random random(2);
  for (const int dim : {64, 128}) {
    for (const Recipe& recipe : kDeviceRecipes) {
      const Pack pack = pack_of({30000, 7, 9000}, 50);
      Tensor x = heavy_tailed(random, pack.total_k, 2, dim, 1);
      // A loud token now and then, which all later ones feel.
      for (std::int64_t t = 100; t < x.tokens; t += 7001) {
        for (int c = 0; c < dim; ++c) {
          std::uint16_t& value = x.row(t, 1)[c];
          value = nearest_bf16(std::ldexp(value_of_bf16(value), static_cast<int>(t / 2000)));
        }
      }
      SCOPED_TRACE(testing::Message() << "dim " << dim << " " << info_of(recipe).name);
      compare(recipe, pack, true, {{Role::kK, x, 0, false, false}, {Role::kV, x, 0, true, true}});
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(QuantizeDevice, BitEqualManyShortDocuments) {
  Random random(3);
  for (const int dim : {64, 128}) {
    for (const Recipe& recipe : kDeviceRecipes) {
      std::vector<int> lengths;
      for (int i = 0; i < 700; ++i) lengths.push_back(draw(random, 0, 2) * draw(random, 0, 40));
      const Pack pack = pack_of(lengths, 33);
      const Tensor x = input(random, pack.total_k, 3, dim);
      SCOPED_TRACE(testing::Message() << "dim " << dim << " " << info_of(recipe).name);
      compare(recipe, pack, true, {{Role::kQ, x, 0, true, true}, {Role::kV, x, 8, true, true}});
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(QuantizeDevice, BitEqualWhereStreamsMeet) {
  Random random(12);
  for (const int dim : {64, 128}) {
    for (int repeat = 0; repeat < 4; ++repeat) {
      std::vector<int> lengths;
      for (int tokens = 0; tokens < 6000; tokens += lengths.back()) {
        lengths.push_back(draw(random, 0, 3) == 0 ? draw(random, 1, 1500) : draw(random, 1, 90));
      }
      const Pack pack = pack_of(lengths, repeat * 40);
      // By falling exponents a maximum that is lost or another document's shows.
      const auto falling = [&](int heads) {
        Tensor x = heavy_tailed(random, pack.total_k, heads, dim, 1);
        for (const Document& d : pack.documents) {
          for (int i = 0; i < d.k_len; ++i) {
            for (int h = 0; h < heads; ++h) {
              std::uint16_t* const row = x.row(d.k_token + i, h);
              for (int c = 0; c < dim; ++c) {
                row[c] = nearest_bf16(std::ldexp(value_of_bf16(row[c]), 20 - i / 60));
              }
            }
          }
        }
        return x;
      };
      SCOPED_TRACE(testing::Message() << "dim " << dim << " repeat " << repeat);
      const int heads = 1 << repeat;
      compare(recipes::fp8, pack, true,
              {{Role::kQ, falling(4 * heads), 0, false, false},
               {Role::kK, falling(heads), 0, false, false},
               {Role::kV, falling(heads), 0, true, true}});
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(QuantizeDevice, BitEqualAtEveryMagnitude) {
  Random random(4);
  for (const int dim : {64, 128}) {
    for (int scale = -132; scale <= 126; scale += 6) {
      const Pack pack = pack_of({40, 70});
      const Tensor x = heavy_tailed(random, pack.total_k, 1, dim, 1, scale);
      for (const Recipe& recipe : kDeviceRecipes) {
        SCOPED_TRACE(testing::Message() << "dim " << dim << " 2^" << scale);
        compare(recipe, pack, true, {{Role::kK, x, 0, true, false}, {Role::kV, x, 0, true, false}});
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(QuantizeDevice, BitEqualWithoutTokens) {
  for (const Recipe& recipe : kDeviceRecipes) {
    const Pack pack = pack_of({0, 0, 0}, 20);
    compare(recipe, pack, true, {{Role::kV, Tensor(pack.total_k, 2, 128), 0, true, true}});
    const Pack none = pack_of({0});
    compare(recipe, none, true, {{Role::kV, Tensor(0, 2, 64), 0, true, true}});
  }
}

TEST_F(QuantizeDevice, BitEqualRestored) {
  Random random(5);
  for (int repeat = 0; repeat < 24; ++repeat) {
    const int dim = repeat % 2 == 0 ? 128 : 64;
    const bool rotate = repeat / 2 % 2 == 0;
    const Pack pack = random_pack(random, 200);
    const Tensor x = input(random, pack.total_k, 2, dim);
    Buffers host(pack.k_slots, 2, dim, false, false);
    quantize(kDeviceRecipes[repeat % 4], Role::kK, x.view(), pack, rotate, kThreads, host.operand);
    DeviceOperand device(pack.k_slots, 2, dim);
    device.codes.set(host.codes);
    device.exponents.set(host.exponents);
    const auto size = static_cast<std::size_t>(pack.total_k * 2 * dim);
    std::vector<float> expected(size, 0.0f);
    DeviceArray<float> got(expected);
    restore(host.operand, Role::kK, pack, rotate, kThreads,
            {expected.data(), pack.total_k, 2, dim, 2 * dim, dim});
    DeviceArray<std::int32_t> cu(offsets_of(pack, false));
    cuda::restore(device.operand, cu.data(), static_cast<int>(pack.documents.size()), rotate,
                  {got.data(), pack.total_k, 2, dim, 2 * dim, dim}, nullptr);
    const std::vector<float> values = got.to_host();
    for (std::size_t i = 0; i < size; ++i) {
      if (std::isnan(expected[i])) {
        ASSERT_TRUE(std::isnan(values[i])) << i;
      } else {
        ASSERT_EQ(bits_of(values[i]), bits_of(expected[i])) << i;
      }
    }
  }
}

TEST_F(QuantizeDevice, BitEqualTransposedCodes) {
  Random random(6);
  for (const int dim : {64, 128}) {
    for (const std::int64_t slots : {16, 48, 64, 144, 1040}) {
      std::vector<cuda::Transposition> work;
      std::vector<std::unique_ptr<DeviceOperand>> operands;
      std::vector<std::vector<std::uint8_t>> expected;
      for (const int heads : {1, 4, 3}) {
        Buffers host(slots, heads, dim, false, false);
        for (std::uint8_t& code : host.codes) code = static_cast<std::uint8_t>(random());
        operands.push_back(std::make_unique<DeviceOperand>(slots, heads, dim));
        operands.back()->codes.set(host.codes);
        work.push_back({operands.back()->operand, operands.back()->transposed.data()});
        expected.push_back(transposed_codes(host.operand));
      }
      cuda::transpose_codes(work, nullptr);
      for (std::size_t i = 0; i < work.size(); ++i) {
        expect_equal("transposed code", operands[i]->transposed.to_host(), expected[i],
                     static_cast<int>(slots));
        if (HasFatalFailure()) return;
      }
    }
  }
}

// ---- dO ---------------------------------------------------------------------------------------

struct Gradient {
  std::vector<std::uint8_t> codes, transposed;
  std::vector<std::int8_t> exponents, norms, output_norms;
  std::vector<float> delta;
};

void compare_gradient(const Recipe& recipe, const Pack& pack, const Mask& mask, const Tensor& dout,
                      const Tensor& out, const std::vector<float>& row_sum, int pad) {
  const int heads = dout.heads;
  const auto rows = static_cast<std::size_t>(heads * pack.q_slots);
  const DeviceTensor device_dout(dout, pad), device_out(out, pad);
  DeviceArray<float> device_sum(row_sum), delta(std::vector<float>(rows, 77));
  DeviceArray<std::int8_t> output_norms(std::vector<std::int8_t>(rows, 77));
  DeviceArray<std::uint8_t> live(std::vector<std::uint8_t>(rows, 77));
  DeviceArray<std::int32_t> cu(offsets_of(pack, true)), cu_k(offsets_of(pack, false));
  DeviceOperand g(pack.q_slots, heads, dout.dim);
  cuda::prepare_gradient(recipe,
                         {.dout = device_dout.view(),
                          .out = device_out.view(),
                          .row_sum = device_sum.data(),
                          .cu_seqlens = cu.data(),
                          .cu_seqlens_k = cu_k.data(),
                          .num_documents = static_cast<int>(pack.documents.size()),
                          .mask = mask,
                          .g = g.operand,
                          .transposed = g.transposed.data(),
                          .output_norms = output_norms.data(),
                          .delta = delta.data(),
                          .live = live.data()},
                         kFewMultiprocessors, nullptr);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);

  Buffers host(pack.q_slots, heads, dout.dim, true, false);
  std::vector<std::int8_t> host_output_norms(rows, 77);
  std::vector<float> host_delta(rows, 77.0f);
  prepare_gradient(recipe, mask, out.view(), dout.view(), row_sum.data(), pack, kThreads,
                   {host.operand, host_output_norms.data(), host_delta.data()});
  expect_equal("exponent", g.exponents.to_host(), host.exponents);
  expect_equal("code", g.codes.to_host(), host.codes, dout.dim);
  expect_equal("norm", g.norms.to_host(), host.norms);
  expect_equal("norm of O", output_norms.to_host(), host_output_norms);
  expect_equal("transposed code", g.transposed.to_host(), transposed_codes(host.operand),
               static_cast<int>(pack.q_slots));
  const std::vector<float> got = delta.to_host();
  const std::vector<std::uint8_t> alive = live.to_host();
  for (std::size_t i = 0; i < rows; ++i) {
    ASSERT_EQ(bits_of(got[i]), bits_of(host_delta[i])) << "D " << i;
    const auto* const row = host.codes.data() + i * static_cast<std::size_t>(dout.dim);
    const bool any = std::any_of(row, row + dout.dim, [](int code) { return (code & 0x7F) != 0; });
    ASSERT_EQ(alive[i], any ? 1 : 0) << "live " << i;
  }
}

TEST_F(QuantizeDevice, BitEqualGradientOverRandomPacks) {
  Random random(7);
  const Mask masks[] = {{},
                        {.causal = true},
                        {.window_left = 20, .window_right = 3},
                        {.causal = true, .window_left = 0}};
  for (int repeat = 0; repeat < 80; ++repeat) {
    const int dim = repeat / 4 % 2 == 0 ? 128 : 64;
    const int heads = draw(random, 1, 3);
    const Pack pack = random_pack(random, repeat % 10 == 0 ? 1500 : 300);
    std::vector<float> row_sum(static_cast<std::size_t>(heads * pack.total_q));
    for (float& sum : row_sum) sum = std::uniform_real_distribution<float>(0.5f, 300.0f)(random);
    if (not row_sum.empty() and repeat % 5 == 0) row_sum[row_sum.size() / 2] = kNan;
    Tensor dout = input(random, pack.total_q, heads, dim);
    spoil(random, dout);  // also beyond the range of fast division
    SCOPED_TRACE(testing::Message() << "repeat " << repeat);
    compare_gradient(repeat % 7 == 3 ? recipes::mxfp8_floor : recipes::fp8, pack, masks[repeat % 4],
                     dout, input(random, pack.total_q, heads, dim), row_sum, kPads[repeat % 5]);
    if (HasFatalFailure()) return;
  }
}

TEST_F(QuantizeDevice, BitEqualGradientAtEveryMagnitude) {
  Random random(8);
  const Pack pack = pack_of({40, 100});
  const std::vector<float> row_sum(280, 2.7f);
  for (const int dim : {64, 128}) {
    for (int scale = -132; scale <= 126; scale += 6) {
      const Tensor a = heavy_tailed(random, pack.total_q, 2, dim, 2, scale);
      const Tensor b = heavy_tailed(random, pack.total_q, 2, dim, 2, -scale / 2);
      SCOPED_TRACE(testing::Message() << "dim " << dim << " 2^" << scale);
      compare_gradient(recipes::fp8, pack, {.causal = true}, a, b, row_sum, 0);
      compare_gradient(recipes::fp8, pack, {.causal = true}, b, a, row_sum, 0);
      if (HasFatalFailure()) return;
    }
  }
}

// Row sums of keys that lie elsewhere are as large or small as FP32, and 0 is one.
TEST_F(QuantizeDevice, BitEqualGradientOfMergedRowSums) {
  Random random(9);
  for (int repeat = 0; repeat < 80; ++repeat) {
    const int dim = repeat % 2 == 0 ? 128 : 64;
    const Pack pack = random_pack(random, 200);  // rows without keys among them
    std::vector<float> row_sum(static_cast<std::size_t>(2 * pack.total_q));
    for (float& sum : row_sum) {
      sum =
          std::ldexp(std::uniform_real_distribution<float>(1, 2)(random), draw(random, -126, 125));
      if (draw(random, 0, 9) == 0) sum = 0;
    }
    const Tensor dout = heavy_tailed(random, pack.total_q, 2, dim, 2, draw(random, -110, 110));
    SCOPED_TRACE(testing::Message() << "repeat " << repeat);
    compare_gradient(recipes::fp8, pack, {.causal = true}, dout,
                     input(random, pack.total_q, 2, dim), row_sum, 0);
    if (HasFatalFailure()) return;
  }
}

// ---- tables -----------------------------------------------------------------------------------

TEST_F(QuantizeDevice, BitEqualChunkMaxima) {
  Random random(9);
  for (const std::vector<int>& lengths :
       {std::vector<int>{9000}, {5000, 0, 33, 130, 600, 2100}, {1, 16, 17, 15, 300}}) {
    const Pack pack = pack_of(lengths, 5);
    const int heads = 2;
    const auto rows = static_cast<std::size_t>(heads * pack.k_slots);
    std::vector<std::int8_t> values(rows);
    for (std::int8_t& v : values) {
      v = static_cast<std::int8_t>(draw(random, -96, draw(random, 0, 200) == 0 ? 127 : 60));
    }
    DeviceArray<std::int8_t> device(values);
    DeviceArray<std::int32_t> cu(offsets_of(pack, false));
    DeviceArray<std::int8_t> maxima(rows);
    cuda::make_chunk_maxima({.values = device.data(),
                             .maxima = maxima.data(),
                             .cu_seqlens = cu.data(),
                             .num_documents = static_cast<int>(pack.documents.size()),
                             .heads = heads,
                             .slots = pack.k_slots},
                            nullptr);
    const std::vector<std::int8_t> got = maxima.to_host();
    for (int h = 0; h < heads; ++h) {
      for (const Document& d : pack.documents) {
        const std::int64_t at = h * pack.k_slots + d.k_slot;
        const std::int8_t* const v = values.data() + at;
        for (int i = 0; i < d.k_len; ++i) {
          const int begin = stages::chunk_begin(stages::chunk_of(i));
          ASSERT_EQ(got[static_cast<std::size_t>(at + i)], *std::max_element(v + begin, v + i + 1))
              << "token " << i;
        }
      }
    }
  }
}

TEST_F(QuantizeDevice, EqualTileScales) {
  Random random(10);
  using cuda::kNanScale;
  using cuda::kNoScale;
  using stages::Exponent;
  const auto stored = [](std::int8_t byte) { return Exponent::stored(byte); };
  const auto value = [](Exponent e) { return e.nan ? kNanScale : e.value; };
  for (int repeat = 0; repeat < 30; ++repeat) {
    const Pack pack = pack_of({5000, 0, 129, draw(random, 1, 700), 16}, 9);
    const int heads = 2;
    const auto rows = static_cast<std::size_t>(heads * pack.q_slots);
    const auto bytes = [&](int low, int high) {
      std::vector<std::int8_t> x(rows);
      for (std::int8_t& v : x) v = static_cast<std::int8_t>(draw(random, low, high));
      return x;
    };
    const int spread = repeat % 3 == 0 ? 1 : 5;
    const std::vector<std::int8_t> eq = bytes(0, spread), eg = bytes(-3, spread - 3);
    std::vector<std::int8_t> ng = bytes(1, spread), no = bytes(-2, spread);
    std::vector<std::uint8_t> live(rows);
    for (std::size_t i = 0; i < rows; ++i) {
      live[i] = draw(random, 0, 3) == 0 and i / 256 % 3 != 0;
      if (draw(random, 0, 5) == 0) no[i] = -96;
      if (repeat % 4 == 3 and draw(random, 0, 2000) == 0) ng[i] = 127;
    }
    DeviceArray<std::int8_t> device_eq(eq), device_eg(eg), device_ng(ng), device_no(no);
    DeviceArray<std::uint8_t> device_live(live);
    DeviceArray<std::int32_t> cu(offsets_of(pack, true));
    DeviceArray<cuda::TileScales> scales(rows / 16);
    cuda::make_tile_scales({.q_exponents = device_eq.data(),
                            .g_exponents = device_eg.data(),
                            .g_norms = device_ng.data(),
                            .output_norms = device_no.data(),
                            .live = device_live.data(),
                            .cu_seqlens = cu.data(),
                            .num_documents = static_cast<int>(pack.documents.size()),
                            .heads = heads,
                            .slots = pack.q_slots,
                            .scales = scales.data()},
                           nullptr);
    const std::vector<cuda::TileScales> got = scales.to_host();
    for (int h = 0; h < heads; ++h) {
      for (const Document& d : pack.documents) {
        cuda::TileScales force{0, 0, 0, 0};
        for (int chunk = 0; stages::chunk_begin(chunk) < d.q_len; ++chunk) {
          std::vector<cuda::TileScales> tiles;
          const int end = std::min(d.q_len, stages::chunk_end(chunk));
          cuda::TileScales most{kNoScale, kNoScale, kNoScale, 0};
          cuda::TileScales least{kNanScale, kNanScale, kNanScale, 0};
          for (int first = stages::chunk_begin(chunk); first < end; first += 128) {
            cuda::TileScales tile{kNoScale, kNoScale, kNoScale, 0};
            for (int i = first; i < std::min(end, first + 128); ++i) {
              const auto at = static_cast<std::size_t>(h * pack.q_slots + d.q_slot + i);
              const Exponent b = stored(ng[at]) + stored(eq[at]);
              tile.b = std::max(tile.b, value(b));
              tile.c = std::max(tile.c, value(stored(eg[at])));
              if (no[at] != -96) tile.a = std::max(tile.a, value(b + stored(no[at])));
              tile.live = tile.live != 0 or live[at] != 0 or eg[at] == 127 ? 1 : 0;
            }
            tiles.push_back(tile);
            if (tile.live == 0) continue;
            most = {std::max(most.a, tile.a), std::max(most.b, tile.b), std::max(most.c, tile.c),
                    1};
            least = {std::min(least.a, tile.a), std::min(least.b, tile.b),
                     std::min(least.c, tile.c), 1};
          }
          const bool together =
              std::max({most.a - least.a, most.b - least.b, most.c - least.c}) <= 6;
          for (std::size_t t = 0; t < tiles.size(); ++t) {
            if (tiles[t].live != 0) force = together ? most : tiles[t];
            const auto at = static_cast<std::size_t>(
                                (h * pack.q_slots + d.q_slot + stages::chunk_begin(chunk)) / 16) +
                            8 * t;
            ASSERT_EQ(got[at].live, tiles[t].live) << "tile " << t << " of chunk " << chunk;
            ASSERT_EQ(got[at].a, force.a) << "tile " << t << " of chunk " << chunk;
            ASSERT_EQ(got[at].b, force.b) << "tile " << t << " of chunk " << chunk;
            ASSERT_EQ(got[at].c, force.c) << "tile " << t << " of chunk " << chunk;
          }
        }
      }
    }
  }
}

// ---- speed ------------------------------------------------------------------------------------

/// Median time of `work` in ms.
template <class Work>
double milliseconds(const Work& work) {
  constexpr int kRuns = 15;
  cudaEvent_t begin, end;
  EXPECT_EQ(cudaEventCreate(&begin), cudaSuccess);
  EXPECT_EQ(cudaEventCreate(&end), cudaSuccess);
  std::vector<float> times;
  for (int run = 0; run < kRuns; ++run) {
    EXPECT_EQ(cudaEventRecord(begin), cudaSuccess);
    work();
    EXPECT_EQ(cudaEventRecord(end), cudaSuccess);
    EXPECT_EQ(cudaEventSynchronize(end), cudaSuccess);
    float ms = 0;
    EXPECT_EQ(cudaEventElapsedTime(&ms, begin, end), cudaSuccess);
    times.push_back(ms);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  std::nth_element(times.begin(), times.begin() + kRuns / 2, times.end());
  return times[kRuns / 2];
}

void print_row(const char* what, double ms, double bytes) {
  std::printf("  %-44s %8.4f ms  %6.0f MB  %5.2f TB/s\n", what, ms, bytes / 1e6, bytes / ms / 1e9);
}

/// Normal values, repeated.
void fill_normal(DeviceArray<std::uint16_t>& x) {
  Random random(11);
  std::normal_distribution<float> normal;
  std::vector<std::uint16_t> some(std::min<std::size_t>(x.size(), 1 << 20));
  for (std::uint16_t& v : some) v = nearest_bf16(normal(random));
  for (std::size_t at = 0; at < x.size(); at += some.size()) {
    const std::size_t count = std::min(some.size(), x.size() - at);
    ASSERT_EQ(cudaMemcpy(x.data() + at, some.data(), 2 * count, cudaMemcpyHostToDevice),
              cudaSuccess);
  }
}

void time_pack(const std::string& name, const std::vector<int>& lengths, int heads, int dim) {
  int all = 0;  // multiprocessors
  ASSERT_EQ(cudaDeviceGetAttribute(&all, cudaDevAttrMultiProcessorCount, 0), cudaSuccess);
  const Pack pack = pack_of(lengths);
  const std::int64_t tokens = pack.total_q, slots = pack.q_slots;
  const int documents = static_cast<int>(lengths.size());
  const auto elements = static_cast<std::size_t>(tokens * heads * dim);
  const auto rows = static_cast<std::size_t>(slots * heads);
  std::printf("%s, %d heads, d %d\n", name.c_str(), heads, dim);
  DeviceArray<std::int32_t> cu(offsets_of(pack, true));
  std::vector<std::unique_ptr<DeviceArray<std::uint16_t>>> x;
  std::vector<std::unique_ptr<DeviceOperand>> out;
  std::vector<cuda::QuantizeArgs> args;
  for (int i = 0; i < 3; ++i) {
    x.push_back(std::make_unique<DeviceArray<std::uint16_t>>(elements));
    fill_normal(*x.back());
    out.push_back(std::make_unique<DeviceOperand>(slots, heads, dim));
    args.push_back({.x = {x[i]->data(), tokens, heads, dim, std::int64_t{heads} * dim, dim},
                    .cu_seqlens = cu.data(),
                    .num_documents = documents,
                    .rotate = i < 2 and dim == 128,
                    .out = out[i]->operand,
                    .transposed = i == 2 ? out[i]->transposed.data() : nullptr});
    if (i < 2) args[i].out.norms = nullptr;
  }
  const auto words = static_cast<std::size_t>(3 * cuda::quantize_scratch_words(heads, slots));
  DeviceArray<std::uint32_t> scratch(words);
  const double n = static_cast<double>(elements);
  const auto time = [&](const char* what, const Recipe& recipe, std::span<cuda::QuantizeArgs> some,
                        double bytes) {
    print_row(what, milliseconds([&] {
                EXPECT_EQ(cudaMemsetAsync(scratch.data(), 0, 4 * words), cudaSuccess);
                cuda::quantize(recipe, some, scratch.data(), all, nullptr);
              }),
              bytes);
  };
  time("Q, K (codes), V (norms, transposed), fp8", recipes::fp8, args, 10 * n);
  time("the same, mxfp8", recipes::mxfp8, args, 10 * n);
  time("the same, mxfp8_token", recipes::mxfp8_token, args, 10 * n);
  time("Q alone, fp8", recipes::fp8, std::span(args).first(1), 3 * n);
  time("V alone, fp8", recipes::fp8, std::span(args).last(1), 4 * n);
  for (int i = 0; i < 2; ++i) args[i].transposed = out[i]->transposed.data();
  time("Q, K, V, all transposed, fp8", recipes::fp8, args, 12 * n);

  const cuda::Transposition work[] = {{out[0]->operand, out[0]->transposed.data()},
                                      {out[1]->operand, out[1]->transposed.data()}};
  print_row("transposed copies of Q and K",
            milliseconds([&] { cuda::transpose_codes(work, nullptr); }), 4 * n);

  const auto stats = static_cast<std::size_t>(tokens * heads);
  DeviceArray<float> sum(std::vector<float>(stats, 3.0f));
  DeviceArray<float> delta(rows);
  DeviceArray<std::int8_t> output_norms(rows), running(rows), window(rows);
  DeviceArray<std::uint8_t> live(rows);
  DeviceArray<cuda::TileScales> scales(rows / 16);
  const cuda::GradientArgs gradient{.dout = args[0].x,
                                    .out = args[1].x,
                                    .row_sum = sum.data(),
                                    .cu_seqlens = cu.data(),
                                    .cu_seqlens_k = cu.data(),
                                    .num_documents = documents,
                                    .mask = {.causal = true},
                                    .g = out[0]->operand,
                                    .transposed = out[0]->transposed.data(),
                                    .output_norms = output_norms.data(),
                                    .delta = delta.data(),
                                    .live = live.data()};
  print_row("dO: g, norms, D",
            milliseconds([&] { cuda::prepare_gradient(recipes::fp8, gradient, all, nullptr); }),
            6 * n);
  const cuda::ScalesArgs scale_args{.q_exponents = out[1]->exponents.data(),
                                    .g_exponents = out[0]->exponents.data(),
                                    .g_norms = out[0]->norms.data(),
                                    .output_norms = output_norms.data(),
                                    .live = live.data(),
                                    .cu_seqlens = cu.data(),
                                    .num_documents = documents,
                                    .heads = heads,
                                    .slots = slots,
                                    .scales = scales.data()};
  const double bytes = static_cast<double>(rows);
  print_row("scales of the dK/dV pass",
            milliseconds([&] { cuda::make_tile_scales(scale_args, nullptr); }), 5 * bytes);
  const cuda::ChunkMaximaArgs maxima{.values = out[2]->norms.data(),
                                     .maxima = running.data(),
                                     .cu_seqlens = cu.data(),
                                     .num_documents = documents,
                                     .heads = heads,
                                     .slots = slots};
  print_row("running norms of V", milliseconds([&] { cuda::make_chunk_maxima(maxima, nullptr); }),
            2 * bytes);
}

TEST_F(QuantizeDevice, DISABLED_Speed) {
  for (const int dim : {128, 64}) {
    time_pack("1 x 65536", {65536}, 16, dim);
    time_pack("64 x 1024", std::vector<int>(64, 1024), 16, dim);
    std::vector<int> skewed(224, 256);
    skewed.insert(skewed.begin(), 8192);
    time_pack("8192 + 224 x 256", skewed, 16, dim);
    time_pack("1 x 2048", {2048}, 16, dim);
  }
}

}  // namespace
}  // namespace mxattn::quantize_test
