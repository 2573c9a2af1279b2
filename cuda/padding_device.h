// What a thread of the kernel of padding does. Plain code, so that the CPU's tests run it too.
#ifndef GEAR_JAX_CUDA_PADDING_DEVICE_H_
#define GEAR_JAX_CUDA_PADDING_DEVICE_H_

#include <cstdint>

#include "cuda/chunk.h"
#include "ffi/gather_engine.h"

namespace gear_jax {

// The chunks of 16 bytes that hold a range.
GEAR_JAX_HD inline int64_t PadChunks(const PadRange& range) {
  return range.bytes == 0 ? 0
                          : (static_cast<int64_t>(reinterpret_cast<uintptr_t>(range.out) % 16) + range.bytes + 15) / 16;
}

// Chunk k of a range, nothing of which comes from a source.
GEAR_JAX_HD inline ChunkPlan PlanPadding(const PadRange& range, int64_t k) {
  return PlanChunk(range.out, range.bytes, nullptr, 0, 0, k);
}

}  // namespace gear_jax

#endif  // GEAR_JAX_CUDA_PADDING_DEVICE_H_
