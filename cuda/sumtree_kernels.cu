#include <algorithm>

#include "cuda/sumtree_kernels.h"

namespace gear_jax {
namespace {

constexpr int kSampleThreads = 512;
constexpr int kSmallThreads = 256;
constexpr int kBlockThreads = 1024;

__device__ int64_t ThreadInGrid() { return blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; }
__device__ int64_t ThreadsInGrid() { return gridDim.x * static_cast<int64_t>(blockDim.x); }

__global__ void __launch_bounds__(kSampleThreads) SampleKernel(const __grid_constant__ DeviceDraws draws) {
  extern __shared__ double memory[];
  SumGroups(draws, memory, threadIdx.x, blockDim.x);
  __syncthreads();
  SumBlocks(draws, memory, threadIdx.x, blockDim.x);
  __syncthreads();
  SumAll(draws, memory, threadIdx.x, blockDim.x);
  __syncthreads();
  if (ThreadInGrid() == 0) *draws.total = Narrow(Total(draws, memory));
  for (int64_t i = ThreadInGrid(); i < draws.draws; i += ThreadsInGrid()) Draw(draws, memory, i);
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

cudaError_t Attribute(cudaDeviceAttr attribute, int* value) {
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  return error == cudaSuccess ? cudaDeviceGetAttribute(value, attribute, device) : error;
}

}  // namespace

cudaError_t SharedMemoryLimit(int64_t* bytes) {
  int value = 0;
  const cudaError_t error = Attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, &value);
  *bytes = value;
  return error;
}

cudaError_t LaunchSumTreeSample(const DeviceDraws& draws, cudaStream_t stream) {
  constexpr int64_t kWithoutAsking = 48 << 10;
  const int64_t bytes = draws.MemoryBytes();
  if (bytes > kWithoutAsking) {
    // Always all there is: another thread may be about to launch the kernel with more than this call needs.
    int64_t limit = 0;
    cudaError_t error = SharedMemoryLimit(&limit);
    if (error != cudaSuccess) return error;
    error = cudaFuncSetAttribute(SampleKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(limit));
    if (error != cudaSuccess) return error;
  }
  int multiprocessors = 0;
  const cudaError_t error = Attribute(cudaDevAttrMultiProcessorCount, &multiprocessors);
  if (error != cudaSuccess) return error;
  // One block at least: it stores the total.
  const int blocks = Blocks(draws.draws, kSampleThreads, 2 * std::max(1, multiprocessors));
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
