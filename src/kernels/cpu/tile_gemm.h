// Products of small BF16 tiles with FP32 accumulators: the matrix engine of the CPU backend.
//
//   C (m x n, FP32)  [+]=  A (m x k, BF16, row-major)  x  B (k x n, BF16, pairs of k interleaved)
//
// B is stored as [k / 2][n][2]: element (c, j) lies at b[(c / 2 * ldb + j) * 2 + c % 2]. Operands
// are packed by tile_pack.h.
//
// Order of one element, "highway" and "avx512_bf16", bit for bit: one chain over k, pairs
// ascending, in each pair the odd element first,
//   acc = fma(a[2p + 1], b[2p + 1], acc); acc = fma(a[2p], b[2p], acc),
// which is what VDPBF16PS does as long as neither operands nor results are subnormal (it reads and
// writes those as 0). "amx" (TDPBF16PS) differs: for every 32 elements it sums the even and the odd
// products in two chains from 0 and adds their sum to acc. "sm90" (sm90_mma.h) models a GPU.
// In all of them an element depends on its row of A and its column of B alone, not on m, n, nor on
// which operand is A: (Q K^T) and (K Q^T)^T have the same bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace mxattn::kernels::cpu {

inline constexpr int kGemmMaxRows = 128;
inline constexpr int kGemmMaxColumns = 256;
inline constexpr int kGemmMaxDepth = 256;
inline constexpr int kGemmColumnStep = 16;  // n is a multiple of it
inline constexpr int kGemmDepthStep = 32;   // k is a multiple of it

struct TileProduct {
  int m = 0, n = 0, k = 0;
  const std::uint16_t* a = nullptr;  // (m, k), rows lda elements apart
  std::ptrdiff_t lda = 0;
  const std::uint16_t* b = nullptr;  // (k / 2, n, 2), rows 2 ldb elements apart
  std::ptrdiff_t ldb = 0;
  float* c = nullptr;  // (m, n), rows ldc elements apart
  std::ptrdiff_t ldc = 0;
  bool accumulate = false;  // start from C instead of 0
};

struct TileGemm {
  const char* name;
  void (*run)(const TileProduct&);
};

/// The fastest engine of this CPU, or the one set by set_tile_gemm.
const TileGemm& best_tile_gemm();

/// The engine called `name`: "highway", "avx512_bf16", "amx"; null where the CPU lacks it.
const TileGemm* find_tile_gemm(std::string_view name);

/// All engines of this CPU, the fastest first.
std::vector<const TileGemm*> tile_gemms();

/// Makes best_tile_gemm() return `engine` in all threads; null takes that back. For tests and
/// benchmarks.
void set_tile_gemm(const TileGemm* engine);

}  // namespace mxattn::kernels::cpu
