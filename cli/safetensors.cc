#include "safetensors.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <fstream>
#include <limits>
#include <new>
#include <nlohmann/json.hpp>
#include <set>
#include <stdexcept>
#include <string_view>
#include <system_error>
#include <utility>

namespace cli {
namespace {

static_assert(std::endian::native == std::endian::little, "the format is little-endian");

constexpr std::size_t kLengthBytes = 8;

/// Bytes of an element, 0 for a dtype that is not known.
std::size_t element_bytes(std::string_view dtype) {
  if (dtype == "BOOL" or dtype == "U8" or dtype == "I8" or dtype.starts_with("F8")) return 1;
  if (dtype == "BF16" or dtype == "F16" or dtype == "I16" or dtype == "U16") return 2;
  if (dtype == "F32" or dtype == "I32" or dtype == "U32") return 4;
  if (dtype == "F64" or dtype == "I64" or dtype == "U64") return 8;
  return 0;
}

std::vector<std::byte> read_file(const std::filesystem::path& path) {
  // A folder can be opened, and says that it is as long as a file may be.
  if (std::error_code ignored; std::filesystem::is_directory(path, ignored)) {
    throw std::runtime_error(fmt::format("{}: a folder: expected a file", path.string()));
  }
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (not file) throw std::runtime_error(fmt::format("{}: cannot be opened", path.string()));
  const std::streamoff size = file.tellg();
  if (size < 0) throw std::runtime_error(fmt::format("{}: not a regular file", path.string()));
  std::vector<std::byte> bytes;
  try {
    bytes.resize(static_cast<std::size_t>(size));
  } catch (const std::bad_alloc&) {
    throw std::runtime_error(fmt::format("{}: {} bytes: out of memory", path.string(), size));
  }
  file.seekg(0);
  file.read(reinterpret_cast<char*>(bytes.data()), size);
  if (not file) throw std::runtime_error(fmt::format("{}: cannot be read", path.string()));
  return bytes;
}

/// The header as JSON. The parser keeps the last of equal keys: which tensor is meant must not
/// depend on that.
nlohmann::json parse_header(const char* text, std::size_t bytes) {
  using Json = nlohmann::json;
  std::set<std::string> names;
  const auto once = [&](int depth, Json::parse_event_t event, const Json& key) {
    if (depth == 1 and event == Json::parse_event_t::key and
        not names.insert(key.get<std::string>()).second) {
      throw std::runtime_error(fmt::format("{} is there twice", key.get<std::string>()));
    }
    return true;
  };
  Json header = Json::parse(text, text + bytes, once);
  if (not header.is_object()) {
    throw std::runtime_error(fmt::format("a JSON {}: expected an object", header.type_name()));
  }
  return header;
}

/// The integers of a field of an entry. The parser would also turn 7.9 or true into one.
std::vector<std::int64_t> integers_of(const nlohmann::json& entry, const char* field) {
  const nlohmann::json& list = entry.at(field);
  const auto is_integer = [](const nlohmann::json& value) {
    // Kept as unsigned, it may be beyond 63 bits.
    return value.is_number_unsigned()
               ? value.get<std::uint64_t>() <= std::numeric_limits<std::int64_t>::max()
               : value.is_number_integer();
  };
  const auto refuse = [&](const nlohmann::json& value) {
    // NOTE: writing JSON out recurses, and it may be nested without end.
    throw std::runtime_error(fmt::format("{}: {}: expected a list of 64-bit integers", field,
                                         value.is_number() ? value.dump() : value.type_name()));
  };
  if (not list.is_array()) refuse(list);
  const auto bad = std::ranges::find_if_not(list, is_integer);
  if (bad != list.end()) refuse(*bad);
  return list.get<std::vector<std::int64_t>>();
}

/// One entry of the header.
StoredTensor parse_tensor(const nlohmann::json& entry, std::span<const std::byte> data) {
  StoredTensor tensor;
  tensor.dtype = entry.at("dtype").get<std::string>();
  const std::size_t element = element_bytes(tensor.dtype);
  if (element == 0) throw std::runtime_error(fmt::format("unknown dtype {}", tensor.dtype));
  std::size_t size = element;
  for (const std::int64_t n : integers_of(entry, "shape")) {
    if (n < 0) throw std::runtime_error(fmt::format("negative dimension {}", n));
    if (n != 0 and size > std::numeric_limits<std::size_t>::max() / static_cast<std::size_t>(n)) {
      throw std::runtime_error("a shape too large for any file");
    }
    size *= static_cast<std::size_t>(n);
    tensor.shape.push_back(n);
  }
  const auto offsets = integers_of(entry, "data_offsets");
  if (offsets.size() != 2 or offsets[0] < 0 or offsets[1] < offsets[0]) {
    throw std::runtime_error(
        fmt::format("data_offsets [{}] are no range", fmt::join(offsets, ", ")));
  }
  const auto begin = static_cast<std::size_t>(offsets[0]);
  const auto end = static_cast<std::size_t>(offsets[1]);
  if (end > data.size()) {
    throw std::runtime_error(
        fmt::format("data_offsets [{}, {}] lie beyond the {} bytes of data: the file is truncated",
                    begin, end, data.size()));
  }
  if (end - begin != size) {
    throw std::runtime_error(
        fmt::format("{} bytes of data, but dtype and shape need {}", end - begin, size));
  }
  tensor.bytes = data.subspan(begin, size);
  return tensor;
}

void check_overlaps(const std::map<std::string, StoredTensor>& tensors) {
  std::vector<std::pair<std::span<const std::byte>, std::string_view>> order;
  for (const auto& [name, tensor] : tensors) {
    if (not tensor.bytes.empty()) order.emplace_back(tensor.bytes, name);
  }
  std::ranges::sort(order, {}, [](const auto& entry) { return entry.first.data(); });
  for (std::size_t i = 1; i < order.size(); ++i) {
    if (order[i].first.data() < order[i - 1].first.data() + order[i - 1].first.size()) {
      throw std::runtime_error(
          fmt::format("{} and {} overlap", order[i - 1].second, order[i].second));
    }
  }
}

}  // namespace

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path) : bytes_(read_file(path)) {
  const std::span<const std::byte> bytes = bytes_;
  std::string tensor = "header";
  try {
    std::uint64_t header = 0;
    if (bytes.size() < kLengthBytes) throw std::runtime_error("truncated before its end");
    std::memcpy(&header, bytes.data(), kLengthBytes);
    if (header > bytes.size() - kLengthBytes) {
      throw std::runtime_error(
          fmt::format("says {} bytes, the file has {}: truncated, or no "
                      "safetensors file",
                      header, bytes.size()));
    }
    const auto* text = reinterpret_cast<const char*>(bytes.data() + kLengthBytes);
    const auto json = parse_header(text, static_cast<std::size_t>(header));
    const auto data = bytes.subspan(kLengthBytes + static_cast<std::size_t>(header));
    for (const auto& [name, entry] : json.items()) {
      if (name == "__metadata__") continue;
      tensor = name;
      tensors_.emplace(name, parse_tensor(entry, data));
    }
    tensor = "tensors";
    check_overlaps(tensors_);
  } catch (const std::exception& error) {
    // The parser quotes what it was reading, as long as that may be.
    throw std::runtime_error(
        fmt::format("{}: {:.200}: {:.400}", path.string(), tensor, error.what()));
  }
}

}  // namespace cli
