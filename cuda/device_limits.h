// What launches must know of the current device. It is asked once for each device: a launch costs less than the
// questions.
#ifndef GEAR_JAX_CUDA_DEVICE_LIMITS_H_
#define GEAR_JAX_CUDA_DEVICE_LIMITS_H_

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>

namespace gear_jax {

inline constexpr int kKnownDevices = 64;  // others are asked each time

struct DeviceLimits {
  int device = 0;
  int multiprocessors = 0;
  int shared_memory = 0;  // bytes that a block may have if the kernel asks for them
};

inline cudaError_t CurrentDeviceLimits(DeviceLimits* limits) {
  static std::atomic<uint64_t> known[kKnownDevices];  // both numbers, of which none is zero; threads may both ask
  cudaError_t error = cudaGetDevice(&limits->device);
  if (error != cudaSuccess) return error;
  std::atomic<uint64_t>* slot = limits->device < kKnownDevices ? &known[limits->device] : nullptr;
  if (const uint64_t found = slot != nullptr ? slot->load(std::memory_order_relaxed) : 0) {
    limits->multiprocessors = static_cast<int>(found >> 32);
    limits->shared_memory = static_cast<int>(found & 0xFFFFFFFFu);
    return cudaSuccess;
  }
  error = cudaDeviceGetAttribute(&limits->multiprocessors, cudaDevAttrMultiProcessorCount, limits->device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&limits->shared_memory, cudaDevAttrMaxSharedMemoryPerBlockOptin, limits->device);
  if (error != cudaSuccess || slot == nullptr) return error;
  slot->store(static_cast<uint64_t>(limits->multiprocessors) << 32 | static_cast<uint32_t>(limits->shared_memory),
              std::memory_order_relaxed);
  return cudaSuccess;
}

// Lets a kernel have all the shared memory that the current device has, whatever this launch needs: another thread may
// be about to launch it with more.
template <typename Kernel>
cudaError_t AllowSharedMemory(Kernel kernel, const DeviceLimits& limits, std::atomic<bool> (&allowed)[kKnownDevices]) {
  const bool known = limits.device < kKnownDevices;
  if (known && allowed[limits.device].load(std::memory_order_acquire)) return cudaSuccess;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, limits.shared_memory);
  if (known && error == cudaSuccess) allowed[limits.device].store(true, std::memory_order_release);
  return error;
}

}  // namespace gear_jax

#endif  // GEAR_JAX_CUDA_DEVICE_LIMITS_H_
