// Reads of whole regions by a GPU. Neither XLA nor Python.
#ifndef GEAR_JAX_CUDA_DEVICE_READ_H_
#define GEAR_JAX_CUDA_DEVICE_READ_H_

#include <cuda_runtime_api.h>

#include <functional>
#include <memory>

#include "cuda/device_staging.h"
#include "ffi/rdma_read.h"

namespace gear_jax {

// Enqueues a read whose results, and `here`, are the device's: the reader brings the regions into page-locked memory,
// while the stream waits; then they are copied. `ended` runs on a thread of
// CUDA's, when all is there or lost.
StagingFault EnqueueRegionsRead(RegionsCall call, std::shared_ptr<transport::Reader> reader,
                                std::function<void(const ReadRegions&)> ended, cudaStream_t stream);

}  // namespace gear_jax

#endif  // GEAR_JAX_CUDA_DEVICE_READ_H_
