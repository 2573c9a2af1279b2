#include <algorithm>
#include <cstring>

#include "cuda/padding_device.h"
#include "cuda/padding_kernels.h"
#include "cuda/warp_copy.cuh"

namespace gear_jax {
namespace {

constexpr int kRanges = 250;  // of a launch

struct PaddingParams {
  Chunk16 chunk;
  int32_t count;
  PadRange range[kRanges];
};
// More takes CUDA 12.1 and a driver to match.
static_assert(sizeof(PaddingParams) <= 4096, "kernel parameters of CUDA 12.0");

// All threads share each range: a range may be a byte or the whole result.
__global__ void __launch_bounds__(kThreads) PaddingKernel(const __grid_constant__ PaddingParams params) {
  const int64_t threads = gridDim.x * static_cast<int64_t>(kThreads);
  for (int32_t i = 0; i < params.count; ++i) {
    const int64_t chunks = PadChunks(params.range[i]);
    for (int64_t k = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x; k < chunks; k += threads) {
      const ChunkPlan plan = PlanPadding(params.range[i], k);
      Store(plan.out, params.chunk, plan.out_begin, plan.out_end);
    }
  }
}

}  // namespace

cudaError_t LaunchPadding(const Padding& padding, int blocks, cudaStream_t stream) {
  for (size_t first = 0; first < padding.ranges.size(); first += kRanges) {
    PaddingParams params{};
    std::memcpy(&params.chunk, padding.chunk.data(), 16);
    int64_t most = 0;
    for (size_t i = first; i < std::min(padding.ranges.size(), first + kRanges); ++i) {
      params.range[params.count++] = padding.ranges[i];
      most = std::max(most, PadChunks(padding.ranges[i]));
    }
    const int64_t tiles = (most + kTileUnits - 1) / kTileUnits;
    PaddingKernel<<<Blocks(blocks, tiles, kThreads / 32, 1), kThreads, 0, stream>>>(params);
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace gear_jax
