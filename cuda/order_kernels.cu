#include <algorithm>

#include "cuda/order_kernels.h"

namespace gear_jax {
namespace {

constexpr int kThreads = 256;
constexpr int kScanThreads = 1024;
constexpr int kRangesPerThread = kOrderRanges / kScanThreads;

struct Ranges {
  int64_t slots;
  int32_t shift;
  __device__ int32_t operator()(int32_t slot) const { return slot < 0 || slot >= slots ? 0 : slot >> shift; }
};

__global__ void __launch_bounds__(kThreads)
    CountKernel(const int32_t* slot, int64_t rows, Ranges range, uint32_t* count) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (row < rows) atomicAdd(&count[range(slot[row])], 1u);
}

// Counts become positions: exclusive sums, in one block.
__global__ void __launch_bounds__(kScanThreads) ScanKernel(uint32_t* count) {
  __shared__ uint32_t warp_total[32];
  uint4* const mine = reinterpret_cast<uint4*>(count) + threadIdx.x * (kRangesPerThread / 4);
  uint4 part[kRangesPerThread / 4];
  uint32_t sum = 0;
#pragma unroll
  for (int i = 0; i < kRangesPerThread / 4; ++i) {
    part[i] = mine[i];
    sum += part[i].x + part[i].y + part[i].z + part[i].w;
  }
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto scan = [&](uint32_t x) {  // inclusive, over a warp
    for (int d = 1; d < 32; d *= 2) {
      const uint32_t other = __shfl_up_sync(~0u, x, d);
      if (lane >= d) x += other;
    }
    return x;
  };
  uint32_t before = scan(sum);
  if (lane == 31) warp_total[warp] = before;
  __syncthreads();
  if (warp == 0) {
    const uint32_t own = warp_total[lane];
    warp_total[lane] = scan(own) - own;
  }
  __syncthreads();
  before += warp_total[warp] - sum;
#pragma unroll
  for (int i = 0; i < kRangesPerThread / 4; ++i) {
    const uint4 p = part[i];
    mine[i] = make_uint4(before, before + p.x, before + p.x + p.y, before + p.x + p.y + p.z);
    before += p.x + p.y + p.z + p.w;
  }
}

__global__ void __launch_bounds__(kThreads)
    PlaceKernel(const int32_t* slot, int64_t rows, Ranges range, uint32_t* position, int32_t* order) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (row < rows) order[atomicAdd(&position[range(slot[row])], 1u)] = static_cast<int32_t>(row);
}

}  // namespace

cudaError_t LaunchOrder(const int32_t* slot, int64_t rows, int64_t slots, int32_t* order, cudaStream_t stream) {
  if (rows == 0) return cudaSuccess;
  Ranges range{slots, 0};
  while (((slots - 1) >> range.shift) >= kOrderRanges) ++range.shift;
  // The counts are read as vectors of four, and the rows may be of any number.
  uint32_t* const count = reinterpret_cast<uint32_t*>(order + (rows + 3) / 4 * 4);
  const cudaError_t error = cudaMemsetAsync(count, 0, kOrderRanges * sizeof(uint32_t), stream);
  if (error != cudaSuccess) return error;
  const auto blocks = static_cast<unsigned>((rows + kThreads - 1) / kThreads);
  CountKernel<<<blocks, kThreads, 0, stream>>>(slot, rows, range, count);
  ScanKernel<<<1, kScanThreads, 0, stream>>>(count);
  PlaceKernel<<<blocks, kThreads, 0, stream>>>(slot, rows, range, count, order);
  return cudaGetLastError();
}

}  // namespace gear_jax
