// A report for people and for machines.
#pragma once

#include "measure.h"

namespace cli {

/// One JSON object on stdout.
void print_json(const Report& report);

/// A table for each head, and one of the worst heads if there are several.
void print_text(const Report& report);

}  // namespace cli
