// The padding of a gather by copies.
#ifndef GEAR_JAX_CUDA_PADDING_KERNELS_H_
#define GEAR_JAX_CUDA_PADDING_KERNELS_H_

#include <cuda_runtime_api.h>

#include "ffi/gather_engine.h"

namespace gear_jax {

// Fills the ranges, with up to `blocks` thread blocks (0: what fills every multiprocessor). Enqueues one kernel for
// every 250 of them; neither allocates nor waits.
cudaError_t LaunchPadding(const Padding& padding, int blocks, cudaStream_t stream);

}  // namespace gear_jax

#endif  // GEAR_JAX_CUDA_PADDING_KERNELS_H_
