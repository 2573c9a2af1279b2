// The kernels of a remote fetch, between what the host does for it. They enqueue; they neither allocate nor wait.
#ifndef GEAR_JAX_CUDA_FETCH_KERNELS_H_
#define GEAR_JAX_CUDA_FETCH_KERNELS_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "cuda/fetch_device.h"

namespace gear_jax {

// Hands the rows' numbers to the host, with the stamps of those that this GPU gathers.
cudaError_t LaunchFetchIds(const FetchIds& ids, cudaStream_t stream);

// The stamps of the same rows once more, when their bytes have been read. The rows' own numbers may be gone by then.
cudaError_t LaunchFetchStamps(const FetchIds& ids, cudaStream_t stream);

// Copies the rows that `take` (uint8[rows], the device's) says, of all parts.
cudaError_t LaunchFetchRows(const std::vector<TakenPart>& parts, const uint8_t* take, int64_t rows, int blocks,
                            cudaStream_t stream);

// Loads these kernels on the current device, for launches behind a stream that waits (load_kernels.h).
cudaError_t LoadFetchKernels();

}  // namespace gear_jax

#endif  // GEAR_JAX_CUDA_FETCH_KERNELS_H_
