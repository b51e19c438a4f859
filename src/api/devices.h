// The CUDA devices of this machine, as far as this build can use them.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kernels/device.h"

namespace mxattn::api {

struct DeviceInfo {
  std::string name;
  int compute_capability = 0;  // 90 is 9.0
  int multiprocessors = 0;
};

struct Devices {
  std::vector<DeviceInfo> list;
  std::string missing;  // why the list is empty, else ""
};

/// Asked for once; strings live as long as the library.
const Devices& devices();

/// The kernels for a compute capability, or null.
const kernels::DeviceBackend* device_backend(int compute_capability);

/// Makes a device current while it lives. Calls of the runtime are asynchronous to the host.
class CurrentDevice {
 public:
  explicit CurrentDevice(int index);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int index_;
  int before_ = 0;
};

/// Throws kInvalidArgument naming the argument unless the device can read and write there.
void check_device_memory(const std::string& name, const void* address, int device_index);

/// Copies lengths to the host and waits for the stream.
std::vector<std::int32_t> copy_lengths(std::span<const std::int32_t> device_lengths, void* stream);

}  // namespace mxattn::api
