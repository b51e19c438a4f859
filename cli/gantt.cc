#include "gantt.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <map>

namespace cli {
namespace {

// Sizes in pixels.
constexpr double kWidth = 960, kMargin = 16, kTitle = 44, kPanelTitle = 20, kGap = 14;
constexpr double kPlotHeight = 132, kLeastRow = 0.25, kMostRow = 14;

/// Colours whose hues are a golden angle apart: neighbours in number never look alike.
std::string colour(int document) {
  const double hue = std::fmod(210.0 + 137.50776 * document, 360.0);
  constexpr int kLightness[] = {46, 62, 54};
  return fmt::format("hsl({:.0f},58%,{}%)", hue, kLightness[document % 3]);
}

std::string text_at(double x, double y, int size, const std::string& text) {
  return fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" font-size=\"{}\">{}</text>\n", x, y, size,
                     xml_escaped(text));
}

/// One path for each document keeps the file small: a rectangle costs some twenty bytes.
std::string bars_of(const Gantt& gantt, const GanttPanel& panel, double x_scale, double top,
                    double row) {
  const double seam = std::min(0.4, row / 4);  // leaves the borders of items visible
  std::map<int, std::string> paths;
  for (const GanttBar& bar : panel.bars) {
    if (bar.length == 0) continue;
    const double x = kMargin + static_cast<double>(bar.start) * x_scale;
    const double width = static_cast<double>(bar.length) * x_scale;
    const double inner = width > 3 * seam ? width - seam : width;
    paths[bar.document] += fmt::format("M{:.1f} {:.2f}h{:.1f}v{:.2f}h-{:.1f}z", x,
                                       top + bar.worker * row, inner, row - seam, inner);
  }
  std::string svg;
  for (const auto& [document, path] : paths) {
    const auto index = static_cast<std::size_t>(document);
    const std::string name = index < gantt.document_names.size()
                                 ? xml_escaped(gantt.document_names[index])
                                 : fmt::format("document {}", document);
    svg += fmt::format("<path fill=\"{}\" d=\"{}\"><title>{}</title></path>\n", colour(document),
                       path, name);
  }
  return svg;
}

}  // namespace

std::string xml_escaped(const std::string& text) {
  std::string escaped;
  for (const char c : text) {
    switch (c) {
      case '&':
        escaped += "&amp;";
        break;
      case '<':
        escaped += "&lt;";
        break;
      case '>':
        escaped += "&gt;";
        break;
      case '"':
        escaped += "&quot;";
        break;
      case '\'':
        escaped += "&#39;";
        break;
      case '\t':
      case '\n':
      case '\r':
        escaped += ' ';
        break;
      default:
        escaped += static_cast<unsigned char>(c) < 0x20 ? '?' : c;
    }
  }
  return escaped;
}

std::string to_svg(const Gantt& gantt) {
  double end = gantt.bound;
  for (const GanttPanel& panel : gantt.panels) {
    for (const GanttBar& bar : panel.bars) {
      end = std::max(end, static_cast<double>(bar.start + bar.length));
    }
  }
  const double plot_width = kWidth - 2 * kMargin;
  const double x_scale = end > 0 ? plot_width / end : 0;
  const double row = std::clamp(kPlotHeight / gantt.workers, kLeastRow, kMostRow);
  const double plot_height = row * gantt.workers;
  const double panel_height = kPanelTitle + plot_height + kGap;
  const double height =
      kMargin + kTitle + panel_height * static_cast<double>(gantt.panels.size()) + kMargin;

  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0:.0f} {1:.0f}\" width=\"{0:.0f}\" "
      "height=\"{1:.0f}\" font-family=\"sans-serif\" fill=\"#222\">\n"
      "<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n",
      kWidth, height);
  svg += text_at(kMargin, kMargin + 12, 14, gantt.title);
  svg += text_at(kMargin, kMargin + 28, 11,
                 "A row is a worker, time runs to the right, a colour is a document; dashed: the "
                 "lower bound.");
  double top = kMargin + kTitle;
  for (const GanttPanel& panel : gantt.panels) {
    svg += text_at(kMargin, top + 12, 12, panel.title);
    const double plot_top = top + kPanelTitle;
    svg += fmt::format(
        "<rect x=\"{:.1f}\" y=\"{:.2f}\" width=\"{:.1f}\" height=\"{:.2f}\" fill=\"#eee\"/>\n",
        kMargin, plot_top, plot_width, plot_height);
    svg += bars_of(gantt, panel, x_scale, plot_top, row);
    const double x = kMargin + gantt.bound * x_scale;
    svg += fmt::format(
        "<path stroke=\"#000\" stroke-dasharray=\"4 3\" d=\"M{:.2f} {:.2f}v{:.2f}\"/>\n", x,
        plot_top - 3, plot_height + 6);
    top += panel_height;
  }
  return svg + "</svg>\n";
}

}  // namespace cli
