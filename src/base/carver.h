// Arrays one after the other in a block of memory that somebody else owns.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mxattn {

/// Hands out pieces of a block, each aligned to kAlignment bytes, as the block must be. Without a
/// block it counts bytes: two walks over the same pieces give the size first, then the addresses.
template <std::size_t kAlignment>
class Carver {
  static_assert(kAlignment > 0 and (kAlignment & (kAlignment - 1)) == 0);

 public:
  explicit Carver(void* block) : block_(static_cast<std::byte*>(block)) {}

  template <class T, class Count>
  T* take(Count count) {
    const std::size_t at = bytes_;
    const std::size_t size = static_cast<std::size_t>(count) * sizeof(T);
    bytes_ += (size + kAlignment - 1) / kAlignment * kAlignment;
    return block_ == nullptr ? nullptr : reinterpret_cast<T*>(block_ + at);
  }
  std::int64_t bytes() const { return static_cast<std::int64_t>(bytes_); }

 private:
  std::byte* block_;
  std::size_t bytes_ = 0;
};

}  // namespace mxattn
