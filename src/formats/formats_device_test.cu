// The codecs on a CUDA device: the bits of the host, and of the hardware's own conversions.
//
// Skips where no device is found, and says so.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <bit>
#include <cstdint>
#include <cstring>
#include <vector>

#include "formats/codec.h"
#include "formats/e8m0.h"
#include "formats/exponent.h"
#include "formats/scale_layout.h"
#include "formats/stochastic.h"
#include "support/device_array.h"
#include "support/float_inputs.h"
#include "support/toolkit_conversions.h"

namespace mxattn {
namespace {

constexpr int kFloats = 1'000'000;

template <class Function, class In, class Out>
__global__ void map_kernel(const In* in, Out* out, int count) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < count) out[i] = Function::apply(in[i]);
}

/// Function::apply of every input, on the device.
template <class Function, class Out, class In>
std::vector<Out> map_on_device(const std::vector<In>& inputs) {
  constexpr int kThreads = 256;
  const int count = static_cast<int>(inputs.size());
  DeviceArray<In> in(inputs);
  DeviceArray<Out> out(inputs.size());
  map_kernel<Function>
      <<<(count + kThreads - 1) / kThreads, kThreads>>>(in.data(), out.data(), count);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  return out.to_host();
}

/// Runs `DeviceFunction` on the device and `HostFunction` on the host: the same bits.
template <class DeviceFunction, class HostFunction, class Out, class In>
void expect_same(const std::vector<In>& inputs, const char* what) {
  constexpr int kShown = 5;
  const std::vector<Out> device = map_on_device<DeviceFunction, Out>(inputs);
  int wrong = 0;
  for (std::size_t i = 0; i < inputs.size() and wrong < kShown; ++i) {
    const Out host = HostFunction::apply(inputs[i]);
    if (std::memcmp(&device[i], &host, sizeof(Out)) == 0) continue;
    ++wrong;
    ADD_FAILURE() << what << " of " << inputs[i] << " (input " << i << "): device " << +device[i]
                  << ", host " << +host;
  }
}

template <class Function, class Out, class In>
void expect_as_on_host(const std::vector<In>& inputs, const char* what) {
  expect_same<Function, Function, Out>(inputs, what);
}

template <class Format>
struct Encode {
  MXATTN_HOST_DEVICE static typename Format::Code apply(float x) { return encode<Format>(x); }
};
template <class Format>
struct EncodeDouble {
  MXATTN_HOST_DEVICE static typename Format::Code apply(double x) { return encode<Format>(x); }
};
/// NaN is NaN: its bits are no part of the promise.
MXATTN_HOST_DEVICE inline std::uint32_t number_bits(float x) {
  return x == x ? std::bit_cast<std::uint32_t>(x) : 0x7FC00000u;
}
template <class Format>
struct Decode {
  MXATTN_HOST_DEVICE static std::uint32_t apply(typename Format::Code code) {
    return number_bits(decode<Format>(code));
  }
};
template <class Format>
struct Stochastic {
  MXATTN_HOST_DEVICE static typename Format::Code apply(float x) {
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
    return encode<Format>(x, RoundStochastic{draw({1, 2}, 3, 4, bits >> 7, bits & 127)});
  }
};
template <class Format>
struct RoundUp {
  MXATTN_HOST_DEVICE static int apply(float x) { return round_up_exponent<Format>(x); }
};
template <class Format>
struct Floor {
  MXATTN_HOST_DEVICE static int apply(float x) { return floor_exponent<Format>(x); }
};
struct E8m0Up {
  MXATTN_HOST_DEVICE static std::uint8_t apply(float x) { return float_to_e8m0_up(x); }
};
struct E8m0Down {
  MXATTN_HOST_DEVICE static std::uint8_t apply(float x) { return float_to_e8m0_down(x); }
};
struct AtomByte {
  MXATTN_HOST_DEVICE static int apply(int offset) {
    const AtomPosition at = atom_position(offset);
    return atom_offset(at.row, at.column) * 1000 + at.row;
  }
};

template <class Format>
struct HardwareEncode {
  __device__ static typename Format::Code apply(float x) {
    return toolkit::Conversion<Format>::encode(x);
  }
};
template <class Format>
struct HardwareDecode {
  __device__ static std::uint32_t apply(typename Format::Code code) {
    return number_bits(toolkit::Conversion<Format>::decode(code));
  }
};
struct HardwareE8m0Up {
  __device__ static std::uint8_t apply(float x) { return toolkit::Conversion<E8M0>::encode_up(x); }
};
struct HardwareE8m0Down {
  __device__ static std::uint8_t apply(float x) {
    return toolkit::Conversion<E8M0>::encode_down(x);
  }
};

class FormatsDevice : public testing::Test {
 protected:
  void SetUp() override {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess or devices == 0) {
      GTEST_SKIP() << "no CUDA device here";
    }
  }
};

template <class Format>
void check_format(const char* name) {
  const std::vector<float> floats = testing_support::format_inputs<Format>(kFloats);
  using Code = typename Format::Code;
  expect_as_on_host<Encode<Format>, Code>(floats, name);
  expect_same<HardwareEncode<Format>, Encode<Format>, Code>(floats, name);
  expect_as_on_host<EncodeDouble<Format>, Code>(
      testing_support::format_double_inputs<Format>(kFloats / 10), name);

  std::vector<Code> codes(2 * (std::size_t{Format::kMagnitudeMask} + 1));
  for (std::size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<Code>(i);
  expect_as_on_host<Decode<Format>, std::uint32_t>(codes, name);
  expect_same<HardwareDecode<Format>, Decode<Format>, std::uint32_t>(codes, name);
}

TEST_F(FormatsDevice, CodeEqualE4m3) { check_format<E4M3>("e4m3"); }
TEST_F(FormatsDevice, CodeEqualE5m2) { check_format<E5M2>("e5m2"); }
TEST_F(FormatsDevice, CodeEqualE2m1) { check_format<E2M1>("e2m1"); }
TEST_F(FormatsDevice, CodeEqualFp16) { check_format<Fp16>("fp16"); }
TEST_F(FormatsDevice, CodeEqualBf16) { check_format<Bf16>("bf16"); }

TEST_F(FormatsDevice, CodeEqualE8m0) {
  const std::vector<float> floats = testing_support::format_inputs<Bf16>(kFloats);
  expect_as_on_host<E8m0Up, std::uint8_t>(floats, "e8m0 up");
  expect_as_on_host<E8m0Down, std::uint8_t>(floats, "e8m0 down");
  expect_same<HardwareE8m0Up, E8m0Up, std::uint8_t>(floats, "e8m0 up");
  expect_same<HardwareE8m0Down, E8m0Down, std::uint8_t>(floats, "e8m0 down");
}

TEST_F(FormatsDevice, CodeEqualExponentRules) {
  const std::vector<float> floats = testing_support::format_inputs<Bf16>(kFloats);
  expect_as_on_host<RoundUp<E4M3>, int>(floats, "round-up e4m3");
  expect_as_on_host<RoundUp<E2M1>, int>(floats, "round-up e2m1");
  expect_as_on_host<Floor<E4M3>, int>(floats, "floor e4m3");
}

TEST_F(FormatsDevice, CodeEqualStochastic) {
  expect_as_on_host<Stochastic<E4M3>, std::uint8_t>(testing_support::format_inputs<E4M3>(kFloats),
                                                    "stochastic e4m3");
  expect_as_on_host<Stochastic<E2M1>, std::uint8_t>(testing_support::format_inputs<E2M1>(kFloats),
                                                    "stochastic e2m1");
}

TEST_F(FormatsDevice, BitEqualScaleAtom) {
  std::vector<int> offsets(kAtomBytes);
  for (int i = 0; i < kAtomBytes; ++i) offsets[i] = i;
  expect_as_on_host<AtomByte, int>(offsets, "atom offset");
}

}  // namespace
}  // namespace mxattn
