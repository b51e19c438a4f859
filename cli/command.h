// The sub-commands of `mxattn`. Each lies in its own file NAME_command.cc and is registered in
// main.cc.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

namespace cli {

/// Exit statuses.
inline constexpr int kOk = 0;
inline constexpr int kCheckFailed = 1;
inline constexpr int kBadInput = 2;  // usage or input

/// What a chosen sub-command runs; returns the exit status. It may throw std::exception, which
/// main() reports on stderr and turns into kBadInput.
using Action = std::function<int()>;

/// Adds the sub-command to `app`; when the user chooses it, it leaves its work in `action`.
void add_demo_command(CLI::App& app, Action& action);
void add_run_command(CLI::App& app, Action& action);
void add_info_command(CLI::App& app, Action& action);
void add_plan_command(CLI::App& app, Action& action);

}  // namespace cli
