// Cosines of two runs of an AttentionCase, and how near they are to those expected.
#pragma once

#include <gtest/gtest.h>

#include "support/attention_case.h"
#include "support/inputs.h"

namespace mxattn::test {

inline Cosines cosines(const Result& a, const Result& b) {
  return {cosine(a.out, b.out), cosine(a.dq, b.dq), cosine(a.dk, b.dk), cosine(a.dv, b.dv)};
}

inline void expect_near(const Cosines& got, const Cosines& want, double tolerance) {
  EXPECT_NEAR(got.o, want.o, tolerance);
  EXPECT_NEAR(got.dq, want.dq, tolerance);
  EXPECT_NEAR(got.dk, want.dk, tolerance);
  EXPECT_NEAR(got.dv, want.dv, tolerance);
}

}  // namespace mxattn::test
