// What the threads of the kernel of zeros do. Plain code, so that the CPU's tests run it too.
#ifndef GEAR_JAX_CUDA_ZEROS_DEVICE_H_
#define GEAR_JAX_CUDA_ZEROS_DEVICE_H_

#include <cstdint>

#include "cuda/chunk.h"
#include "ffi/host_device.h"

namespace gear_jax {

// Zeroes the share of thread `thread` of `threads` of them: 16 bytes at a time where they are aligned, neighbours
// beside each other, and the bytes before and behind one by one.
GEAR_JAX_HD inline void ZeroShare(uint8_t* data, int64_t bytes, int64_t thread, int64_t threads) {
  const int64_t to_aligned = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(data) & 15);
  const int64_t head = to_aligned < bytes ? to_aligned : bytes;
  const int64_t chunks = (bytes - head) / 16, behind = head + 16 * chunks;
  Chunk16* chunk = reinterpret_cast<Chunk16*>(data + head);
  for (int64_t i = thread; i < chunks; i += threads) chunk[i] = Chunk16{};
  for (int64_t i = thread; i < head; i += threads) data[i] = 0;
  for (int64_t i = behind + thread; i < bytes; i += threads) data[i] = 0;
}

}  // namespace gear_jax

#endif  // GEAR_JAX_CUDA_ZEROS_DEVICE_H_
