// A progress bar on stderr, shown only where stderr is a terminal.
#pragma once

#include <string>

namespace cli {

class Progress {
 public:
  explicit Progress(int steps);
  ~Progress();  // wipes the line
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// Says what is worked on now.
  void begin(const std::string& what);
  /// That was done.
  void done(int steps = 1) { done_ += steps; }

 private:
  int steps_;
  int done_ = 0;
  bool shown_;
};

}  // namespace cli
