// Page-locked memory that the device and the host both use.
#ifndef GEAR_JAX_CUDA_PAGE_LOCKED_H_
#define GEAR_JAX_CUDA_PAGE_LOCKED_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/device_staging.h"

namespace gear_jax {

inline StagingFault AllocatePageLocked(int64_t bytes, uint8_t** memory) {
  void* allocated = nullptr;
  const cudaError_t error = cudaHostAlloc(&allocated, bytes, cudaHostAllocMapped | cudaHostAllocPortable);
  if (error != cudaSuccess) {
    cudaGetLastError();  // else it would show up as another call's
    return {error, "allocating page-locked memory", bytes, false, true};
  }
  *memory = static_cast<uint8_t*>(allocated);
  return {};
}

}  // namespace gear_jax

#endif  // GEAR_JAX_CUDA_PAGE_LOCKED_H_
