// The order in which a gather reads its rows.
//
// Small rows are bound by the translation of their addresses, not by their bytes: a GPU translates about 31 million
// random addresses of host memory a second. Rows in the order of their slots share translations.
#ifndef GEAR_JAX_CUDA_ORDER_KERNELS_H_
#define GEAR_JAX_CUDA_ORDER_KERNELS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ffi/gather.h"

namespace gear_jax {

// An order of the rows in which slots ascend, coarsely: up to kOrderRanges ranges of slots follow each other, and
// within one the rows come as they like. `order`: [rows + kOrderRanges], the order and then scratch. Rows outside [0,
// slots) count as slot 0. Four kernels; neither allocates nor waits.
cudaError_t LaunchOrder(const int32_t* slot, int64_t rows, int64_t slots, int32_t* order, cudaStream_t stream);

}  // namespace gear_jax

#endif  // GEAR_JAX_CUDA_ORDER_KERNELS_H_
