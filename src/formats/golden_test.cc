// The codecs against vectors that the CUDA toolkit's conversions gave (tools/golden_formats).
#include <gtest/gtest.h>

#include <cstdint>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "base/numeric.h"
#include "formats/bf16.h"
#include "formats/e8m0.h"
#include "formats/fp16.h"
#include "formats/fp4.h"
#include "formats/fp8.h"
#include "support/digest.h"
#include "support/float_inputs.h"

namespace mxattn {
namespace {

using testing_support::Digest;

std::vector<std::vector<std::string>> read_csv(const std::string& name) {
  std::ifstream file(MXATTN_GOLDEN_FOLDER "/formats/" + name);
  std::vector<std::vector<std::string>> rows;
  for (std::string line; std::getline(file, line);) {
    std::istringstream cells(line);
    rows.emplace_back();
    for (std::string cell; std::getline(cells, cell, ',');) rows.back().push_back(cell);
  }
  return rows;
}

std::uint64_t hex(const std::string& cell) { return std::stoull(cell, nullptr, 16); }

/// One format as plain functions.
struct Codec {
  std::string name;
  int bytes;
  std::uint32_t (*encode)(float);
  float (*decode)(std::uint32_t);
  std::vector<float> (*inputs)(int);
};

template <class Format>
Codec codec(const char* name) {
  return {
      name, sizeof(typename Format::Code), [](float x) { return std::uint32_t{encode<Format>(x)}; },
      [](std::uint32_t code) { return decode<Format>(static_cast<typename Format::Code>(code)); },
      testing_support::format_inputs<Format>};
}

const Codec& codec_of(const std::string& name) {
  constexpr auto kDecodeScale = [](std::uint32_t code) {
    return e8m0_to_float(static_cast<std::uint8_t>(code));
  };
  static const std::vector<Codec> codecs = {
      codec<E4M3>("e4m3"),
      codec<E5M2>("e5m2"),
      codec<E2M1>("e2m1"),
      codec<Fp16>("fp16"),
      codec<Bf16>("bf16"),
      {"e8m0_up", 1, [](float x) { return std::uint32_t{float_to_e8m0_up(x)}; }, kDecodeScale,
       testing_support::format_inputs<Bf16>},
      {"e8m0_down", 1, [](float x) { return std::uint32_t{float_to_e8m0_down(x)}; }, kDecodeScale,
       testing_support::format_inputs<Bf16>},
      {"e8m0", 1, nullptr, kDecodeScale, nullptr}};
  for (const Codec& entry : codecs) {
    if (entry.name == name) return entry;
  }
  throw std::runtime_error("no codec named " + name);
}

TEST(Golden, CodeEqualEncode) {
  const auto rows = read_csv("encode.csv");
  ASSERT_EQ(rows.size(), 7u * 514);
  for (const auto& row : rows) {
    const float x = float_of(static_cast<std::uint32_t>(hex(row[1])));
    ASSERT_EQ(codec_of(row[0]).encode(x), hex(row[2])) << row[0] << ' ' << row[1];
  }
}

TEST(Golden, BitEqualDecode) {
  const auto rows = read_csv("decode.csv");
  ASSERT_EQ(rows.size(), 3u * 256 + 16);
  for (const auto& row : rows) {
    const float x = codec_of(row[0]).decode(static_cast<std::uint32_t>(hex(row[1])));
    if (row[2] == "nan") {
      ASSERT_TRUE(is_nan(x)) << row[0] << ' ' << row[1];
    } else {
      ASSERT_EQ(bits_of(x), hex(row[2])) << row[0] << ' ' << row[1];
    }
  }
}

TEST(Golden, CodeEqualDigests) {
  const auto rows = read_csv("digest.csv");
  ASSERT_EQ(rows.size(), 13u);
  for (const auto& row : rows) {
    const Codec& format = codec_of(row[0]);
    const int count = std::stoi(row[2]);
    Digest digest;
    if (row[1] == "encode") {
      for (const float x : format.inputs(count)) digest.add(format.encode(x), format.bytes);
    } else {
      for (int code = 0; code < count; ++code) {
        const float x = format.decode(static_cast<std::uint32_t>(code));
        digest.add(bits_of(is_nan(x) ? float_of(0x7FC00000) : x), 4);
      }
    }
    EXPECT_EQ(digest.value(), hex(row[3])) << row[0] << ' ' << row[1];
  }
}

}  // namespace
}  // namespace mxattn
