#include "lengths.h"

#include <fmt/core.h>

#include <charconv>
#include <limits>
#include <optional>
#include <stdexcept>

namespace cli {
namespace {

constexpr std::int64_t kMostTokens = std::numeric_limits<std::int32_t>::max();
constexpr std::int64_t kMostDocuments = 1 << 24;

/// A whole number without sign, spaces or rest; empty if it is none or beyond 64 bits.
std::optional<std::int64_t> parse_count(std::string_view text) {
  std::int64_t value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc{} or stop != end or value < 0) return std::nullopt;
  return value;
}

}  // namespace

std::vector<std::int32_t> parse_lengths(std::string_view text, std::string_view option) {
  std::vector<std::int32_t> cu_seqlens = {0};
  std::size_t begin = 0;
  for (int number = 1; begin <= text.size(); ++number) {
    const std::size_t comma = std::min(text.find(',', begin), text.size());
    const std::string_view entry = text.substr(begin, comma - begin);
    begin = comma + 1;
    const auto refuse = [&](const std::string& expected) {
      throw std::invalid_argument(
          fmt::format("{}, entry {} \"{}\": expected {}", option, number, entry, expected));
    };

    const std::size_t times = entry.find('x');
    const auto length = parse_count(entry.substr(0, times));
    const auto count = times == std::string_view::npos ? 1 : parse_count(entry.substr(times + 1));
    if (not length or not count or *count == 0) {
      refuse("LENGTH or LENGTHxCOUNT, such as 8192 or 256x224");
    }
    if (*count > kMostDocuments - static_cast<std::int64_t>(cu_seqlens.size()) + 1) {
      refuse(fmt::format("at most {} documents in all", kMostDocuments));
    }
    // Divided, not multiplied: the product may be beyond 64 bits.
    if (*length > (kMostTokens - cu_seqlens.back()) / *count) {
      refuse(fmt::format("at most {} tokens in all", kMostTokens));
    }
    for (std::int64_t i = 0; i < *count; ++i) {
      cu_seqlens.push_back(cu_seqlens.back() + static_cast<std::int32_t>(*length));
    }
  }
  return cu_seqlens;
}

MaskChoice parse_mask(std::string_view text) {
  if (text == "causal") return {.causal = true};
  if (text == "full") return {};
  constexpr std::string_view kWindow = "window:";
  if (text.starts_with(kWindow)) {
    const auto left = parse_count(text.substr(kWindow.size()));
    if (left and *left <= kMostTokens) {
      return {.causal = true, .window_left = static_cast<int>(*left)};
    }
  }
  throw std::invalid_argument(fmt::format(
      "--mask \"{}\": expected causal, full, or window:LEFT such as window:1024", text));
}

}  // namespace cli
