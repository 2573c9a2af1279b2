// zeros on CUDA.
#ifndef GEAR_JAX_CUDA_ZEROS_KERNELS_H_
#define GEAR_JAX_CUDA_ZEROS_KERNELS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace gear_jax {

// Fills the device's memory, or mapped host memory, with zeros. One kernel; neither allocates nor waits.
cudaError_t LaunchZeros(void* data, int64_t bytes, cudaStream_t stream);

}  // namespace gear_jax

#endif  // GEAR_JAX_CUDA_ZEROS_KERNELS_H_
