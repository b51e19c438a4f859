// What every function of the C interface needs: structs that may grow, status codes, and the wall
// that no exception passes.
#pragma once

#include <mxattn/mxattn.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <new>
#include <string>

#include "base/error.h"

namespace mxattn::api {

/// Keeps the message for mxattn_last_error() of this thread.
mxattn_status fail(Status status, const char* message) noexcept;

/// Runs `body` and turns what it throws into a status and a message.
template <class Body>
mxattn_status guarded(Body&& body) noexcept {
  try {
    body();
    return MXATTN_OK;
  } catch (const Error& error) {
    return fail(error.status(), error.what());
  } catch (const std::bad_alloc&) {
    return fail(Status::kOutOfMemory, "out of memory: outputs may be incomplete");
  } catch (const std::exception& error) {
    return fail(Status::kInternal, error.what());
  } catch (...) {
    return fail(Status::kInternal, "unknown exception");
  }
}

template <class T>
const T& deref(const char* name, const T* pointer) {
  require(pointer != nullptr, name, "null", "an address");
  return *pointer;
}

template <class T>
void write(const char* name, T* pointer, const T& value) {
  require(pointer != nullptr, name, "null", "an address");
  *pointer = value;
}

/// No struct will ever be larger. A size that nobody has set must not lead read_struct() through
/// the memory behind the struct.
inline constexpr std::size_t kMaxStructBytes = 4096;

/// Checks the size field of a struct of the caller. NOTE: when a struct grows, the least size that
/// is accepted stays that of its first version.
template <class T>
std::size_t checked_size(const char* name, const T* pointer) {
  static_assert(sizeof(T) <= kMaxStructBytes);
  const std::uint64_t size = deref(name, pointer).size;
  require(size >= sizeof(T), std::string(name) + ".size", size, "at least ", sizeof(T),
          ": was the struct initialised?");
  require(size <= kMaxStructBytes, std::string(name) + ".size", size, "at most ", kMaxStructBytes,
          ": was the struct initialised?");
  return static_cast<std::size_t>(size);
}

/// A copy of a struct of the caller. Fields that this library does not know must be 0.
template <class T>
T read_struct(const char* name, const T* pointer) {
  const std::size_t size = checked_size(name, pointer);
  const auto* bytes = reinterpret_cast<const unsigned char*>(pointer);
  const bool plain = std::all_of(bytes + sizeof(T), bytes + size, [](auto b) { return b == 0; });
  require(plain, std::string(name) + ".size", size, "at most ", sizeof(T),
          " with this version of the library, or zeros beyond");
  return *pointer;
}

/// Fills a struct of the caller up to the size that both sides know.
template <class T>
void write_struct(const char* name, T* pointer, T value) {
  value.size = checked_size(name, pointer);
  *pointer = value;
}

template <class T>
void init_struct(T* pointer) {
  if (pointer == nullptr) return;
  *pointer = T{};
  pointer->size = sizeof(T);
}

}  // namespace mxattn::api
