// What the CUDA handlers share.
#ifndef GEAR_JAX_FFI_CUDA_H_
#define GEAR_JAX_FFI_CUDA_H_

#include <cuda_runtime_api.h>

#include <string>
#include <vector>

#include "ffi/errors.h"
#include "xla/ffi/api/ffi.h"

namespace gear_jax {

using CudaStream = xla::ffi::PlatformStream<cudaStream_t>;

// A fault that CUDA reports, with the kernel and its sizes. A fault of an earlier kernel of the stream shows here too.
inline xla::ffi::Error CudaFailed(const char* kernel, const std::string& sizes, cudaError_t error) {
  return xla::ffi::Error(xla::ffi::ErrorCode::kInternal,
                         std::string(kernel) + " (" + sizes + "): CUDA says " + cudaGetErrorName(error) + ", \"" +
                             cudaGetErrorString(error) +
                             "\". The fault may be an earlier kernel's; CUDA_LAUNCH_BLOCKING=1 or compute-sanitizer "
                             "names it. `python -m gear_jax doctor` checks the driver.");
}

// Brings arrays to where their results are. XLA puts the result of a call straight into the array that a scan stacks;
// what it would have copied then is copied here.
inline cudaError_t CopyMoved(const std::vector<MovedArray>& moved, cudaStream_t stream) {
  for (const MovedArray& x : moved) {
    const cudaError_t error = cudaMemcpyAsync(x.to, x.from, x.bytes, cudaMemcpyDefault, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace gear_jax

#endif  // GEAR_JAX_FFI_CUDA_H_
