// gather on CUDA: one persistent grid for all columns, windows, padding and masks.
#ifndef GEAR_JAX_CUDA_GATHER_KERNELS_H_
#define GEAR_JAX_CUDA_GATHER_KERNELS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/address_device.h"
#include "ffi/gather.h"

namespace gear_jax {

// Shards that a table may be in: more than a host has GPUs.
inline constexpr int64_t kMostShards = 64;

struct GatherLaunch {
  int blocks = 0;                   // thread blocks of 512; 0: what fills every multiprocessor
  const int32_t* order = nullptr;   // [rows], a permutation (LaunchOrder): the order in which rows are read
  const int32_t* ticket = nullptr;  // [1], copied to ticket_out by the first launch
  int32_t* ticket_out = nullptr;
  RegistryView registry = {};  // where columns are given by address
};

// Reads the call's rows. All pointers are the device's, or those of mapped host memory. Enqueues one kernel for every
// 31 columns and masks; neither allocates nor waits. At most kMostShards shards.
cudaError_t LaunchGather(const GatherCall& call, const GatherLaunch& launch, cudaStream_t stream);

// Loads the kernels for `blocks` that are given, but for those of addressed columns, on the current device, for
// launches behind a stream that waits (load_kernels.h).
cudaError_t LoadGatherKernels();

}  // namespace gear_jax

#endif  // GEAR_JAX_CUDA_GATHER_KERNELS_H_
