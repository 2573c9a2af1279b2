// How a gather kernel finds the tables of columns that are given by address. Plain code, so that the CPU's tests run
// it.
#ifndef GEAR_JAX_CUDA_ADDRESS_DEVICE_H_
#define GEAR_JAX_CUDA_ADDRESS_DEVICE_H_

#include <cstdint>

#include "ffi/address.h"
#include "ffi/host_device.h"

namespace gear_jax {

// The memory that has addresses, as the kernels of one device see it.
struct RegistryView {
  const RegisteredMemory* entries = nullptr;  // of the device
  int64_t count = 0;
  int32_t owner = 0;
  uint64_t* fault = nullptr;  // of the host, mapped: a fault for the next call to report, or 0
};

// A fault as one word, so that a kernel's store and the host's load are each one piece.
GEAR_JAX_HD inline uint64_t PackFault(AddressFault fault, int32_t column) {
  return static_cast<uint64_t>(static_cast<uint32_t>(column)) << 32 | static_cast<uint32_t>(fault);
}
inline AddressFault FaultOf(uint64_t packed) { return static_cast<AddressFault>(static_cast<uint32_t>(packed)); }
inline int32_t ColumnOf(uint64_t packed) { return static_cast<int32_t>(packed >> 32); }

// Where the table begins that an address (uint32[4]) names, or null with a fault. `alignment`: what it must be a
// multiple of.
GEAR_JAX_HD inline const uint8_t* FindTable(const RegistryView& registry, const uint32_t* address, int64_t bytes,
                                            uint32_t alignment, AddressFault* fault) {
  const RegisteredMemory* const memory =
      FindMemory(registry.entries, registry.count, registry.owner, Address::Read(address), bytes, fault);
  if (memory == nullptr) return nullptr;
  const uint8_t* const base = memory->base;
  if (reinterpret_cast<uintptr_t>(base) % alignment != 0) {
    *fault = AddressFault::kMisaligned;
    return nullptr;
  }
  return base;
}

}  // namespace gear_jax

#endif  // GEAR_JAX_CUDA_ADDRESS_DEVICE_H_
