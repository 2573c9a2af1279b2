// CUDA loads a kernel when it is first launched, and that may wait for all that the device does.
#ifndef GEAR_JAX_CUDA_LOAD_KERNELS_H_
#define GEAR_JAX_CUDA_LOAD_KERNELS_H_

#include <cuda_runtime_api.h>

#include <initializer_list>

namespace gear_jax {

// Loads kernels on the current device.
inline cudaError_t LoadKernels(std::initializer_list<const void*> kernels) {
  for (const void* kernel : kernels) {
    cudaFuncAttributes attributes;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace gear_jax

#endif  // GEAR_JAX_CUDA_LOAD_KERNELS_H_
