// Every recipe over every layer of a capture: accuracy against exact attention, speed, causality.
#pragma once

#include <CLI/CLI.hpp>
#include <map>
#include <string>
#include <vector>

#include "attention.h"
#include "capture.h"
#include "causality.h"

namespace cli {

struct MeasureOptions {
  std::vector<std::string> recipes;  // empty: all but exact
  std::string backend = "auto";
  int threads = 0;
  bool json = false;

  void add_to(CLI::App& command);
};

/// One recipe on one head.
struct Case {
  std::string layer;
  int head = 0;
  std::string recipe;
  std::string backend;
  Accuracy accuracy;
  double seconds = 0;  // of the call for all heads of the layer
  double gflops = 0;
};

struct RecipeCausality {
  Causality found;
  bool promised = false;  // strict by the recipe
  bool kept() const { return found.strict() or not promised; }
};

struct Report {
  std::string capture;
  std::string shape;        // for people
  std::vector<Case> cases;  // by layer, head, recipe
  std::vector<std::string> recipes;
  std::map<std::string, RecipeCausality> causality;  // on the first layer
  std::vector<std::string> notes;                    // what was left out, and why

  bool promises_kept() const;
};

/// Throws mxattn::Error for an unknown recipe or backend, or a recipe that was asked for by name
/// and cannot run; recipes that nobody named are left out with a note.
Report measure(const Capture& capture, const MeasureOptions& options);

}  // namespace cli
