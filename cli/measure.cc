#include "measure.h"

#include <fmt/format.h>

#include <algorithm>

#include "progress.h"

namespace cli {
namespace {

constexpr const char* kReference = "exact";
// Calls are repeated until they took this long together; the fastest counts.
constexpr double kSecondsOfCalls = 0.3;

/// Exact and quantised attention alike: 4 n^2 d for all pairs forward, 2.5 times that backward.
double flops(const Capture& capture, const Layer& layer) {
  constexpr double kForwardAndBackward = 3.5, kPerPair = 4;
  return kForwardAndBackward * kPerPair * static_cast<double>(capture.visible_pairs()) * layer.dim *
         layer.heads_q;
}

/// The recipes that run, in the order of the registry or of the command line.
std::vector<std::string> choose_recipes(const Capture& capture, const MeasureOptions& options,
                                        std::vector<std::string>& notes) {
  // Of every layer, before the first is measured. What the first one has nothing against is a
  // matter of the layer, not of the options.
  const auto can_run = [&](const std::string& recipe) {
    mxattn::CanRun answer;
    for (const Layer& layer : capture.layers) {
      answer = mxattn::can_run(
          Attention::config(capture, layer, recipe, options.backend, options.threads));
      if (answer) continue;
      if (&layer != &capture.layers.front()) {
        answer.reason = fmt::format("{}: {}", layer.name, answer.reason);
      }
      break;
    }
    return answer;
  };
  if (not options.recipes.empty()) {
    std::vector<std::string> recipes;
    for (const std::string& recipe : options.recipes) {
      if (std::ranges::find(recipes, recipe) != recipes.end()) continue;
      if (const auto answer = can_run(recipe); not answer) {
        throw mxattn::Error(MXATTN_UNSUPPORTED, answer.reason);
      }
      recipes.push_back(recipe);
    }
    return recipes;
  }

  // A fault of the options themselves would otherwise look like recipes that cannot run.
  const auto names = mxattn::backends();
  const bool known = options.backend == "auto" or
                     std::ranges::any_of(names, [&](const mxattn_backend_info& backend) {
                       return options.backend == backend.name;
                     });
  std::vector<std::string> recipes;
  for (const auto& recipe : mxattn::recipes()) {
    if (recipe.name == std::string_view(kReference)) continue;
    if (const auto answer = can_run(recipe.name); answer) {
      recipes.emplace_back(recipe.name);
    } else if (known) {
      notes.push_back(fmt::format("{} left out: {}", recipe.name, answer.reason));
    } else {
      throw mxattn::Error(MXATTN_INVALID_ARGUMENT, answer.reason);
    }
  }
  if (recipes.empty()) throw mxattn::Error(MXATTN_UNSUPPORTED, notes.front());
  return recipes;
}

}  // namespace

void MeasureOptions::add_to(CLI::App& command) {
  command.add_option("--recipe", recipes, "Recipes to run (default: all; see `mxattn info`)")
      ->type_name("NAME");
  command.add_option("--backend", backend, "auto, cpu, cpu_exact, cpu_h200")->type_name("NAME");
  command.add_option("--threads", threads, "CPU threads, 0: all")
      ->type_name("N")
      ->capture_default_str();
  command.add_flag("--json", json, "Print one JSON object");
}

bool Report::promises_kept() const {
  return std::ranges::all_of(causality, [](const auto& entry) { return entry.second.kept(); });
}

Report measure(const Capture& capture, const MeasureOptions& options) {
  Report report;
  report.capture = capture.name;
  report.shape = fmt::format("{} tokens, {} {}, causal", capture.tokens, capture.documents(),
                             capture.documents() == 1 ? "document" : "documents");
  report.recipes = choose_recipes(capture, options, report.notes);
  const auto registry = mxattn::recipes();

  const int layers = static_cast<int>(capture.layers.size());
  const int recipes = static_cast<int>(report.recipes.size());
  Progress progress(layers * (1 + recipes) + recipes * (kCausalityRounds + 1));

  for (const Layer& layer : capture.layers) {
    // All heads of a layer in one call: scales of a whole tensor span them.
    progress.begin(fmt::format("{}: exact attention", layer.name));
    Attention exact(capture, layer, kReference, "auto", options.threads);
    exact.run(layer);
    progress.done();

    std::vector<Case> cases;
    for (const std::string& recipe : report.recipes) {
      progress.begin(fmt::format("{}: {}", layer.name, recipe));
      Attention attention(capture, layer, recipe, options.backend, options.threads);
      double seconds = attention.run(layer);
      for (double spent = seconds; spent < kSecondsOfCalls;) {
        const double again = attention.run(layer);
        spent += again;
        seconds = std::min(seconds, again);
      }
      for (int head = 0; head < layer.heads_q; ++head) {
        cases.push_back({layer.name, head, recipe, attention.backend(),
                         accuracy(layer, attention.outputs(), exact.outputs(), head), seconds,
                         flops(capture, layer) / seconds * 1e-9});
      }
      progress.done();

      if (&layer == &capture.layers.front()) {
        progress.begin(fmt::format("{}: causality of {}", layer.name, recipe));
        RecipeCausality& causality = report.causality[recipe];
        causality.found = check_causality(capture, layer, attention);
        causality.promised = std::ranges::any_of(registry, [&](const mxattn_recipe_info& info) {
          return info.name == recipe and info.strictly_causal != 0;
        });
        progress.done(kCausalityRounds + 1);
      }
    }
    std::ranges::stable_sort(cases, {}, &Case::head);
    report.cases.insert(report.cases.end(), cases.begin(), cases.end());
  }
  return report;
}

}  // namespace cli
