// scatter on CUDA: one persistent grid for all columns.
#ifndef GEAR_JAX_CUDA_SCATTER_KERNELS_H_
#define GEAR_JAX_CUDA_SCATTER_KERNELS_H_

#include <cuda_runtime_api.h>

#include "ffi/scatter.h"

namespace gear_jax {

// Writes the call's rows. All pointers are the device's, or those of mapped host memory. `blocks` of 512 threads; 0:
// what fills every multiprocessor. Enqueues one kernel for every 32 columns; neither allocates nor waits.
cudaError_t LaunchScatter(const ScatterCall& call, int blocks, cudaStream_t stream);

// Loads these kernels on the current device, for launches behind a stream that waits (load_kernels.h).
cudaError_t LoadScatterKernels();

}  // namespace gear_jax

#endif  // GEAR_JAX_CUDA_SCATTER_KERNELS_H_
