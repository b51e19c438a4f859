#include "base/cuda_launch.h"
#include "base/numeric.h"
#include "kernels/sm90/outside.h"
#include "ptx/grid.h"

namespace mxattn::kernels::sm90 {
namespace {

constexpr int kThreads = 256;
constexpr int kPiece = 8;  // BF16 elements of a 16-byte store

__global__ void __launch_bounds__(kThreads) outside_kernel(const OutsideArgs args) {
  ptx::launch_dependents();
  ptx::wait_on_dependencies();
  const std::int64_t thread = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const std::int64_t threads = std::int64_t{gridDim.x} * kThreads;
  for (const auto& [x, end] : args.rows) {
    if (x.data == nullptr) continue;
    const std::int64_t begin = *end;
    const bool aligned = x.has_aligned_rows();
    const int pieces = x.dim / kPiece;
    const std::int64_t count = (x.tokens - begin) * x.heads * pieces;
    for (std::int64_t i = thread; i < count; i += threads) {
      const std::int64_t row = i / pieces;
      std::uint16_t* to =
          x.row(begin + row / x.heads, static_cast<int>(row % x.heads)) + i % pieces * kPiece;
      if (aligned) {
        *reinterpret_cast<uint4*>(to) = uint4{0, 0, 0, 0};
      } else {
        for (int e = 0; e < kPiece; ++e) to[e] = 0;
      }
    }
  }
  if (args.lse == nullptr) return;
  const std::int64_t begin = *args.rows[0].end;
  const std::int64_t rows = args.total - begin;
  for (std::int64_t i = thread; i < rows * args.heads; i += threads) {
    const std::int64_t at = i / rows * args.total + begin + i % rows;
    args.lse[at] = -kInfinity;
    args.row_reference[at] = 0;
    args.row_sum[at] = 1.0f;
  }
}

}  // namespace

void fill_outside(const OutsideArgs& args, int num_ctas, cudaStream_t stream) {
  launch_overlapping(outside_kernel, dim3(static_cast<unsigned>(num_ctas)), kThreads, 0, stream,
                     args);
}

}  // namespace mxattn::kernels::sm90
