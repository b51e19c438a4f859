// Reading .safetensors: 8 bytes of header length, a JSON header, then the tensors' bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <vector>

namespace cli {

/// One tensor of a file; the bytes belong to the file.
struct StoredTensor {
  std::string dtype;  // "BF16", "I32", ... as the file says
  std::vector<std::int64_t> shape;
  std::span<const std::byte> bytes;
};

/// A whole file in memory.
class SafetensorsFile {
 public:
  /// Throws std::runtime_error that names file, tensor and fault: unreadable, truncated, a header
  /// that is no valid JSON, sizes that do not fit the shapes, tensors that overlap.
  explicit SafetensorsFile(const std::filesystem::path& path);
  // The tensors point into the file's bytes.
  SafetensorsFile(const SafetensorsFile&) = delete;
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;

  const std::map<std::string, StoredTensor>& tensors() const { return tensors_; }

 private:
  std::vector<std::byte> bytes_;
  std::map<std::string, StoredTensor> tensors_;
};

}  // namespace cli
