#include "capture.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstring>
#include <limits>
#include <set>
#include <stdexcept>
#include <string_view>

#include "safetensors.h"

namespace cli {
namespace {

using Shape = std::vector<std::int64_t>;

const StoredTensor& find(const SafetensorsFile& file, const std::string& name) {
  const auto found = file.tensors().find(name);
  if (found == file.tensors().end()) throw std::runtime_error(name + ": missing");
  return found->second;
}

void expect(bool condition, const std::string& name, const StoredTensor& tensor,
            std::string_view what) {
  if (condition) return;
  throw std::runtime_error(fmt::format("{} = {} ({}): expected {}", name, tensor.dtype,
                                       fmt::join(tensor.shape, ", "), what));
}

template <class T>
std::vector<T> copy(const StoredTensor& tensor) {
  // The file does not promise alignment.
  std::vector<T> values(tensor.bytes.size() / sizeof(T));
  if (not values.empty()) std::memcpy(values.data(), tensor.bytes.data(), tensor.bytes.size());
  return values;
}

/// One of q, k, v, do. `shape` is filled by the first tensor, heads aside.
std::vector<std::uint16_t> read_part(const SafetensorsFile& file, const std::string& name,
                                     std::int64_t tokens, std::int64_t& heads, std::int64_t& dim) {
  const StoredTensor& tensor = find(file, name);
  expect(tensor.dtype == "BF16" and tensor.shape.size() == 3, name, tensor,
         "BF16 (tokens, heads, dim)");
  if (heads == 0) heads = tensor.shape[1];
  if (dim == 0) dim = tensor.shape[2];
  constexpr std::int64_t kMost = std::numeric_limits<int>::max();
  expect(heads > 0 and heads <= kMost and dim > 0 and dim <= kMost, name, tensor,
         fmt::format("heads and dim from 1 to {}", kMost));
  expect(tensor.shape == Shape{tokens, heads, dim}, name, tensor,
         fmt::format("BF16 ({}, {}, {})", tokens, heads, dim));

  auto values = copy<std::uint16_t>(tensor);
  for (std::size_t i = 0; i < values.size(); ++i) {
    constexpr unsigned kExponentBits = 0x7F80;
    if ((values[i] & kExponentBits) != kExponentBits) continue;
    const auto channel = static_cast<std::int64_t>(i) % dim;
    const auto head = static_cast<std::int64_t>(i) / dim % heads;
    throw std::runtime_error(fmt::format("{}: NaN or Inf at token {}, head {}, channel {}", name,
                                         static_cast<std::int64_t>(i) / (dim * heads), head,
                                         channel));
  }
  return values;
}

Layer read_layer(const SafetensorsFile& file, const std::string& name, std::int64_t tokens) {
  Layer layer;
  layer.name = name;
  std::int64_t heads_q = 0, heads_k = 0, dim = 0;
  layer.q = read_part(file, name + ".q", tokens, heads_q, dim);
  layer.k = read_part(file, name + ".k", tokens, heads_k, dim);
  layer.v = read_part(file, name + ".v", tokens, heads_k, dim);
  layer.dout = read_part(file, name + ".do", tokens, heads_q, dim);
  layer.heads_q = static_cast<int>(heads_q);
  layer.heads_k = static_cast<int>(heads_k);
  layer.dim = static_cast<int>(dim);
  return layer;
}

void read_lengths(const SafetensorsFile& file, Capture& capture) {
  const std::string name = "cu_seqlens";
  const StoredTensor& tensor = find(file, name);
  expect(tensor.dtype == "I32" and tensor.shape.size() == 1 and tensor.shape[0] >= 2, name, tensor,
         "I32 (documents + 1)");
  capture.cu_seqlens = copy<std::int32_t>(tensor);
  std::int32_t before = 0;
  if (capture.cu_seqlens.front() != 0) throw std::runtime_error(name + ": does not start at 0");
  for (const std::int32_t end : capture.cu_seqlens) {
    if (end < before) {
      throw std::runtime_error(fmt::format("{}: decreases from {} to {}", name, before, end));
    }
    before = end;
  }
}

}  // namespace

std::int64_t Capture::visible_pairs() const {
  std::int64_t pairs = 0;
  for (std::size_t i = 1; i < cu_seqlens.size(); ++i) {
    const std::int64_t n = cu_seqlens[i] - cu_seqlens[i - 1];
    pairs += n * (n + 1) / 2;
  }
  return pairs;
}

Capture load_capture(const std::filesystem::path& path) {
  const SafetensorsFile file(path);
  Capture capture;
  capture.name = path.stem().string();
  try {
    read_lengths(file, capture);
    // Every NAME of NAME.q, NAME.k, ...: a layer of which one part is missing is a fault.
    std::set<std::string> names;
    for (const auto& [name, tensor] : file.tensors()) {
      const std::size_t dot = name.rfind('.');
      if (dot == std::string::npos) continue;
      const std::string_view part = std::string_view(name).substr(dot + 1);
      if (part == "q" or part == "k" or part == "v" or part == "do") {
        names.insert(name.substr(0, dot));
      }
    }
    if (names.empty()) throw std::runtime_error("NAME.q, NAME.k, NAME.v, NAME.do: missing");
    for (const std::string& name : names) {
      const StoredTensor& q = find(file, name + ".q");
      expect(q.shape.size() == 3, name + ".q", q, "BF16 (tokens, heads, dim)");
      if (capture.layers.empty()) capture.tokens = q.shape[0];
      capture.layers.push_back(read_layer(file, name, capture.tokens));
    }
    if (capture.cu_seqlens.back() > capture.tokens) {
      throw std::runtime_error(fmt::format("cu_seqlens: ends at {}: expected at most {} tokens",
                                           capture.cu_seqlens.back(), capture.tokens));
    }
  } catch (const std::exception& error) {
    throw std::runtime_error(fmt::format("{}: {}", path.string(), error.what()));
  }
  return capture;
}

}  // namespace cli
