#include "kernels/cpu/tile_gemm.h"

#include <atomic>

#include "kernels/cpu/matrix_x86.h"

// The order of the next includes is Highway's: this file compiles itself once for every target.
// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/tile_gemm.cc"
#include "hwy/foreach_target.h"
#include "kernels/cpu/simd-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace mxattn::kernels::cpu {
namespace HWY_NAMESPACE {

// Rows of C that a micro-kernel holds in registers, as many as the register file allows.
#if HWY_TARGET == HWY_AVX2
constexpr int kRows = 4;
#else
constexpr int kRows = 8;
#endif

// C of kRows rows (of which `rows` exist) and kVectors vectors of columns; panel holds the rows of
// A in FP32.
template <int kVectors>
HWY_INLINE void multiply_block(const TileProduct& p, const float (*panel)[kGemmMaxDepth], int row,
                               int rows, int column) {
  const FloatTag d;
  const UintTag du;
  const int lanes = static_cast<int>(float_lanes());
  Floats acc[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    const float* c = p.c + (row + (r < rows ? r : 0)) * p.ldc + column;
    for (int v = 0; v < kVectors; ++v) {
      acc[r][v] = p.accumulate ? hn::LoadU(d, c + v * lanes) : hn::Zero(d);
    }
  }
  const auto* b = reinterpret_cast<const std::uint32_t*>(p.b) + column;
  const auto upper = hn::Set(du, 0xFFFF0000u);
  for (int k = 0; k < p.k; k += 2, b += p.ldb) {
    Floats even[kVectors], odd[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      const auto pair = hn::LoadU(du, b + v * lanes);
      even[v] = hn::BitCast(d, hn::ShiftLeft<16>(pair));
      odd[v] = hn::BitCast(d, hn::And(pair, upper));
    }
    for (int r = 0; r < kRows; ++r) {
      const Floats a_odd = hn::Set(d, panel[r][k + 1]);
      for (int v = 0; v < kVectors; ++v) acc[r][v] = SimdOps::fma(a_odd, odd[v], acc[r][v]);
    }
    for (int r = 0; r < kRows; ++r) {
      const Floats a_even = hn::Set(d, panel[r][k]);
      for (int v = 0; v < kVectors; ++v) acc[r][v] = SimdOps::fma(a_even, even[v], acc[r][v]);
    }
  }
  for (int r = 0; r < rows; ++r) {
    float* c = p.c + (row + r) * p.ldc + column;
    for (int v = 0; v < kVectors; ++v) hn::StoreU(acc[r][v], d, c + v * lanes);
  }
}

void multiply(const TileProduct& p) {
  const int lanes = static_cast<int>(float_lanes());
  HWY_ALIGN float panel[kRows][kGemmMaxDepth];
  for (int row = 0; row < p.m; row += kRows) {
    const int rows = p.m - row < kRows ? p.m - row : kRows;
    // Rows beyond m repeat the first one and are not stored.
    for (int r = 0; r < kRows; ++r) {
      const std::uint16_t* a = p.a + (row + (r < rows ? r : 0)) * p.lda;
      for (int k = 0; k < p.k; k += lanes) hn::Store(load_bf16(a + k), FloatTag(), panel[r] + k);
    }
    int column = 0;
    for (; column + 2 * lanes <= p.n; column += 2 * lanes) {
      multiply_block<2>(p, panel, row, rows, column);
    }
    for (; column < p.n; column += lanes) multiply_block<1>(p, panel, row, rows, column);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace mxattn::kernels::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace mxattn::kernels::cpu {
namespace {

HWY_EXPORT(multiply);

constexpr TileGemm kHighway = {"highway", [](const TileProduct& p) {
                                 HWY_DYNAMIC_DISPATCH(multiply)(p);
                               }};

std::atomic<const TileGemm*> chosen_engine = nullptr;

}  // namespace

std::vector<const TileGemm*> tile_gemms() {
  std::vector<const TileGemm*> engines;
  for (const TileGemm* engine : {amx_tile_gemm(), avx512_bf16_tile_gemm(), &kHighway}) {
    if (engine != nullptr) engines.push_back(engine);
  }
  return engines;
}

const TileGemm* find_tile_gemm(std::string_view name) {
  for (const TileGemm* engine : tile_gemms()) {
    if (engine->name == name) return engine;
  }
  return nullptr;
}

const TileGemm& best_tile_gemm() {
  static const TileGemm* const fastest = tile_gemms().front();
  const TileGemm* chosen = chosen_engine.load(std::memory_order_relaxed);
  return chosen != nullptr ? *chosen : *fastest;
}

void set_tile_gemm(const TileGemm* engine) { chosen_engine = engine; }

}  // namespace mxattn::kernels::cpu
#endif  // HWY_ONCE
