#include "kernels/cpu/sm90_mma.h"

// The order of the next includes is Highway's: this file compiles itself once for every target.
// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/sm90_mma.cc"
#include "hwy/foreach_target.h"
#include "kernels/cpu/simd-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace mxattn::kernels::cpu {
namespace HWY_NAMESPACE {

constexpr int kStep = 32;          // products that one instruction adds
constexpr int kFractionBits = 13;  // that alignment and result keep
constexpr std::uint32_t kKeptBits = ~0u << (23 - kFractionBits);
constexpr std::uint32_t kNanBits = 0x7FFFFFFF;
constexpr int kRows = 4;  // of C that a pass over B serves
// Stands for the exponent of a zero; sums of two stay within int8 and below any true exponent.
constexpr int kZeroExponent = -64;
constexpr int kMinExponent = 1 - E4M3::kBias;

using ByteTag = hn::ScalableTag<std::int8_t>;

// The unnormalised exponents of float_lanes() E4M3 values, as bytes.
HWY_INLINE void store_exponents(Floats x, std::int8_t* to) {
  const IntTag di;
  const auto field = hn::ShiftRight<23>(hn::BitCast(di, SimdOps::and_bits(x, 0x7F800000u)));
  const auto e = hn::Max(hn::Sub(field, hn::Set(di, 127)), hn::Set(di, kMinExponent));
  const auto zero = hn::RebindMask(di, hn::Eq(x, hn::Zero(FloatTag())));
  const hn::Rebind<std::int8_t, FloatTag> d8;
  hn::StoreU(hn::DemoteTo(d8, hn::IfThenElse(zero, hn::Set(di, kZeroExponent), e)), d8, to);
}

// What a pass over kRows rows of A reads besides B itself.
struct Operands {
  HWY_ALIGN float a[kRows][kGemmMaxDepth];
  HWY_ALIGN std::int8_t a_exponent[kRows][kGemmMaxDepth];
  // Columns are padded to the longest vector of bytes.
  HWY_ALIGN std::int8_t b_exponent[kGemmMaxDepth][kGemmMaxColumns];
  HWY_ALIGN std::int8_t largest[kRows][kGemmMaxColumns];  // exponent of a product in the step
};

void load_b_exponents(const TileProduct& p, Operands& x) {
  const UintTag du;
  const FloatTag d;
  const int lanes = static_cast<int>(float_lanes());
  const auto* b = reinterpret_cast<const std::uint32_t*>(p.b);
  for (int k = 0; k < p.k; k += 2, b += p.ldb) {
    for (int column = 0; column < p.n; column += lanes) {
      const auto pair = hn::LoadU(du, b + column);
      const Floats even = hn::BitCast(d, hn::ShiftLeft<16>(pair));
      const Floats odd = hn::BitCast(d, hn::And(pair, hn::Set(du, 0xFFFF0000u)));
      store_exponents(even, x.b_exponent[k] + column);
      store_exponents(odd, x.b_exponent[k + 1] + column);
    }
  }
}

void load_a(const TileProduct& p, int row, int rows, Operands& x) {
  const int lanes = static_cast<int>(float_lanes());
  for (int r = 0; r < kRows; ++r) {
    const std::uint16_t* a = p.a + (row + (r < rows ? r : 0)) * p.lda;
    for (int k = 0; k < p.k; k += lanes) {
      const Floats value = load_bf16(a + k);
      hn::Store(value, FloatTag(), x.a[r] + k);
      store_exponents(value, x.a_exponent[r] + k);
    }
  }
}

// The largest exponent of the step's products, for all columns.
void find_largest(const TileProduct& p, int k, Operands& x) {
  const ByteTag d8;
  for (int column = 0; column < p.n; column += static_cast<int>(hn::Lanes(d8))) {
    hn::Vec<ByteTag> largest[kRows];
    for (auto& e : largest) e = hn::Set(d8, std::int8_t{2 * kZeroExponent});
    for (int i = 0; i < kStep; ++i) {
      const auto b = hn::Load(d8, x.b_exponent[k + i] + column);
      for (int r = 0; r < kRows; ++r) {
        largest[r] = hn::Max(largest[r], hn::Add(b, hn::Set(d8, x.a_exponent[r][k + i])));
      }
    }
    for (int r = 0; r < kRows; ++r) hn::Store(largest[r], d8, x.largest[r] + column);
  }
}

// One step of kRows rows and one vector of columns. first: there is no accumulator yet.
HWY_INLINE void step(const TileProduct& p, const Operands& x, int row, int rows, int column, int k,
                     bool first) {
  const FloatTag d;
  const UintTag du;
  const IntTag di;
  const hn::Rebind<std::int8_t, FloatTag> d8;
  Floats scale[kRows], sum[kRows], acc[kRows];
  hn::Vec<IntTag> largest[kRows];
  for (int r = 0; r < kRows; ++r) {
    const float* c = p.c + (row + (r < rows ? r : 0)) * p.ldc + column;
    acc[r] = first ? hn::Zero(d) : hn::LoadU(d, c);
    const auto field = hn::ShiftRight<23>(hn::BitCast(di, SimdOps::and_bits(acc[r], 0x7F800000u)));
    const auto zero = hn::RebindMask(di, hn::Eq(acc[r], hn::Zero(d)));
    // Capped where an infinite accumulator would leave the range of the scales below.
    const auto e = hn::IfThenElse(zero, hn::Set(di, 2 * kZeroExponent),
                                  hn::Min(hn::Sub(field, hn::Set(di, 127)), hn::Set(di, 127)));
    const auto products = hn::PromoteTo(di, hn::LoadU(d8, x.largest[r] + column));
    largest[r] = hn::Max(products, e);
    // Without products the result is the accumulator, truncated below; its scale is not used.
    const auto exponent = hn::Max(largest[r], hn::Set(di, 2 * kMinExponent));
    const auto biased = hn::Sub(hn::Set(di, 127 + kFractionBits), exponent);
    scale[r] = hn::BitCast(d, hn::ShiftLeft<23>(biased));
    sum[r] = hn::Trunc(hn::Mul(acc[r], scale[r]));
  }
  const auto* b = reinterpret_cast<const std::uint32_t*>(p.b) + (k / 2) * p.ldb + column;
  for (int i = 0; i < kStep; i += 2, b += p.ldb) {
    const auto pair = hn::LoadU(du, b);
    const Floats even = hn::BitCast(d, hn::ShiftLeft<16>(pair));
    const Floats odd = hn::BitCast(d, hn::And(pair, hn::Set(du, 0xFFFF0000u)));
    for (int r = 0; r < kRows; ++r) {
      // Products, scaled ones and sums of 33 of them (below 2^21) are exact in FP32.
      const Floats low = hn::Mul(hn::Mul(even, hn::Set(d, x.a[r][k + i])), scale[r]);
      const Floats high = hn::Mul(hn::Mul(odd, hn::Set(d, x.a[r][k + i + 1])), scale[r]);
      sum[r] = hn::Add(sum[r], hn::Add(hn::Trunc(low), hn::Trunc(high)));
    }
  }
  for (int r = 0; r < rows; ++r) {
    const auto exponent = hn::Max(largest[r], hn::Set(di, 2 * kMinExponent));
    const auto biased = hn::Add(hn::Set(di, 127 - kFractionBits), exponent);
    const Floats unscale = hn::BitCast(d, hn::ShiftLeft<23>(biased));
    const auto no_products = hn::RebindMask(d, hn::Lt(largest[r], hn::Set(di, 2 * kMinExponent)));
    Floats result = hn::IfThenElse(no_products, acc[r], hn::Mul(sum[r], unscale));
    // The sum with +0 turns -0, which the hardware never gives, into +0.
    result = hn::Add(SimdOps::and_bits(result, kKeptBits), hn::Zero(d));
    const Floats nan = hn::BitCast(d, hn::Set(du, kNanBits));
    result = hn::IfThenElse(hn::IsNaN(sum[r]), nan, result);
    hn::StoreU(result, d, p.c + (row + r) * p.ldc + column);
  }
}

void multiply_sm90(const TileProduct& p) {
  const int lanes = static_cast<int>(float_lanes());
  static thread_local Operands x;
  load_b_exponents(p, x);
  for (int row = 0; row < p.m; row += kRows) {
    const int rows = p.m - row < kRows ? p.m - row : kRows;
    load_a(p, row, rows, x);
    for (int k = 0; k < p.k; k += kStep) {
      find_largest(p, k, x);
      for (int column = 0; column < p.n; column += lanes) {
        step(p, x, row, rows, column, k, k == 0 and not p.accumulate);
      }
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace mxattn::kernels::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace mxattn::kernels::cpu {

HWY_EXPORT(multiply_sm90);

const TileGemm& sm90_tile_gemm() {
  static constexpr TileGemm kSm90 = {"sm90", [](const TileProduct& p) {
                                       HWY_DYNAMIC_DISPATCH(multiply_sm90)(p);
                                     }};
  return kSm90;
}

}  // namespace mxattn::kernels::cpu
#endif  // HWY_ONCE
