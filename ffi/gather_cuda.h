// What the CUDA handlers of a gather share.
#ifndef GEAR_JAX_FFI_GATHER_CUDA_H_
#define GEAR_JAX_FFI_GATHER_CUDA_H_

#include <cuda_runtime_api.h>

#include <string>

#include "ffi/gather.h"
#include "xla/ffi/api/ffi.h"

namespace gear_jax {

// A call's sizes, for messages.
std::string Sizes(const GatherCall& call);

// Looks at the rows on the host: for finding faults, not for speed.
xla::ffi::Error CheckOnHost(GatherCall call, cudaStream_t stream);

}  // namespace gear_jax

#endif  // GEAR_JAX_FFI_GATHER_CUDA_H_
