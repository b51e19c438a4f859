// Gantt charts of schedules as SVG: one panel a schedule, one row a worker, colours by document.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace cli {

struct GanttBar {
  int worker = 0;
  std::uint64_t start = 0;
  std::uint64_t length = 0;
  int document = 0;
};

struct GanttPanel {
  std::string title;
  std::vector<GanttBar> bars;
};

struct Gantt {
  std::string title;
  int workers = 1;
  double bound = 0;                         // drawn as a line through every panel
  std::vector<std::string> document_names;  // shown when the pointer rests on a bar
  std::vector<GanttPanel> panels;           // all with the same time axis
};

/// A complete SVG document. Any text is legal: it is escaped.
std::string to_svg(const Gantt& gantt);

/// `text` with &, <, >, " and ' as entities; bytes that XML forbids become '?'.
std::string xml_escaped(const std::string& text);

}  // namespace cli
