// `mxattn run`: the demo's table for a capture of your own.
#include <memory>
#include <string>

#include "capture.h"
#include "command.h"
#include "measure.h"
#include "report.h"

namespace cli {

void add_run_command(CLI::App& app, Action& action) {
  auto* command =
      app.add_subcommand("run", "Accuracy, speed and causality of recipes on your own capture");
  const auto options = std::make_shared<MeasureOptions>();
  const auto path = std::make_shared<std::string>();
  command
      ->add_option("--capture", *path,
                   "safetensors file with cu_seqlens and NAME.q, NAME.k, NAME.v, NAME.do (BF16)")
      ->type_name("FILE")
      ->required();
  options->add_to(*command);
  command->callback([&action, options, path] {
    action = [options, path] {
      const Report report = measure(load_capture(*path), *options);
      if (options->json) {
        print_json(report);
      } else {
        print_text(report);
      }
      return report.promises_kept() ? kOk : kCheckFailed;
    };
  });
}

}  // namespace cli
