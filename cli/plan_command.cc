// `mxattn plan`: how evenly the orders of a work list spread a packed microbatch over workers.
#include <fmt/core.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <memory>
#include <mxattn/plan.hpp>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "command.h"
#include "gantt.h"
#include "lengths.h"

namespace cli {
namespace {

struct PlanOptions {
  std::string lengths, k_lengths, mask = "causal", pass = "forward", svg;
  int workers = 132, heads = 16, heads_per_group = 0;
  std::optional<int> heads_k, tile;
  std::uint32_t cost_per_tile = 1, cost_per_item = 0;
  bool json = false;
};

int pass_of(const std::string& name) {
  if (name == "forward") return MXATTN_PASS_FORWARD;
  return name == "dq" ? MXATTN_PASS_DQ : MXATTN_PASS_DKV;
}

/// Every order of the list is sorted and simulated: minutes and gigabytes beyond this many items.
void check_items(const mxattn::ScheduleConfig& config) {
  constexpr std::int64_t kMostItems = 1 << 24;
  if (config.tile < 1) return;  // the library says what is wrong
  const bool keys = config.pass == MXATTN_PASS_DKV;
  const auto& ends =
      keys and not config.cu_seqlens_k.empty() ? config.cu_seqlens_k : config.cu_seqlens_q;
  std::int64_t items = 0;
  for (std::size_t d = 1; d < ends.size(); ++d) {
    items += (std::int64_t{ends[d]} - ends[d - 1] + config.tile - 1) / config.tile;
  }
  items *= keys ? config.heads_k : config.heads_q;
  if (items > kMostItems) {
    throw std::invalid_argument(
        fmt::format("--lengths, --heads: {} items: expected at most {}", items, kMostItems));
  }
}

mxattn::ScheduleConfig config_of(const PlanOptions& options) {
  const MaskChoice mask = parse_mask(options.mask);
  mxattn::ScheduleConfig config;
  config.cu_seqlens_q = parse_lengths(options.lengths);
  if (not options.k_lengths.empty()) {
    config.cu_seqlens_k = parse_lengths(options.k_lengths, "--k-lengths");
    if (config.cu_seqlens_k.size() != config.cu_seqlens_q.size()) {
      throw std::invalid_argument(
          fmt::format("--k-lengths: {} documents: expected {}, as --lengths",
                      config.cu_seqlens_k.size() - 1, config.cu_seqlens_q.size() - 1));
    }
  }
  config.heads_q = options.heads;
  config.heads_k = options.heads_k.value_or(options.heads);
  config.causal = mask.causal;
  config.window_left = mask.window_left;
  config.pass = pass_of(options.pass);
  // What the kernels take by default.
  const int usual_tile = config.pass == MXATTN_PASS_FORWARD ? 256 : 128;
  config.tile = options.tile.value_or(usual_tile);
  config.heads_per_group = options.heads_per_group;
  config.workers = options.workers;
  config.cost_per_tile = options.cost_per_tile;
  config.cost_per_item = options.cost_per_item;
  check_items(config);
  return config;
}

std::string headline(const PlanOptions& options, const mxattn::ScheduleConfig& config,
                     const mxattn_schedule_info& info) {
  const std::string heads =
      config.heads_q == config.heads_k
          ? fmt::format("heads {}", config.heads_q)
          : fmt::format("heads {} for queries and {} for keys", config.heads_q, config.heads_k);
  return fmt::format("{} {}, documents {}, tokens {}, {}: {} items of {} on {} workers",
                     options.mask, options.pass, config.cu_seqlens_q.size() - 1,
                     config.cu_seqlens_q.back(), heads, info.num_items, config.tile,
                     config.workers);
}

void print_text(const PlanOptions& options, const mxattn::ScheduleConfig& config,
                const mxattn::Schedule& schedule) {
  const mxattn_schedule_info info = schedule.info();
  fmt::print("{}\n", headline(options, config, info));
  fmt::print("cost {}, the largest item {}; nothing ends before {:.1f}\n\n", info.total_cost,
             info.largest_cost, info.lower_bound);
  fmt::print("  {:<20} {:>10} {:>8}  {}\n", "order", "makespan", "/ bound", "the list");
  const auto orders = schedule.orders();
  for (std::size_t i = 0; i < orders.size(); ++i) {
    fmt::print("{} {:<20} {:>10} {:>8.3f}  {}\n", static_cast<int>(i) == info.chosen ? '*' : ' ',
               orders[i].name, orders[i].makespan, orders[i].makespan_over_bound,
               orders[i].summary);
  }
  fmt::print("\n* {}.\n", info.reason);
}

void print_json(const PlanOptions& options, const mxattn::ScheduleConfig& config,
                const mxattn::Schedule& schedule) {
  const mxattn_schedule_info info = schedule.info();
  const auto orders = schedule.orders();
  nlohmann::ordered_json json;
  json["orders"] = nlohmann::ordered_json::array();
  for (const auto& order : orders) {
    json["orders"].push_back({{"name", order.name},
                              {"makespan_over_bound", order.makespan_over_bound},
                              {"makespan", order.makespan}});
  }
  json["chosen"] = orders[static_cast<std::size_t>(info.chosen)].name;
  json["reason"] = info.reason;
  json["workers"] = config.workers;
  json["mask"] = options.mask;
  json["pass"] = options.pass;
  json["heads"] = {config.heads_q, config.heads_k};
  json["documents"] = config.cu_seqlens_q.size() - 1;
  json["tokens"] = config.cu_seqlens_q.back();
  json["tile"] = config.tile;
  json["items"] = info.num_items;
  json["total_cost"] = info.total_cost;
  json["largest_cost"] = info.largest_cost;
  json["lower_bound"] = info.lower_bound;
  json["packing_bound"] = info.packing_bound;
  fmt::print("{}\n", json.dump(2));
}

Gantt gantt_of(const PlanOptions& options, const mxattn::ScheduleConfig& config,
               const mxattn::Schedule& schedule) {
  const mxattn_schedule_info info = schedule.info();
  Gantt gantt{headline(options, config, info), config.workers, info.lower_bound, {}, {}};
  for (std::size_t d = 0; d + 1 < config.cu_seqlens_q.size(); ++d) {
    gantt.document_names.push_back(fmt::format(
        "document {}: {} tokens", d, config.cu_seqlens_q[d + 1] - config.cu_seqlens_q[d]));
  }
  const auto orders = schedule.orders();
  for (std::size_t i = 0; i < orders.size(); ++i) {
    GanttPanel panel{fmt::format("{}: {:.3f} of the lower bound{}", orders[i].name,
                                 orders[i].makespan_over_bound,
                                 static_cast<int>(i) == info.chosen ? " (chosen)" : ""),
                     {}};
    for (const auto& item : schedule.items(static_cast<int>(i))) {
      panel.bars.push_back({item.worker, item.start, item.cost, item.document});
    }
    gantt.panels.push_back(std::move(panel));
  }
  return gantt;
}

void write_file(const std::string& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary);
  file << text;
  file.close();
  if (not file) {
    throw std::runtime_error(fmt::format("--svg {}: cannot write: {}", path, strerror(errno)));
  }
}

int run_plan(const PlanOptions& options) {
  const mxattn::ScheduleConfig config = config_of(options);
  const mxattn::Schedule schedule(config);
  if (not options.svg.empty()) {
    write_file(options.svg, to_svg(gantt_of(options, config, schedule)));
  }
  (options.json ? print_json : print_text)(options, config, schedule);
  return kOk;
}

}  // namespace

void add_plan_command(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand("plan", "How evenly a packed microbatch spreads over workers");
  auto options = std::make_shared<PlanOptions>();
  command->add_option("--lengths", options->lengths, "Documents: LENGTH or LENGTHxCOUNT, by commas")
      ->required();
  command->add_option("--k-lengths", options->k_lengths,
                      "Keys of the documents, if not as queries");
  command->add_option("--workers", options->workers, "Workers, such as the SMs of a GPU")
      ->capture_default_str();
  command->add_option("--mask", options->mask, "causal, full or window:LEFT")
      ->capture_default_str();
  command->add_option("--heads", options->heads, "Query heads")->capture_default_str();
  command->add_option("--heads-k", options->heads_k, "Key heads, if fewer than query heads");
  command->add_option("--pass", options->pass, "forward, dq or dkv")
      ->check(CLI::IsMember({"forward", "dq", "dkv"}))
      ->capture_default_str();
  command->add_option("--tile", options->tile,
                      "Queries of an item: 128, 192 or 256; keys: 64, 128 or 256 (dkv)");
  command->add_option("--heads-per-group", options->heads_per_group,
                      "Heads worked on together, to keep their K and V in the L2 cache");
  command->add_option("--cost-per-tile", options->cost_per_tile, "Cost of a 128 x 128 tile")
      ->capture_default_str();
  command->add_option("--cost-per-item", options->cost_per_item, "Cost of starting an item")
      ->capture_default_str();
  command->add_option("--svg", options->svg, "Write a Gantt chart of every order to this file");
  command->add_flag("--json", options->json, "Print one JSON object");
  command->callback([&action, options] { action = [options] { return run_plan(*options); }; });
}

}  // namespace cli
