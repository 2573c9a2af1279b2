#include <algorithm>
#include <atomic>

#include "cuda/device_limits.h"
#include "cuda/sumtree_kernels.h"

namespace gear_jax {
namespace {

constexpr int kSampleThreads = kDrawGroup;
constexpr int kSmallThreads = 256;
constexpr int kBlockThreads = 1024;

__device__ int64_t ThreadInGrid() { return blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; }
__device__ int64_t ThreadsInGrid() { return gridDim.x * static_cast<int64_t>(blockDim.x); }

// The least of what the threads of a block have, which is what all of them return. `of_warp`: of the block's memory.
__device__ uint32_t LeastOfBlock(uint32_t value, uint32_t* of_warp) {
  constexpr int kWarps = kSampleThreads / 32;
  static_assert(kWarps == DeviceDraws::kWarps && (kWarps & (kWarps - 1)) == 0 && kWarps <= 32, "one more warp reduces");
  for (int step = 16; step > 0; step /= 2) value = min(value, __shfl_xor_sync(~0u, value, step));
  __syncthreads();  // the last call's values have been read
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  value = of_warp[threadIdx.x % kWarps];
  for (int step = kWarps / 2; step > 0; step /= 2) value = min(value, __shfl_xor_sync(~0u, value, step));
  return value;
}

__global__ void __launch_bounds__(kSampleThreads) SampleKernel(const __grid_constant__ DeviceDraws draws) {
  extern __shared__ double memory[];
  SumGroups(draws, memory, threadIdx.x, blockDim.x);
  __syncthreads();
  SumBlocks(draws, memory, threadIdx.x, blockDim.x);
  __syncthreads();
  SumAll(draws, memory, threadIdx.x, blockDim.x);
  __syncthreads();
  if (ThreadInGrid() == 0) {
    *draws.total = Narrow(Total(draws, memory));
    *draws.ticket_out = *draws.ticket;
  }
  for (int64_t group = blockIdx.x; group < DrawnRows::Groups(draws.draws); group += gridDim.x) {
    const int64_t i = group * kDrawGroup + threadIdx.x;
    const float probability = i < draws.draws ? Draw(draws, memory, i) : 0.0f;
    const uint32_t least = LeastOfBlock(LeastBits(probability), draws.LeastOfWarps(memory));
    if (threadIdx.x == 0) draws.rows.least[group] = __uint_as_float(least);
  }
}

// The whole update of few writes. Within a block a barrier also makes what was written to global memory visible.
__global__ void __launch_bounds__(kBlockThreads)
    UpdateKernel(const __grid_constant__ DeviceTree tree, const __grid_constant__ DeviceWrites writes) {
  for (int64_t i = threadIdx.x; i < writes.count; i += blockDim.x) Mark(tree, writes, 0, i);
  __syncthreads();
  for (int64_t i = threadIdx.x; i < writes.count; i += blockDim.x) Write(tree, writes, 0, i);
  for (int level = 0; level < tree.levels; ++level) {
    __syncthreads();
    const int64_t size = FormSize(tree, writes, level);
    for (int64_t i = threadIdx.x; i < size; i += blockDim.x) Form(tree, writes, level, i);
  }
}

__global__ void __launch_bounds__(kSmallThreads)
    MarkKernel(const __grid_constant__ DeviceTree tree, const __grid_constant__ DeviceWrites writes, int64_t first,
               int64_t count) {
  for (int64_t i = ThreadInGrid(); i < count; i += ThreadsInGrid()) Mark(tree, writes, first, i);
}

__global__ void __launch_bounds__(kSmallThreads)
    WriteKernel(const __grid_constant__ DeviceTree tree, const __grid_constant__ DeviceWrites writes, int64_t first,
                int64_t count) {
  for (int64_t i = ThreadInGrid(); i < count; i += ThreadsInGrid()) Write(tree, writes, first, i);
}

__global__ void __launch_bounds__(kSmallThreads)
    FormKernel(const __grid_constant__ DeviceTree tree, const __grid_constant__ DeviceWrites writes, int level) {
  const int64_t size = FormSize(tree, writes, level);
  for (int64_t i = ThreadInGrid(); i < size; i += ThreadsInGrid()) Form(tree, writes, level, i);
}

// The levels from `level` on, a block for each partition.
__global__ void __launch_bounds__(kBlockThreads) TopKernel(const __grid_constant__ DeviceTree tree, int level) {
  for (; level < tree.levels; ++level) {
    for (int64_t i = threadIdx.x; i < tree.nodes[level]; i += blockDim.x) FormNode(tree, blockIdx.x, level, i);
    __syncthreads();
  }
}

int Blocks(int64_t size, int threads, int64_t most) {
  return static_cast<int>(std::clamp<int64_t>((size + threads - 1) / threads, 1, most));
}

}  // namespace

cudaError_t SharedMemoryLimit(int64_t* bytes) {
  DeviceLimits limits;
  const cudaError_t error = CurrentDeviceLimits(&limits);
  *bytes = limits.shared_memory;
  return error;
}

cudaError_t LaunchSumTreeSample(const DeviceDraws& draws, cudaStream_t stream) {
  constexpr int64_t kWithoutAsking = 48 << 10;
  static std::atomic<bool> allowed[kKnownDevices];
  const int64_t bytes = draws.MemoryBytes();
  DeviceLimits limits;
  cudaError_t error = CurrentDeviceLimits(&limits);
  if (error == cudaSuccess && bytes > kWithoutAsking) error = AllowSharedMemory(SampleKernel, limits, allowed);
  if (error != cudaSuccess) return error;
  // One block at least: it stores the total.
  const int blocks = Blocks(draws.draws, kSampleThreads, 2 * std::max(1, limits.multiprocessors));
  SampleKernel<<<blocks, kSampleThreads, static_cast<size_t>(bytes), stream>>>(draws);
  return cudaGetLastError();
}

cudaError_t LaunchSumTreeUpdate(const DeviceTree& tree, const DeviceWrites& writes, cudaStream_t stream) {
  constexpr int64_t kMostBlocks = 1 << 20;
  if (writes.count == 0 || tree.partitions == 0) return cudaSuccess;
  if (writes.count <= kOneBlockWrites) {
    UpdateKernel<<<1, kBlockThreads, 0, stream>>>(tree, writes);
    return cudaGetLastError();
  }
  for (int64_t first = 0; first < writes.count; first += DeviceWrites::kMarks) {
    const int64_t count = std::min(writes.count - first, DeviceWrites::kMarks);
    const int blocks = Blocks(count, kSmallThreads, kMostBlocks);
    MarkKernel<<<blocks, kSmallThreads, 0, stream>>>(tree, writes, first, count);
    WriteKernel<<<blocks, kSmallThreads, 0, stream>>>(tree, writes, first, count);
  }
  const int top = TopLevel(tree);
  for (int level = 0; level < top; ++level) {
    const int blocks = Blocks(FormSize(tree, writes, level), kSmallThreads, kMostBlocks);
    FormKernel<<<blocks, kSmallThreads, 0, stream>>>(tree, writes, level);
  }
  if (top < tree.levels) {
    TopKernel<<<static_cast<int>(tree.partitions), kBlockThreads, 0, stream>>>(tree, top);
  }
  return cudaGetLastError();
}

}  // namespace gear_jax
