// The memory that gathers read by address. The core, without XLA and CUDA.
#ifndef GEAR_JAX_FFI_MEMORY_REGISTRY_H_
#define GEAR_JAX_FFI_MEMORY_REGISTRY_H_

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "ffi/address.h"

namespace gear_jax {

// What is wrong with an address, for the user: "<what>: got ..., wanted .... <fix>". `bytes`: those that the column
// needs; `have`: those that the address has; both only where the fault is kSmall.
std::string AddressFaultText(const std::string& what, AddressFault fault, int64_t have, int64_t bytes);

// Gives memory its addresses. Thread-safe. Add, Remove and Find take time that does not grow with the number of
// entries.
class MemoryRegistry {
 public:
  // Memory that is not given up while the lease is held.
  class Lease {
   public:
    Lease() = default;
    Lease(Lease&& other) noexcept : registry_(std::exchange(other.registry_, nullptr)), entry_(other.entry_) {}
    Lease& operator=(Lease&&) = delete;
    ~Lease();

   private:
    friend class MemoryRegistry;
    Lease(MemoryRegistry* registry, int32_t entry) : registry_(registry), entry_(entry) {}
    MemoryRegistry* registry_ = nullptr;
    int32_t entry_ = 0;
  };

  struct Found {
    AddressFault fault = AddressFault::kNone;
    const uint8_t* base = nullptr;
    int64_t bytes = 0;  // of the memory; with a fault, what the address has, or 0
    Lease lease;        // empty with a fault
  };

  // The one of the process; it is never destroyed, because calls may be on their way when the process ends.
  static MemoryRegistry& Global();

  MemoryRegistry();

  Address Add(const void* base, int64_t bytes);

  // Makes an address stale, then waits until nobody reads the memory. False: it is stale already.
  bool Remove(const Address& address);

  // The memory of an address, which must hold `bytes`.
  Found Find(const Address& address, int64_t bytes);

 private:
  std::mutex mutex_;
  std::condition_variable left_;  // a reader
  const int32_t owner_;
  int64_t sequence_ = 0;
  std::vector<RegisteredMemory> entries_;
  std::vector<int64_t> readers_;  // of each entry
  std::vector<int32_t> unused_;
};

}  // namespace gear_jax

#endif  // GEAR_JAX_FFI_MEMORY_REGISTRY_H_
