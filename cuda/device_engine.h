// gather by the copy engines of a GPU, which take no multiprocessor. Neither XLA nor Python.
#ifndef GEAR_JAX_CUDA_DEVICE_ENGINE_H_
#define GEAR_JAX_CUDA_DEVICE_ENGINE_H_

#include <cuda_runtime_api.h>

#include <vector>

#include "cuda/gather_kernels.h"
#include "ffi/gather.h"

namespace gear_jax {

// What went wrong, or nothing.
struct EngineFault {
  cudaError_t error = cudaSuccess;
  const char* step = "";  // what was being done
  explicit operator bool() const { return error != cudaSuccess; }
};

// Enqueues a gather: the columns of which `copied` says so by one batch of copies, their padding, the other columns and
// the masks by kernels, all on `stream`, which must not be CUDA's legacy default stream.
//
// The call's `slot`, `anchor` and `length` are in page-locked, mapped host memory, and hold their numbers when this is
// called: they are read here, on the host, and by kernels. An array of the device, or one that work which is still
// enqueued will write, is not allowed; the former is an error (cudaErrorInvalidValue). The tables may be written by
// what is enqueued before. Takes what cudaMemcpyBatchAsync does: CUDA 12.8, in the build and in the driver
// (cudaErrorNotSupported, cudaErrorCallRequiresNewerDriver).
EngineFault LaunchEngineGather(const GatherCall& call, const std::vector<bool>& copied, const GatherLaunch& launch,
                               cudaStream_t stream);

}  // namespace gear_jax

#endif  // GEAR_JAX_CUDA_DEVICE_ENGINE_H_
