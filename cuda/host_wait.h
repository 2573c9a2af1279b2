// A stream that waits for the host, without a kernel: one that waited would keep a multiprocessor from kernels that
// want all of them, and matrix products beside it took 15 % longer.
#ifndef GEAR_JAX_CUDA_HOST_WAIT_H_
#define GEAR_JAX_CUDA_HOST_WAIT_H_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace gear_jax {

// Has a stream wait until `*word`, in page-locked memory, is `value` or up to 2^31 - 1 more, mod 2^32.
cudaError_t EnqueueHostWait(const uint32_t* word, uint32_t value, cudaStream_t stream);

}  // namespace gear_jax

#endif  // GEAR_JAX_CUDA_HOST_WAIT_H_
