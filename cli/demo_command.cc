// `mxattn demo`: what each recipe does to real activations, in one table.
#include <fmt/core.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "command.h"
#include "measure.h"
#include "report.h"

namespace cli {
namespace {

constexpr const char* kCapture = "gpt_layer0_head6.safetensors";

// What the default recipe promises on this capture: every cosine at least this.
constexpr const char* kDefaultRecipe = "fp8";
constexpr double kPromisedCosine = 0.99;

/// The capture lies in share/mxattn beside bin/, in a build folder as in an installation.
std::filesystem::path capture_path() {
  const auto program = std::filesystem::read_symlink("/proc/self/exe");
  const auto path = program.parent_path().parent_path() / "share" / "mxattn" / kCapture;
  if (not std::filesystem::exists(path)) {
    throw std::runtime_error(path.string() + ": the demo's capture is missing");
  }
  return path;
}

/// Written so that a NaN does not keep it.
bool keeps_promise(const Case& row) {
  return std::ranges::all_of(row.accuracy.cosine, [](double c) { return c >= kPromisedCosine; });
}

const Case* find_case(const Report& report, const std::string& recipe) {
  const auto found = std::ranges::find(report.cases, recipe, &Case::recipe);
  return found == report.cases.end() ? nullptr : &*found;
}

/// The two sentences that the table is there for.
void print_findings(const Report& report) {
  fmt::print("\n");
  if (const Case* row = find_case(report, kDefaultRecipe)) {
    fmt::print("{}: worst cosine {:.4f}, {} the promised {}.\n", kDefaultRecipe,
               std::ranges::min(row->accuracy.cosine), keeps_promise(*row) ? "at least" : "NOT",
               kPromisedCosine);
  }
  if (const Case* row = find_case(report, "fp8_integer_ref")) {
    fmt::print(
        "fp8_integer_ref: dQ {:.3f}, dK {:.3f}. It differs in the row reference, rounded to an\n"
        "integer, and in the row sum, taken from unrounded weights: the weights no longer sum to 1,"
        "\nwhich no random input shows.\n",
        row->accuracy.cosine[1], row->accuracy.cosine[2]);
  }
}

int demo(const MeasureOptions& options) {
  const Report report = measure(load_capture(capture_path()), options);
  if (options.json) {
    print_json(report);
  } else {
    print_text(report);
    print_findings(report);
  }
  const Case* row = find_case(report, kDefaultRecipe);
  const bool accurate = row == nullptr or keeps_promise(*row);
  return accurate and report.promises_kept() ? kOk : kCheckFailed;
}

}  // namespace

void add_demo_command(CLI::App& app, Action& action) {
  auto* command =
      app.add_subcommand("demo", "Accuracy, speed and causality of every recipe on a capture");
  const auto options = std::make_shared<MeasureOptions>();
  options->add_to(*command);
  command->callback([&action, options] { action = [options] { return demo(*options); }; });
}

}  // namespace cli
