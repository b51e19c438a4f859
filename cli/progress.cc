#include "progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

namespace cli {
namespace {
constexpr int kBarWidth = 30;
constexpr const char* kWipe = "\r\033[K";
}  // namespace

Progress::Progress(int steps) : steps_(std::max(steps, 1)), shown_(isatty(STDERR_FILENO) == 1) {}

Progress::~Progress() {
  if (shown_) fmt::print(stderr, "{}", kWipe);
}

void Progress::begin(const std::string& what) {
  if (not shown_) return;
  const int filled = std::min(kBarWidth, kBarWidth * done_ / steps_);
  fmt::print(stderr, "{}[{}{}] {}/{} {}", kWipe, std::string(static_cast<std::size_t>(filled), '#'),
             std::string(static_cast<std::size_t>(kBarWidth - filled), ' '), done_, steps_, what);
  std::fflush(stderr);
}

}  // namespace cli
