// The one exception type of the library, and the checks that throw it.
//
// A message names the argument, the value it had and what was expected; the C ABI turns the
// exception into a status and keeps the text for mxattn_last_error().
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>

namespace mxattn {

enum class Status : int {
  kOk = 0,
  kInvalidArgument = 1,  // the caller's input is wrong
  kUnsupported = 2,      // the input is legal, but no kernel here can run it
  kOutOfMemory = 3,
  kCuda = 4,      // a CUDA call failed
  kInternal = 5,  // a promise of the library broke: always our fault
};

class Error : public std::runtime_error {
 public:
  Error(Status status, const std::string& message) : std::runtime_error(message), status_(status) {}
  Status status() const { return status_; }

 private:
  Status status_;
};

namespace detail {

template <class... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

}  // namespace detail

/// Throws kInvalidArgument "`argument` = `value`: expected `expectation`" unless `condition`.
/// `expectation` parts are streamed one after the other.
template <class Value, class... Expectation>
void require(bool condition, std::string_view argument, const Value& value,
             const Expectation&... expectation) {
  if (condition) return;
  throw Error(Status::kInvalidArgument,
              detail::concat(argument, " = ", value, ": expected ", expectation...));
}

/// Throws kUnsupported with the given text.
template <class... Parts>
[[noreturn]] void unsupported(const Parts&... parts) {
  throw Error(Status::kUnsupported, detail::concat(parts...));
}

}  // namespace mxattn

/// A promise of the library about itself. Failing throws kInternal with file, line and values.
#define MXATTN_CHECK(condition, ...)                                                              \
  do {                                                                                            \
    if (!(condition)) {                                                                           \
      throw ::mxattn::Error(                                                                      \
          ::mxattn::Status::kInternal,                                                            \
          ::mxattn::detail::concat(__FILE__, ":", __LINE__, ": " #condition, ": ", __VA_ARGS__)); \
    }                                                                                             \
  } while (false)
