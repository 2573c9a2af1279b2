// The memory that gathers on GPUs read by address. Neither XLA nor Python.
#ifndef GEAR_JAX_CUDA_DEVICE_REGISTRY_H_
#define GEAR_JAX_CUDA_DEVICE_REGISTRY_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cuda/address_device.h"
#include "ffi/address.h"

namespace gear_jax {

// The most memory that has addresses at the same time.
inline constexpr int64_t kRegistryEntries = 4096;

// What went wrong, or nothing.
struct RegistryFault {
  cudaError_t error = cudaSuccess;
  std::string step;  // what was being done, or what is wrong though CUDA reports no error
  explicit operator bool() const { return error != cudaSuccess || !step.empty(); }
};

// A copy, on every GPU that has been asked for, of what MemoryRegistry says. Thread-safe; never destroyed, because the
// process may end with gathers in flight.
class DeviceRegistry {
 public:
  static DeviceRegistry& Global();

  // Lets kernels on some devices (CUDA's ordinals) find page-locked, mapped host memory by its address.
  RegistryFault Add(const Address& address, const void* base, int64_t bytes, const std::vector<int>& devices);

  // Makes addresses stale: waits for what is enqueued on the devices, and then for who has just found one still good.
  RegistryFault Remove(const std::vector<Address>& addresses);

  // What a kernel on the current device takes. False: no memory has an address there.
  bool View(RegistryView* view);

  // What was wrong with an address that a kernel got, for the user, once; empty: nothing. `what`: the call.
  std::string TakeFault(const std::string& what);

 private:
  struct Device {
    RegisteredMemory* entries = nullptr;  // of the device
    uint64_t* fault = nullptr;            // of the host, mapped
    cudaStream_t stream = nullptr;
  };

  RegistryFault Make(int ordinal, Device* device);
  std::vector<std::pair<int, Device>> Devices();

  std::mutex
      changes_;  // of the addresses; held while a device is waited for, which may be waiting for a gather's launch
  std::map<int32_t, int64_t> sequences_;  // of the entries in use; by `changes_`
  std::mutex mutex_;                      // of what follows; held for nothing that waits
  int32_t owner_ = 0;
  std::map<int, Device> devices_;  // by ordinal; stay as they are made
};

}  // namespace gear_jax

#endif  // GEAR_JAX_CUDA_DEVICE_REGISTRY_H_
