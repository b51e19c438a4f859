#include "api/checks.h"

#include <algorithm>
#include <numeric>
#include <span>

#include "api/dtype.h"
#include "base/error.h"

namespace mxattn::api {
namespace {

std::string tuple_text(const std::int64_t* values, int count) {
  std::string text = "(";
  for (int i = 0; i < count; ++i) text += detail::concat(i == 0 ? "" : ", ", values[i]);
  return text + (count == 1 ? ",)" : ")");
}

/// dtype, rank, shape, address. Returns the number of elements.
std::int64_t check_shape(const std::string& name, const mxattn_tensor& tensor, int dtype,
                         std::span<const std::int64_t> shape, const char* meaning) {
  require(tensor.dtype == dtype, name + ".dtype", dtype_name(tensor.dtype), dtype_name(dtype));
  const int rank = static_cast<int>(shape.size());
  require(tensor.rank == rank, name + ".rank", tensor.rank, rank, ", that is ", meaning);
  require(std::equal(shape.begin(), shape.end(), tensor.shape), name + ".shape",
          tuple_text(tensor.shape, rank), tuple_text(shape.data(), rank), ", that is ", meaning);
  std::int64_t elements = 1;
  for (const std::int64_t size : shape) elements *= size;
  const std::uint64_t alignment = dtype_bytes(dtype);
  if (elements > 0) {
    require(tensor.data != nullptr, name + ".data", "null", "the address of ", elements,
            " elements");
  }
  require(reinterpret_cast<std::uintptr_t>(tensor.data) % alignment == 0, name + ".data",
          tensor.data, "a multiple of ", alignment);
  return elements;
}

/// Whether [a, a + a_size) and [b, b + b_size) meet on a circle of length `period` (0: always).
bool meet_on_circle(std::uint64_t a, std::uint64_t a_size, std::uint64_t b, std::uint64_t b_size,
                    std::uint64_t period) {
  if (a_size > period or b_size > period) return true;
  const std::uint64_t ahead = (b % period + period - a % period) % period;  // from a to b
  return ahead < a_size or ahead + b_size > period;
}

/// Whether two regions may share a byte. Exact for tensors that lie apart and for views of one
/// buffer that are cut out along one dimension; anything more tangled counts as shared.
bool may_overlap(const Region& a, const Region& b) {
  if (a.begin + a.span() <= b.begin or b.begin + b.span() <= a.begin) return false;

  // Interleaved ranges: compare single rows modulo what all strides share, then whole runs modulo
  // a common outer stride.
  std::uint64_t common = 0;
  for (const Region* r : {&a, &b}) {
    if (r->inner > 1) common = std::gcd(common, r->inner_stride);
    if (r->outer > 1) common = std::gcd(common, r->outer_stride);
  }
  if (not meet_on_circle(a.begin, a.row_bytes, b.begin, b.row_bytes, common)) return false;
  if (a.outer > 1 and b.outer > 1 and a.outer_stride != b.outer_stride) return true;
  const std::uint64_t period = a.outer > 1 ? a.outer_stride : b.outer_stride;
  return meet_on_circle(a.begin, a.inner_span(), b.begin, b.inner_span(), period);
}

}  // namespace

void Regions::add_bytes(std::string name, Access access, const void* data, std::uint64_t bytes) {
  if (data == nullptr or bytes == 0) return;
  add({.name = std::move(name),
       .access = access,
       .begin = reinterpret_cast<std::uintptr_t>(data),
       .row_bytes = bytes});
}

void Regions::check() const {
  for (std::size_t i = 0; i < regions_.size(); ++i) {
    if (regions_[i].access != Access::kWrite) continue;
    for (std::size_t j = 0; j < regions_.size(); ++j) {
      if (i == j or (j < i and regions_[j].access == Access::kWrite)) continue;
      require(not may_overlap(regions_[i], regions_[j]), regions_[i].name + ".data",
              reinterpret_cast<const void*>(regions_[i].begin), "memory that ", regions_[j].name,
              " (at ", reinterpret_cast<const void*>(regions_[j].begin), ") does not share");
    }
  }
}

void check_rows(const char* name, const mxattn_tensor& tensor, int dtype, std::int64_t tokens,
                std::int64_t heads, std::int64_t dim, const char* meaning, Access access,
                Regions& regions) {
  const std::int64_t shape[] = {tokens, heads, dim};
  const std::int64_t elements = check_shape(name, tensor, dtype, shape, meaning);
  if (elements == 0) return;

  const std::string argument = std::string(name) + ".strides";
  const std::string strides = tuple_text(tensor.strides, 3);
  require(dim == 1 or tensor.strides[2] == 1, argument, strides,
          "1 at the end: the last dimension contiguous");
  // A stride along a dimension of size 1 is never used, whatever it says.
  const std::int64_t token_stride = tokens > 1 ? tensor.strides[0] : 0;
  const std::int64_t head_stride = heads > 1 ? tensor.strides[1] : 0;
  require(token_stride >= 0 and head_stride >= 0, argument, strides, "no negative stride");
  constexpr double kMaxSpan = 0x1p61;
  require(static_cast<double>(token_stride) * static_cast<double>(tokens) +
                  static_cast<double>(head_stride) * static_cast<double>(heads) <
              kMaxSpan,
          argument, strides, "a view of less than 2^61 elements");

  const auto bytes = static_cast<std::uint64_t>(dtype_bytes(dtype));
  Region region{.name = name,
                .access = access,
                .begin = reinterpret_cast<std::uintptr_t>(tensor.data),
                .row_bytes = static_cast<std::uint64_t>(dim) * bytes};
  const bool heads_inside = heads == 1 or (tokens > 1 and head_stride <= token_stride);
  region.inner = static_cast<std::uint64_t>(heads_inside ? heads : tokens);
  region.inner_stride =
      static_cast<std::uint64_t>(heads_inside ? head_stride : token_stride) * bytes;
  region.outer = static_cast<std::uint64_t>(heads_inside ? tokens : heads);
  region.outer_stride =
      static_cast<std::uint64_t>(heads_inside ? token_stride : head_stride) * bytes;
  if (access == Access::kWrite) {
    require((region.inner == 1 or region.inner_stride >= region.row_bytes) and
                (region.outer == 1 or region.outer_stride >= region.inner_span()),
            argument, strides, "rows of ", dim, " elements that do not overlap, as it is written");
  }
  regions.add(std::move(region));
}

void check_contiguous(const char* name, const mxattn_tensor& tensor, int dtype,
                      std::initializer_list<std::int64_t> shape, const char* meaning, Access access,
                      Regions& regions) {
  const std::int64_t elements =
      check_shape(name, tensor, dtype, {shape.begin(), shape.size()}, meaning);
  if (elements == 0) return;
  const int rank = tensor.rank;
  std::int64_t expected[MXATTN_MAX_RANK] = {};
  bool contiguous = true;
  std::int64_t stride = 1;
  for (int i = rank - 1; i >= 0; --i) {
    expected[i] = stride;
    contiguous = contiguous and (tensor.shape[i] == 1 or tensor.strides[i] == stride);
    stride *= tensor.shape[i];
  }
  require(contiguous, std::string(name) + ".strides", tuple_text(tensor.strides, rank),
          tuple_text(expected, rank), ": contiguous");
  regions.add_bytes(name, access, tensor.data,
                    static_cast<std::uint64_t>(elements) * dtype_bytes(dtype));
}

std::span<const std::int32_t> check_lengths(const char* name, const mxattn_tensor& tensor,
                                            int num_documents, Regions& regions) {
  check_contiguous(name, tensor, MXATTN_I32, {std::int64_t{num_documents} + 1},
                   "(num_documents + 1)", Access::kRead, regions);
  return {static_cast<const std::int32_t*>(tensor.data),
          static_cast<std::size_t>(num_documents) + 1};
}

}  // namespace mxattn::api
