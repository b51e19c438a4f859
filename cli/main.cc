// `mxattn`: shows on a machine without a GPU what the library computes.
#include <fmt/core.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <mxattn/mxattn.hpp>
#include <stdexcept>

#include "command.h"

namespace {

constexpr void (*kCommands[])(CLI::App&, cli::Action&) = {
    cli::add_demo_command,
    cli::add_run_command,
    cli::add_info_command,
    cli::add_plan_command,
};

/// Runs the chosen command. What was printed may still wait in a buffer: a full disk shows here.
int run(const cli::Action& action) {
  const int status = action();
  if (std::fflush(stdout) != 0) {
    throw std::runtime_error(fmt::format("standard output: cannot write: {}", strerror(errno)));
  }
  return status;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Attention in 8 bits, forward and backward, for training."};
  app.set_version_flag("--version", mxattn::version());
  // None is allowed here, so that a word which is no command is reported as such.
  app.require_subcommand(0, 1);
  cli::Action action;
  for (const auto add : kCommands) add(app, action);

  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? cli::kOk : cli::kBadInput;
  }
  if (action == nullptr) {
    fmt::print(stderr, "A command is required.\n{}", app.help());
    return cli::kBadInput;
  }
  try {
    return run(action);
  } catch (const std::exception& error) {
    fmt::print(stderr, "mxattn: {}\n", error.what());
    return cli::kBadInput;
  }
}
