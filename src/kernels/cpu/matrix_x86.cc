// VDPBF16PS and TDPBF16PS: the only file of the CPU backend with intrinsics. Functions carry their
// target as an attribute; nothing runs before the CPU was asked.
#include "kernels/cpu/matrix_x86.h"

#if defined(__x86_64__) && defined(__linux__)

#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>

namespace mxattn::kernels::cpu {
namespace {

#define MXATTN_AVX512_BF16 __attribute__((target("avx512f,avx512bf16")))
#define MXATTN_AMX_BF16 __attribute__((target("amx-tile,amx-bf16")))

// ---- AVX-512 BF16 -----------------------------------------------------------------------------

constexpr int kRows = 8;    // of C in registers: kRows x 2 accumulators
constexpr int kLanes = 16;  // floats, or pairs of BF16, of a vector

// C of kRows rows (of which `rows` exist) and kVectors vectors of columns. Rows beyond `rows`
// repeat the first one and are not stored.
template <int kVectors>
MXATTN_AVX512_BF16 inline void dot_block(const TileProduct& p, int row, int rows, int column) {
  __m512 acc[kRows][kVectors];
  const std::uint16_t* a[kRows];
  for (int r = 0; r < kRows; ++r) {
    const int at = row + (r < rows ? r : 0);
    a[r] = p.a + at * p.lda;
    for (int v = 0; v < kVectors; ++v) {
      acc[r][v] = p.accumulate ? _mm512_loadu_ps(p.c + at * p.ldc + column + v * kLanes)
                               : _mm512_setzero_ps();
    }
  }
  const std::uint16_t* b = p.b + 2 * column;
  for (int k = 0; k < p.k; k += 2, b += 2 * p.ldb) {
    __m512bh b_pairs[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      b_pairs[v] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(b + 2 * v * kLanes));
    }
    for (int r = 0; r < kRows; ++r) {
      int pair;
      std::memcpy(&pair, a[r] + k, sizeof(pair));
      const __m512bh a_pair = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
      for (int v = 0; v < kVectors; ++v) {
        acc[r][v] = _mm512_dpbf16_ps(acc[r][v], a_pair, b_pairs[v]);
      }
    }
  }
  for (int r = 0; r < rows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      _mm512_storeu_ps(p.c + (row + r) * p.ldc + column + v * kLanes, acc[r][v]);
    }
  }
}

MXATTN_AVX512_BF16 void multiply_avx512_bf16(const TileProduct& p) {
  // Columns outermost: a panel of B stays in the L1 cache while the rows of A pass.
  int column = 0;
  for (; column + 2 * kLanes <= p.n; column += 2 * kLanes) {
    for (int row = 0; row < p.m; row += kRows) {
      dot_block<2>(p, row, p.m - row < kRows ? p.m - row : kRows, column);
    }
  }
  for (; column < p.n; column += kLanes) {
    for (int row = 0; row < p.m; row += kRows) {
      dot_block<1>(p, row, p.m - row < kRows ? p.m - row : kRows, column);
    }
  }
}

// ---- AMX --------------------------------------------------------------------------------------

constexpr int kTileRows = 16;     // of A and C; pairs of k of B
constexpr int kTileColumns = 16;  // floats of C, pairs of A and of B
constexpr int kTileBytes = 64;    // of a row of any tile

// Memory operand of LDTILECFG. Tiles: 0-3 C (row block x column block), 4-5 A, 6-7 B.
struct alignas(64) TileConfig {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

// For one or two blocks of `rows` rows in all; a block without rows leaves its tiles out.
constexpr TileConfig tiles_for(int rows) {
  TileConfig config;
  const int first = rows < kTileRows ? rows : kTileRows, second = rows - first;
  const int counts[8] = {first, first, second, second, first, second, kTileRows, kTileRows};
  for (int t = 0; t < 8; ++t) {
    config.rows[t] = static_cast<std::uint8_t>(counts[t]);
    config.row_bytes[t] = counts[t] > 0 ? kTileBytes : 0;
  }
  return config;
}

// NOTE: constants in memory, since GCC's intrinsic does not say that it reads 64 bytes.
constexpr auto kTileConfigs = [] {
  std::array<TileConfig, 2 * kTileRows + 1> configs;
  for (int rows = 1; rows <= 2 * kTileRows; ++rows) configs[rows] = tiles_for(rows);
  return configs;
}();

template <bool kTwoRows, bool kTwoColumns>
MXATTN_AMX_BF16 inline void multiply_tiles(const TileProduct& p, int row, int column) {
  float* c = p.c + row * p.ldc + column;
  const std::ptrdiff_t c_bytes = p.ldc * 4, a_bytes = p.lda * 2, b_bytes = p.ldb * 4;
  float* c_below = c + kTileRows * p.ldc;
  if (p.accumulate) {
    _tile_loadd(0, c, c_bytes);
    if constexpr (kTwoColumns) _tile_loadd(1, c + kTileColumns, c_bytes);
    if constexpr (kTwoRows) _tile_loadd(2, c_below, c_bytes);
    if constexpr (kTwoRows and kTwoColumns) _tile_loadd(3, c_below + kTileColumns, c_bytes);
  } else {
    _tile_zero(0);
    if constexpr (kTwoColumns) _tile_zero(1);
    if constexpr (kTwoRows) _tile_zero(2);
    if constexpr (kTwoRows and kTwoColumns) _tile_zero(3);
  }
  const std::uint16_t* a = p.a + row * p.lda;
  const std::uint16_t* b = p.b + 2 * column;
  for (int k = 0; k < p.k; k += 2 * kTileColumns) {
    const std::uint16_t* b_step = b + k * p.ldb;
    _tile_loadd(4, a + k, a_bytes);
    _tile_loadd(6, b_step, b_bytes);
    if constexpr (kTwoRows) _tile_loadd(5, a + kTileRows * p.lda + k, a_bytes);
    if constexpr (kTwoColumns) _tile_loadd(7, b_step + 2 * kTileColumns, b_bytes);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kTwoColumns) _tile_dpbf16ps(1, 4, 7);
    if constexpr (kTwoRows) _tile_dpbf16ps(2, 5, 6);
    if constexpr (kTwoRows and kTwoColumns) _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, c, c_bytes);
  if constexpr (kTwoColumns) _tile_stored(1, c + kTileColumns, c_bytes);
  if constexpr (kTwoRows) _tile_stored(2, c_below, c_bytes);
  if constexpr (kTwoRows and kTwoColumns) _tile_stored(3, c_below + kTileColumns, c_bytes);
}

template <bool kTwoRows>
MXATTN_AMX_BF16 inline void multiply_row_block(const TileProduct& p, int row) {
  int column = 0;
  for (; column + 2 * kTileColumns <= p.n; column += 2 * kTileColumns) {
    multiply_tiles<kTwoRows, true>(p, row, column);
  }
  if (column < p.n) multiply_tiles<kTwoRows, false>(p, row, column);
}

MXATTN_AMX_BF16 void multiply_amx(const TileProduct& p) {
  // NOTE: nor do the tile intrinsics say that they read and write memory. The fences keep the
  // compiler from moving accesses of a caller that inlines this function.
  std::atomic_signal_fence(std::memory_order_seq_cst);
  for (int row = 0, configured = 0; row < p.m; row += 2 * kTileRows) {
    const int rows = std::min(p.m - row, 2 * kTileRows);
    if (rows != configured) _tile_loadconfig(&kTileConfigs[rows]);
    configured = rows;
    if (rows > kTileRows) {
      multiply_row_block<true>(p, row);
    } else {
      multiply_row_block<false>(p, row);
    }
  }
  // Tile state lives for one call: other code on this thread may use the tiles as it likes.
  _tile_release();
  std::atomic_signal_fence(std::memory_order_seq_cst);
}

// The CPU has the instructions, and Linux grants this process the state of the tiles.
bool request_amx() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (not __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
  if ((edx & kAmxBf16) == 0 or (edx & kAmxTile) == 0) return false;
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;               // XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

constexpr TileGemm kAvx512Bf16 = {"avx512_bf16", multiply_avx512_bf16};
constexpr TileGemm kAmx = {"amx", multiply_amx};

}  // namespace

const TileGemm* avx512_bf16_tile_gemm() {
  static const bool available =
      __builtin_cpu_supports("avx512f") and __builtin_cpu_supports("avx512bf16");
  return available ? &kAvx512Bf16 : nullptr;
}

const TileGemm* amx_tile_gemm() {
  static const bool available = request_amx();
  return available ? &kAmx : nullptr;
}

}  // namespace mxattn::kernels::cpu

#else

namespace mxattn::kernels::cpu {

const TileGemm* avx512_bf16_tile_gemm() { return nullptr; }
const TileGemm* amx_tile_gemm() { return nullptr; }

}  // namespace mxattn::kernels::cpu

#endif
