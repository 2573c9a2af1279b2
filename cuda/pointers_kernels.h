// pointers on CUDA: words of pointers, written by the device.
#ifndef GEAR_JAX_CUDA_POINTERS_KERNELS_H_
#define GEAR_JAX_CUDA_POINTERS_KERNELS_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

namespace gear_jax {

// What a pointer to a shard is a multiple of: gather kernels read whole lines of it.
inline constexpr int64_t kPointerAlignment = 128;

// Whether the kernels of every GPU of the process can read memory where a pointer says: host memory, page-locked and at
// the same address for all.
cudaError_t IsReadByAll(const void* pointer, bool* is);

// Writes k pointers to `out`, uint32[k, 2], and hands the ticket on. What the stream wrote before is visible to other
// devices that see the words. One kernel for every 500 pointers; neither allocates nor waits.
cudaError_t LaunchPointers(const std::vector<const void*>& pointers, uint32_t* out, const int32_t* ticket,
                           int32_t* ticket_out, cudaStream_t stream);

// Loads this kernel on the current device, for launches behind a stream that waits (load_kernels.h).
cudaError_t LoadPointersKernels();

}  // namespace gear_jax

#endif  // GEAR_JAX_CUDA_POINTERS_KERNELS_H_
