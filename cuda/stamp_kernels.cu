#include <algorithm>

#include "cuda/load_kernels.h"
#include "cuda/scatter_device.h"
#include "cuda/stamp_kernels.h"

namespace gear_jax {
namespace {

struct StampParams {
  ScatterRows rows;
  uint32_t* stamp;
  const uint32_t* value;
  bool open;
};

// The fences are the system's: readers are other processes on the host, or network cards. What kernels before have
// written is seen before a stamp that closes, and a stamp that opens before what kernels behind write.
__global__ void StampKernel(const __grid_constant__ StampParams params) {
  __threadfence_system();
  const int64_t step = gridDim.x * static_cast<int64_t>(blockDim.x);
  for (int64_t row = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; row < params.rows.rows; row += step) {
    if (Skipped(params.rows, row)) continue;
    *static_cast<volatile uint32_t*>(params.stamp + params.rows.slot[row]) = StampOf(params.value[row], params.open);
  }
  __threadfence_system();
}

}  // namespace

cudaError_t LaunchStamps(const ScatterCall& call, bool open, cudaStream_t stream) {
  if (call.stamp == nullptr || call.rows == 0) return cudaSuccess;
  constexpr int kStampThreads = 256;
  const int64_t blocks = (call.rows + kStampThreads - 1) / kStampThreads;
  const StampParams params{RowsOf(call), call.stamp, call.stamp_value, open};
  StampKernel<<<static_cast<int>(std::clamp<int64_t>(blocks, 1, 256)), kStampThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t LoadStampKernels() { return LoadKernels({reinterpret_cast<const void*>(StampKernel)}); }

}  // namespace gear_jax
