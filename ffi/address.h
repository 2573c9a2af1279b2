// Addresses: numbers that name a table's memory to a gather. XLA gets no pointer, and numbers that have gone stale are
// recognised, on the host and in a kernel.
#ifndef GEAR_JAX_FFI_ADDRESS_H_
#define GEAR_JAX_FFI_ADDRESS_H_

#include <cstdint>

#include "ffi/host_device.h"

namespace gear_jax {

// What names memory, as uint32[4]. The words are part of the Python side (external/_registration.py) only as a whole.
struct Address {
  int32_t entry = 0;
  int64_t sequence = 0;  // the number of the registration, from 1 on; 0: none
  int32_t owner = 0;     // a random number of the process

  GEAR_JAX_HD static Address Read(const uint32_t* word) {
    const uint64_t low = word[1], high = word[2];
    return {static_cast<int32_t>(word[0]), static_cast<int64_t>(high << 32 | low), static_cast<int32_t>(word[3])};
  }
  GEAR_JAX_HD void Write(uint32_t* word) const {
    word[0] = static_cast<uint32_t>(entry);
    word[1] = static_cast<uint32_t>(static_cast<uint64_t>(sequence));
    word[2] = static_cast<uint32_t>(static_cast<uint64_t>(sequence) >> 32);
    word[3] = static_cast<uint32_t>(owner);
  }
};

// Memory that has an address.
struct RegisteredMemory {
  const uint8_t* base = nullptr;
  int64_t bytes = 0;
  int64_t sequence = 0;  // of its registration; 0: none, or it is gone
};

// Why an address leads nowhere.
enum class AddressFault : uint32_t {
  kNone = 0,
  kForeign = 1,     // nothing of this process ever had it
  kFreed = 2,       // what had it is gone
  kSmall = 3,       // what has it is smaller than the table
  kMisaligned = 4,  // what has it does not begin where its column says
};

// The entry of an address among `count`, which must hold a table of `bytes`. Null with a fault.
GEAR_JAX_HD inline const RegisteredMemory* FindMemory(const RegisteredMemory* entries, int64_t count, int32_t owner,
                                                      const Address& address, int64_t bytes, AddressFault* fault) {
  if (address.owner != owner || address.sequence <= 0 || address.entry < 0 || address.entry >= count) {
    *fault = AddressFault::kForeign;
    return nullptr;
  }
  const RegisteredMemory* const memory = entries + address.entry;
  *fault = memory->sequence != address.sequence ? AddressFault::kFreed
           : memory->bytes < bytes              ? AddressFault::kSmall
                                                : AddressFault::kNone;
  return *fault == AddressFault::kNone ? memory : nullptr;
}

}  // namespace gear_jax

#endif  // GEAR_JAX_FFI_ADDRESS_H_
