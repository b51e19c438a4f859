// `mxattn info`: what this build and this machine offer.
#include <fmt/core.h>

#include <mxattn/mxattn.hpp>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "command.h"

namespace cli {
namespace {

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts(1);
  for (const char c : text) {
    if (c == ',') {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  if (parts.back().empty()) parts.pop_back();
  return parts;
}

std::vector<std::string> device_names() {
  std::vector<std::string> names;
  for (int i = 0; i < mxattn_device_count(); ++i) {
    const char* name = "";
    if (mxattn_device_name(i, &name) == MXATTN_OK) names.emplace_back(name);
  }
  return names;
}

nlohmann::ordered_json info_json() {
  nlohmann::ordered_json json;
  json["version"] = mxattn::version();
  json["abi"] = MXATTN_ABI_VERSION;
  json["backends"] = nlohmann::ordered_json::array();
  for (const auto& backend : mxattn::backends()) {
    json["backends"].push_back({{"name", backend.name},
                                {"summary", backend.summary},
                                {"available", backend.available != 0},
                                {"reason", backend.reason}});
  }
  json["simd_targets"] = split(mxattn_simd_targets());
  json["matrix_engine"] = mxattn_matrix_engine();
  json["recipes"] = nlohmann::ordered_json::array();
  for (const auto& recipe : mxattn::recipes()) {
    json["recipes"].push_back({{"name", recipe.name},
                               {"form", recipe.form},
                               {"version", recipe.version},
                               {"summary", recipe.summary},
                               {"control", recipe.control != 0},
                               {"strictly_causal", recipe.strictly_causal != 0}});
  }
  json["threads"] = mxattn_default_threads();
  json["devices"] = device_names();
  return json;
}

void print_text() {
  fmt::print("mxattn {}, C interface {}\n\n", mxattn::version(), MXATTN_ABI_VERSION);
  fmt::print("{:<16} {}\n", "backend", "what");
  for (const auto& backend : mxattn::backends()) {
    fmt::print("{:<16} {}{}{}\n", backend.name, backend.summary,
               backend.available != 0 ? "" : " - not available: ", backend.reason);
  }
  fmt::print("\n{:<16} {:<8} {:>7}  {:<6}  {}\n", "recipe", "form", "version", "strict", "what");
  for (const auto& recipe : mxattn::recipes()) {
    fmt::print("{:<16} {:<8} {:>7}  {:<6}  {}{}\n", recipe.name, recipe.form, recipe.version,
               recipe.strictly_causal != 0 ? "yes" : "no", recipe.summary,
               recipe.control != 0 ? " (control)" : "");
  }
  fmt::print("\nSIMD targets     {}\nmatrix engine    {}\nthreads          {}\n",
             mxattn_simd_targets(), mxattn_matrix_engine(), mxattn_default_threads());
  const auto devices = device_names();
  fmt::print("GPUs             {}\n", devices.empty() ? "none" : "");
  for (const auto& name : devices) fmt::print("                 {}\n", name);
}

}  // namespace

void add_info_command(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand("info", "Version, backends, recipes, what the machine has");
  auto json = std::make_shared<bool>(false);
  command->add_flag("--json", *json, "Print one JSON object");
  command->callback([&action, json] {
    action = [json] {
      if (*json) {
        fmt::print("{}\n", info_json().dump(2));
      } else {
        print_text();
      }
      return kOk;
    };
  });
}

}  // namespace cli
