// exp2 and log2 in FP32, written once over an arithmetic, so that scalar and SIMD code give the
// same bits.
//
// Besides add, sub, mul, fma and set (recipe/stages.h), an arithmetic offers operations on the bit
// patterns of its values: add_bits, sub_bits (32-bit integers, wrapping), and_bits(x, mask),
// shift_left_bits<n>, int_of_top_bits<n> (arithmetic shift right by n, as a float) and
// select_less(a, b, yes, no), which takes `no` where a or b is NaN.
// Coefficients: minimax fits of relative error, computed for this file.
#pragma once

#include <cstdint>
#include <limits>

namespace mxattn::kernels::cpu {

/// 2^x, at most 1 ulp off, exact at integers. Below 2^-126 the result is 0, from x = 128 on +inf;
/// NaN stays NaN.
template <class Ops>
typename Ops::F exp2_fp32(typename Ops::F x) {
  using F = typename Ops::F;
  // 1.5 2^23: adding it leaves the nearest integer n of x in the low bits of t, and 2^23 divides
  // the rest of the pattern, so that t << 23 is n in the place of the exponent.
  const F magic = Ops::set(12582912.0f);
  const F t = Ops::add(x, magic);
  const F f = Ops::sub(x, Ops::sub(t, magic));  // exact, in [-1/2, 1/2]
  F p = Ops::set(0x1.41fbbap-13f);
  p = Ops::fma(p, f, Ops::set(0x1.5f3e54p-10f));
  p = Ops::fma(p, f, Ops::set(0x1.3b2d4cp-7f));
  p = Ops::fma(p, f, Ops::set(0x1.c6aee8p-5f));
  p = Ops::fma(p, f, Ops::set(0x1.ebfbdcp-3f));
  p = Ops::fma(p, f, Ops::set(0x1.62e43p-1f));
  p = Ops::fma(p, f, Ops::set(1.0f));
  // p lies in [0.7, 1.42]: inside the range below, p 2^n is normal, and the sum of bits is right
  // also where 2^n alone would overflow (n = 128).
  F y = Ops::add_bits(p, Ops::template shift_left_bits<23>(t));
  y = Ops::select_less(x, Ops::set(-126.0f), Ops::set(0.0f), y);
  const F inf = Ops::set(std::numeric_limits<float>::infinity());
  return Ops::select_less(x, Ops::set(128.0f), y, Ops::add(x, inf));
}

/// log2(x), at most 2 ulp off, exact at powers of two, subnormals included. log2(0) = -inf,
/// log2(inf) = inf; NaN of NaN and of x < 0.
template <class Ops>
typename Ops::F log2_fp32(typename Ops::F x) {
  using F = typename Ops::F;
  const F inf = Ops::set(std::numeric_limits<float>::infinity());
  const F zero = Ops::set(0.0f);
  // Subnormals are scaled into the normal range first.
  const F min_normal = Ops::set(std::numeric_limits<float>::min());
  const F scaled = Ops::select_less(x, min_normal, Ops::mul(x, Ops::set(0x1p24f)), x);
  const F shift = Ops::select_less(x, min_normal, Ops::set(-24.0f), zero);
  // x = 2^e (1 + t), 1 + t in [sqrt(1/2), sqrt(2)).
  const F above = Ops::sub_bits(scaled, Ops::set(0x1.6a09e6p-1f));
  const F e = Ops::add(Ops::template int_of_top_bits<23>(above), shift);
  const F t = Ops::sub(Ops::sub_bits(scaled, Ops::and_bits(above, 0xFF800000u)), Ops::set(1.0f));
  F p = Ops::set(-0x1.c277cap-4f);
  p = Ops::fma(p, t, Ops::set(0x1.7d4fa4p-3f));
  p = Ops::fma(p, t, Ops::set(-0x1.874848p-3f));
  p = Ops::fma(p, t, Ops::set(0x1.a30424p-3f));
  p = Ops::fma(p, t, Ops::set(-0x1.eabcdcp-3f));
  p = Ops::fma(p, t, Ops::set(0x1.277e46p-2f));
  p = Ops::fma(p, t, Ops::set(-0x1.715a74p-2f));
  p = Ops::fma(p, t, Ops::set(0x1.ec7096p-2f));
  p = Ops::fma(p, t, Ops::set(-0x1.71547p-1f));
  // log2(1 + t) = t (high + low) + t^2 p(t), high + low = log2(e).
  const F tail = Ops::mul(t, Ops::fma(p, t, Ops::set(0x1.4ae0cp-26f)));
  const F y = Ops::add(e, Ops::fma(t, Ops::set(0x1.715476p+0f), tail));
  // Outside (0, inf): x + x keeps inf and NaN, 0 gives -inf, and inf - inf makes NaN of x < 0.
  const F high = Ops::select_less(x, inf, y, Ops::add(x, x));
  const F low = Ops::select_less(x, zero, Ops::sub(inf, inf), Ops::sub(zero, inf));
  return Ops::select_less(zero, x, high, Ops::select_less(x, inf, low, high));
}

}  // namespace mxattn::kernels::cpu
