#include "api/devices.h"

#include "base/error.h"

#if defined(MXATTN_HAS_CUDA)

#include <cuda_runtime_api.h>

#include "base/cuda_check.h"
#include "kernels/sm90/attention.h"

namespace mxattn::api {
namespace {

Devices find_devices() {
  Devices found;
  int driver = 0, count = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess or driver == 0) {
    found.missing = "no CUDA driver was found";
    return found;
  }
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess or count == 0) {
    static_cast<void>(cudaGetLastError());  // so that no later call reports it
    found.missing =
        status == cudaErrorInsufficientDriver
            ? detail::concat("the CUDA driver is too old: it is for CUDA ", driver / 1000, ".",
                             driver % 1000 / 10, ", this build needs ", CUDART_VERSION / 1000, ".x")
            : "no CUDA device was found";
    return found;
  }
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp properties;
    MXATTN_CUDA_CHECK(cudaGetDeviceProperties(&properties, i));
    found.list.push_back({.name = properties.name,
                          .compute_capability = 10 * properties.major + properties.minor,
                          .multiprocessors = properties.multiProcessorCount});
  }
  return found;
}

}  // namespace

const Devices& devices() {
  static const Devices found = find_devices();
  return found;
}

const kernels::DeviceBackend* device_backend(int compute_capability) {
  return compute_capability == 90 ? &kernels::sm90::backend() : nullptr;
}

CurrentDevice::CurrentDevice(int index) : index_(index) {
  MXATTN_CUDA_CHECK(cudaGetDevice(&before_));
  if (before_ != index_) MXATTN_CUDA_CHECK(cudaSetDevice(index_));
}

CurrentDevice::~CurrentDevice() {
  if (before_ != index_) static_cast<void>(cudaSetDevice(before_));
}

void check_device_memory(const std::string& name, const void* address, int device_index) {
  cudaPointerAttributes attributes{};
  MXATTN_CUDA_CHECK(cudaPointerGetAttributes(&attributes, address));
  const bool here = attributes.type == cudaMemoryTypeDevice and attributes.device == device_index;
  // The same address on host and device: managed memory, and pinned memory of the host.
  const bool shared =
      attributes.type == cudaMemoryTypeManaged or
      (attributes.type == cudaMemoryTypeHost and attributes.devicePointer == address);
  require(here or shared, name, address, "memory of CUDA device ", device_index);
}

std::vector<std::int32_t> copy_lengths(std::span<const std::int32_t> device_lengths, void* stream) {
  std::vector<std::int32_t> lengths(device_lengths.size());
  const auto on = static_cast<cudaStream_t>(stream);
  MXATTN_CUDA_CHECK(cudaMemcpyAsync(lengths.data(), device_lengths.data(),
                                    device_lengths.size_bytes(), cudaMemcpyDeviceToHost, on));
  MXATTN_CUDA_CHECK(cudaStreamSynchronize(on));
  return lengths;
}

}  // namespace mxattn::api

#else

namespace mxattn::api {
namespace {
constexpr const char* kMissing = "this build holds no CUDA kernels";
}  // namespace

const Devices& devices() {
  static const Devices none{.list = {}, .missing = kMissing};
  return none;
}

const kernels::DeviceBackend* device_backend(int) { return nullptr; }

// Nothing below is reached: no problem gets a device.
CurrentDevice::CurrentDevice(int index) : index_(index) { unsupported(kMissing); }
CurrentDevice::~CurrentDevice() = default;

void check_device_memory(const std::string&, const void*, int) { unsupported(kMissing); }

std::vector<std::int32_t> copy_lengths(std::span<const std::int32_t>, void*) {
  unsupported(kMissing);
}

}  // namespace mxattn::api

#endif
