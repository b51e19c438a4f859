#include "lengths.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <string>

namespace cli {
namespace {

template <class Parse>
std::string message_of(Parse parse) {
  try {
    parse();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "accepted";
}

std::string refusal(const char* text) {
  return message_of([&] { parse_lengths(text); });
}

TEST(Lengths, ReadsLengthsAndCounts) {
  EXPECT_EQ(parse_lengths("8192"), (std::vector<std::int32_t>{0, 8192}));
  EXPECT_EQ(parse_lengths("3,256x2,0,1x1"), (std::vector<std::int32_t>{0, 3, 259, 515, 515, 516}));
  EXPECT_EQ(parse_lengths("8192,256x224").size(), 226u);
  EXPECT_EQ(parse_lengths("8192,256x224").back(), 65536);
  EXPECT_EQ(parse_lengths("2147483647").back(), 2147483647);
  EXPECT_EQ(parse_lengths("0x16777216").size(), 16777217u);
}

TEST(Lengths, SaysWhichEntryIsWrongAndWhatWasExpected) {
  const std::string form = ": expected LENGTH or LENGTHxCOUNT, such as 8192 or 256x224";
  EXPECT_EQ(refusal(""), "--lengths, entry 1 \"\"" + form);
  EXPECT_EQ(refusal("1,"), "--lengths, entry 2 \"\"" + form);
  EXPECT_EQ(refusal("8192,256y3"), "--lengths, entry 2 \"256y3\"" + form);
  for (const char* text : {"-1", "+1", " 1", "1 ", "1.5", "1e3", "x", "x3", "3x", "3x0", "3x-1",
                           "3x2x1", "99999999999999999999"}) {
    EXPECT_EQ(refusal(text), "--lengths, entry 1 \"" + std::string(text) + "\"" + form);
  }
  EXPECT_EQ(message_of([] { parse_lengths("a", "--k-lengths"); }),
            "--k-lengths, entry 1 \"a\"" + form);
  EXPECT_EQ(refusal("1,2147483647"),
            "--lengths, entry 2 \"2147483647\": expected at most 2147483647 tokens in all");
  EXPECT_EQ(refusal("4611686018427387904x4"),
            "--lengths, entry 1 \"4611686018427387904x4\": expected at most 2147483647 tokens in "
            "all");
  EXPECT_EQ(refusal("1,0x16777216"),
            "--lengths, entry 2 \"0x16777216\": expected at most 16777216 documents in all");
  EXPECT_EQ(refusal("0x9223372036854775807"),
            "--lengths, entry 1 \"0x9223372036854775807\": expected at most 16777216 documents in "
            "all");
}

TEST(Lengths, ReadsMasks) {
  EXPECT_TRUE(parse_mask("causal").causal);
  EXPECT_EQ(parse_mask("causal").window_left, -1);
  EXPECT_FALSE(parse_mask("full").causal);
  EXPECT_TRUE(parse_mask("window:1024").causal);
  EXPECT_EQ(parse_mask("window:1024").window_left, 1024);
  EXPECT_EQ(parse_mask("window:0").window_left, 0);
  for (const char* text :
       {"", "Causal", "window", "window:", "window:-1", "window:1x", "window:2147483648"}) {
    EXPECT_EQ(message_of([&] { parse_mask(text); }),
              "--mask \"" + std::string(text) +
                  "\": expected causal, full, or window:LEFT such as window:1024");
  }
}

}  // namespace
}  // namespace cli
