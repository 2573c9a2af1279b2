// The stamps of a scatter on CUDA: a seqlock over slots, for readers in other processes.
#ifndef GEAR_JAX_CUDA_STAMP_KERNELS_H_
#define GEAR_JAX_CUDA_STAMP_KERNELS_H_

#include <cuda_runtime_api.h>

#include "ffi/scatter.h"

namespace gear_jax {

// Before the call's bytes are written (`open`) its slots get odd stamps, and after it the rows' values: enqueue one
// before LaunchScatter and one behind. Neither allocates nor waits.
cudaError_t LaunchStamps(const ScatterCall& call, bool open, cudaStream_t stream);

// Loads these kernels on the current device, for launches behind a stream that waits (load_kernels.h).
cudaError_t LoadStampKernels();

}  // namespace gear_jax

#endif  // GEAR_JAX_CUDA_STAMP_KERNELS_H_
