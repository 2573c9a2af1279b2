// pointers: where the memory of arrays begins, as words that a program can pass on. The core, without XLA.
#ifndef GEAR_JAX_FFI_POINTERS_H_
#define GEAR_JAX_FFI_POINTERS_H_

#include <cstdint>

#include "ffi/host_device.h"

namespace gear_jax {

// A pointer is two words, the high one first: XLA has no 64-bit integers unless the user asks for them.
GEAR_JAX_HD inline const uint8_t* ReadPointer(const uint32_t* word) {
  const uint64_t high = word[0], low = word[1];
  return reinterpret_cast<const uint8_t*>(static_cast<uintptr_t>(high << 32 | low));
}
GEAR_JAX_HD inline void WritePointer(const void* pointer, uint32_t* word) {
  const auto bits = static_cast<uint64_t>(reinterpret_cast<uintptr_t>(pointer));
  word[0] = static_cast<uint32_t>(bits >> 32);
  word[1] = static_cast<uint32_t>(bits);
}

}  // namespace gear_jax

#endif  // GEAR_JAX_FFI_POINTERS_H_
