// Writes the golden vectors of the formats; see the script tools/golden_formats.
//
//   encode.csv  format, FP32 bits, code          hard inputs, and the special values
//   decode.csv  format, code, FP32 bits or nan   every code of 8 bits and less
//   digest.csv  format, direction, count, FNV-1a of all codes, or of the FP32 bits of all codes
#include <bit>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <iomanip>
#include <string>
#include <vector>

#include "support/digest.h"
#include "support/float_inputs.h"
#include "support/toolkit_conversions.h"

namespace {

using namespace mxattn;
using testing_support::Digest;

constexpr int kDigestInputs = 1'000'000;
constexpr std::uint32_t kSpecial[] = {0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF,
                                      0x00800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000,
                                      0x7F800001, 0x7FC00000, 0xFFC00000, 0xFFFFFFFF};

struct Files {
  std::ofstream encode, decode, digest;
};

std::ostream& hex(std::ostream& out, std::uint64_t value, int digits) {
  return out << std::hex << std::setfill('0') << std::setw(digits) << value << std::dec;
}

/// `inputs` holds 10^6 values of which the odd ones are hard.
template <class Encode>
void write_encode(Files& files, const char* name, const std::vector<float>& inputs, int bytes,
                  Encode encode) {
  const auto line = [&](float x) {
    files.encode << name << ',';
    hex(files.encode, std::bit_cast<std::uint32_t>(x), 8) << ',';
    hex(files.encode, encode(x), 2 * bytes) << '\n';
  };
  constexpr std::size_t kHardLines = 500;
  for (const std::uint32_t bits : kSpecial) line(std::bit_cast<float>(bits));
  for (std::size_t i = 0; i < kHardLines; ++i) line(inputs[2 * i + 1]);

  Digest digest;
  for (const float x : inputs) digest.add(encode(x), bytes);
  files.digest << name << ",encode," << inputs.size() << ',';
  hex(files.digest, digest.value(), 16) << '\n';
}

template <class Decode>
void write_decode(Files& files, const char* name, std::uint32_t codes, int bytes, Decode decode) {
  constexpr std::uint32_t kCanonicalNan = 0x7FC00000;  // NaN bits are not part of the promise
  Digest digest;
  for (std::uint32_t code = 0; code < codes; ++code) {
    const float x = decode(code);
    const bool nan = x != x;
    digest.add(nan ? kCanonicalNan : std::bit_cast<std::uint32_t>(x), 4);
    if (bytes > 1) continue;
    files.decode << name << ',';
    hex(files.decode, code, 2) << ',';
    if (nan) {
      files.decode << "nan\n";
    } else {
      hex(files.decode, std::bit_cast<std::uint32_t>(x), 8) << '\n';
    }
  }
  files.digest << name << ",decode," << codes << ',';
  hex(files.digest, digest.value(), 16) << '\n';
}

template <class Format>
void write_format(Files& files, const char* name) {
  using Code = typename Format::Code;
  using Toolkit = toolkit::Conversion<Format>;
  write_encode(files, name, testing_support::format_inputs<Format>(kDigestInputs), sizeof(Code),
               [](float x) { return Toolkit::encode(x); });
  write_decode(files, name, 2 * (Format::kMagnitudeMask + 1u), sizeof(Code),
               [](std::uint32_t code) { return Toolkit::decode(static_cast<Code>(code)); });
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: golden_formats FOLDER\n");
    return 2;
  }
  const std::string folder = argv[1];
  Files files{std::ofstream(folder + "/encode.csv"), std::ofstream(folder + "/decode.csv"),
              std::ofstream(folder + "/digest.csv")};
  write_format<E4M3>(files, "e4m3");
  write_format<E5M2>(files, "e5m2");
  write_format<E2M1>(files, "e2m1");
  write_format<Fp16>(files, "fp16");
  write_format<Bf16>(files, "bf16");

  using Scale = toolkit::Conversion<E8M0>;
  const std::vector<float> inputs = testing_support::format_inputs<Bf16>(kDigestInputs);
  write_encode(files, "e8m0_up", inputs, 1, Scale::encode_up);
  write_encode(files, "e8m0_down", inputs, 1, Scale::encode_down);
  write_decode(files, "e8m0", 256, 1,
               [](std::uint32_t code) { return Scale::decode(static_cast<std::uint8_t>(code)); });
  return files.encode.good() and files.decode.good() and files.digest.good() ? 0 : 1;
}
