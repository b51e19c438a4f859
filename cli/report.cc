#include "report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

namespace cli {
namespace {

using Json = nlohmann::ordered_json;

Json by_output(const std::array<double, 4>& values) {
  Json json;
  for (std::size_t i = 0; i < values.size(); ++i) json[kOutputKeys[i]] = values[i];
  return json;
}

const char* verdict(const Causality& found) { return found.strict() ? "strict" : "leaks"; }

/// Rows of one table: a case for each recipe.
void print_table(const std::vector<Case>& rows, const Report& report) {
  fmt::print("{:<16} {:>34}   {:>26}\n", "", "cosine against exact attention", "relative error, %");
  fmt::print("{:<16}", "recipe");
  for (const char* name : kOutputNames) fmt::print(" {:>8} ", name);
  fmt::print(" ");
  for (const char* name : kOutputNames) fmt::print(" {:>6}", name);
  fmt::print(" {:>9} {:>8}  {:<22} {}\n", "ms", "GFLOP/s", "causality: rows moved", "backend");

  // The best and the worst of each column, as printed, where the rows differ at all.
  std::array<std::string, 4> best, worst;
  for (std::size_t i = 0; i < best.size(); ++i) {
    const auto [low, high] =
        std::ranges::minmax(rows, {}, [i](const Case& row) { return row.accuracy.cosine[i]; });
    best[i] = fmt::format("{:.4f}", high.accuracy.cosine[i]);
    worst[i] = fmt::format("{:.4f}", low.accuracy.cosine[i]);
    if (best[i] == worst[i]) best[i] = worst[i] = "";
  }
  for (const Case& row : rows) {
    fmt::print("{:<16}", row.recipe);
    for (std::size_t i = 0; i < best.size(); ++i) {
      const std::string value = fmt::format("{:.4f}", row.accuracy.cosine[i]);
      fmt::print(" {:>8}{}", value, value == best[i] ? '+' : value == worst[i] ? '-' : ' ');
    }
    fmt::print(" ");
    for (const double error : row.accuracy.error) fmt::print(" {:>6.2f}", 100 * error);
    const RecipeCausality& causality = report.causality.at(row.recipe);
    const std::string moved =
        fmt::format("{}, {} of {}{}", verdict(causality.found), causality.found.rows_changed,
                    causality.found.rows_checked, causality.kept() ? "" : " BROKEN");
    fmt::print(" {:>9.1f} {:>8.1f}  {:<22} {}\n", 1e3 * row.seconds, row.gflops, moved,
               row.backend);
  }
}

/// The worst head of each recipe, column by column.
std::vector<Case> worst_cases(const Report& report) {
  std::vector<Case> worst;
  for (const std::string& recipe : report.recipes) {
    const Case* first = nullptr;
    for (const Case& row : report.cases) {
      if (row.recipe != recipe) continue;
      if (first == nullptr) {
        first = &worst.emplace_back(row);
        continue;
      }
      Case& sum = worst.back();
      for (std::size_t i = 0; i < kOutputNames.size(); ++i) {
        sum.accuracy.cosine[i] = std::min(sum.accuracy.cosine[i], row.accuracy.cosine[i]);
        sum.accuracy.error[i] = std::max(sum.accuracy.error[i], row.accuracy.error[i]);
      }
      sum.seconds = std::max(sum.seconds, row.seconds);
      sum.gflops = std::min(sum.gflops, row.gflops);
    }
  }
  return worst;
}

}  // namespace

void print_json(const Report& report) {
  Json json;
  json["version"] = mxattn::version();
  json["cases"] = Json::array();
  for (const Case& row : report.cases) {
    json["cases"].push_back({{"capture", report.capture},
                             {"layer", row.layer},
                             {"head", row.head},
                             {"recipe", row.recipe},
                             {"backend", row.backend},
                             {"cos", by_output(row.accuracy.cosine)},
                             {"rel", by_output(row.accuracy.error)},
                             {"seconds", row.seconds},
                             {"gflops", row.gflops}});
  }
  json["causality"] = Json::object();
  for (const std::string& recipe : report.recipes) {
    const RecipeCausality& causality = report.causality.at(recipe);
    json["causality"][recipe] = {{"rows_changed", causality.found.rows_changed},
                                 {"rows_checked", causality.found.rows_checked},
                                 {"verdict", verdict(causality.found)},
                                 {"promised", causality.promised ? "strict" : "nothing"}};
  }
  json["notes"] = report.notes;
  // The name of the capture is that of a file, and may be no UTF-8.
  fmt::print("{}\n", json.dump(2, ' ', false, Json::error_handler_t::replace));
}

void print_text(const Report& report) {
  fmt::print("capture {}: {}\n", report.capture, report.shape);
  auto begin = report.cases.begin();
  while (begin != report.cases.end()) {
    const auto end = std::find_if(begin, report.cases.end(), [&](const Case& row) {
      return row.layer != begin->layer or row.head != begin->head;
    });
    fmt::print("\n{}, head {}\n", begin->layer, begin->head);
    print_table({begin, end}, report);
    begin = end;
  }
  if (report.cases.size() > report.recipes.size()) {
    fmt::print("\nworst of all heads, each column by itself\n");
    print_table(worst_cases(report), report);
  }
  fmt::print(
      "\n+ best, - worst of a column. ms: quantise, forward and backward of all heads of the layer;"
      "\nGFLOP/s: 14 d for each visible pair of tokens. Causality: q, k, v and dO were multiplied "
      "by"
      "\n10 to 10000 from a cut on in every document; rows before the cuts of which a bit of O, LSE"
      "\nor dQ moved.\n");
  for (const std::string& note : report.notes) fmt::print("{}\n", note);
}

}  // namespace cli
