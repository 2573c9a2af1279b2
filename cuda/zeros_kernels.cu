#include <algorithm>

#include "cuda/device_limits.h"
#include "cuda/zeros_device.h"
#include "cuda/zeros_kernels.h"

namespace gear_jax {
namespace {

constexpr int kThreads = 512;
constexpr int64_t kHostBlocks = 16;  // fill a PCIe link; with more it slows down

__global__ void __launch_bounds__(kThreads) ZerosKernel(uint8_t* data, int64_t bytes) {
  ZeroShare(data, bytes, blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x,
            gridDim.x * static_cast<int64_t>(kThreads));
}

// The most blocks that help: those that fill the link to host memory, or every multiprocessor.
cudaError_t MostBlocks(const void* data, int64_t* blocks) {
  cudaPointerAttributes attributes{};
  cudaError_t error = cudaPointerGetAttributes(&attributes, data);
  if (error != cudaSuccess) return error;
  *blocks = kHostBlocks;
  if (attributes.type == cudaMemoryTypeHost) return cudaSuccess;
  DeviceLimits limits;
  error = CurrentDeviceLimits(&limits);
  *blocks = std::max<int64_t>(kHostBlocks, 4 * limits.multiprocessors);
  return error;
}

}  // namespace

cudaError_t LaunchZeros(void* data, int64_t bytes, cudaStream_t stream) {
  if (bytes == 0) return cudaSuccess;
  const int64_t wanted = (bytes + 16 * kThreads - 1) / (16 * kThreads);
  int64_t most = kHostBlocks;
  if (wanted > most) {
    const cudaError_t error = MostBlocks(data, &most);
    if (error != cudaSuccess) return error;
  }
  ZerosKernel<<<static_cast<int>(std::min(wanted, most)), kThreads, 0, stream>>>(static_cast<uint8_t*>(data), bytes);
  return cudaGetLastError();
}

}  // namespace gear_jax
