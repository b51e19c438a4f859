#include "gantt.h"

#include <gtest/gtest.h>

#include <string>

namespace cli {
namespace {

int count(const std::string& text, const std::string& part) {
  int n = 0;
  for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++n;
  return n;
}

TEST(Gantt, DrawsEveryBarOnce) {
  Gantt gantt{"two panels", 3, 7.0, {"first", "second"}, {}};
  gantt.panels.push_back({"a", {{0, 0, 5, 0}, {1, 0, 4, 1}, {2, 0, 0, 1}, {1, 4, 3, 0}}});
  gantt.panels.push_back({"b", {{2, 0, 9, 7}}});
  const std::string svg = to_svg(gantt);
  EXPECT_EQ(svg.substr(0, 5), "<svg ");
  EXPECT_EQ(svg.substr(svg.size() - 7), "</svg>\n");
  EXPECT_EQ(count(svg, "z\"><title>"), 3);             // a path for each document of each panel
  EXPECT_EQ(count(svg, "z") - count(svg, "size"), 4);  // a closed rectangle for each bar, but
                                                       // none for the bar of length 0
  EXPECT_EQ(count(svg, "stroke-dasharray"), 2);
  EXPECT_EQ(count(svg, "<title>first</title>"), 1);
  EXPECT_EQ(count(svg, "<title>document 7</title>"), 1);  // no name was given
  EXPECT_EQ(count(svg, "<text"), count(svg, "</text>"));
  // The longest bar fills the plot: time 9 is at its right end.
  EXPECT_EQ(count(svg, "M16.0"), 3);
  EXPECT_EQ(svg.find("nan"), std::string::npos);
}

TEST(Gantt, EscapesText) {
  EXPECT_EQ(xml_escaped("a<b & \"c\" > 'd'\n\x01"),
            "a&lt;b &amp; &quot;c&quot; &gt; &#39;d&#39; ?");
  const std::string svg = to_svg({"</svg><script>", 1, 1.0, {"<&>"}, {{"\"x\"", {{0, 0, 1, 0}}}}});
  EXPECT_EQ(count(svg, "<script"), 0);
  EXPECT_EQ(count(svg, "</svg>"), 1);
  EXPECT_EQ(count(svg, "<title>&lt;&amp;&gt;</title>"), 1);
}

TEST(Gantt, NothingToDrawIsLegal) {
  const std::string svg = to_svg({"empty", 132, 0, {}, {{"input", {}}}});
  EXPECT_EQ(svg.find("nan"), std::string::npos);
  EXPECT_EQ(svg.find("inf"), std::string::npos);
  EXPECT_EQ(count(svg, "</svg>"), 1);
}

}  // namespace
}  // namespace cli
