// sumtree_sample and sumtree_update on CUDA. Neither allocates or waits.
#ifndef GEAR_JAX_CUDA_SUMTREE_KERNELS_H_
#define GEAR_JAX_CUDA_SUMTREE_KERNELS_H_

#include <cuda_runtime_api.h>

#include "cuda/sumtree_device.h"
#include "cuda/sumtree_draw.h"

namespace gear_jax {

// Bytes of shared memory that a block may have on the current device. A call with more partitions than fit into it
// (MemoryBytes) cannot be launched: ask first.
cudaError_t SharedMemoryLimit(int64_t* bytes);

// Draws slots and reads what is known of them. One kernel, one thread a draw, O(log S) reads of 64 bytes each; every
// block forms the prefix sums that draws begin with, of at most all_partitions + 8192 nodes, for itself.
cudaError_t LaunchSumTreeSample(const DeviceDraws& draws, cudaStream_t stream);

// Sets leaves in order and forms the sums above them anew. No writes: no kernel; up to 4096: one kernel of one block;
// more: two for every 2^22 - 1 writes, one for each level until few nodes are left, one for the rest.
cudaError_t LaunchSumTreeUpdate(const DeviceTree& tree, const DeviceWrites& writes, cudaStream_t stream);

}  // namespace gear_jax

#endif  // GEAR_JAX_CUDA_SUMTREE_KERNELS_H_
