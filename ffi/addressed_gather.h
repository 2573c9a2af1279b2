// A gather on the CPU of columns that are given by address.
#ifndef GEAR_JAX_FFI_ADDRESSED_GATHER_H_
#define GEAR_JAX_FFI_ADDRESSED_GATHER_H_

#include <atomic>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "ffi/gather.h"
#include "ffi/memory_registry.h"

namespace gear_jax {

using Leases = std::vector<MemoryRegistry::Lease>;

// Whether a column of the call is given by address.
bool IsAddressed(const GatherCall& call);

// Points the columns that are given by address to their tables, which stay while the leases are held. Returns what is
// wrong with an address, or nothing.
std::string FindTables(MemoryRegistry& registry, GatherCall& call, Leases& leases);

// Holds on to its tables until the last task has run.
class AddressedGather : public Gather {
 public:
  AddressedGather(GatherCall call, Leases leases) : Gather(std::move(call)), leases_(std::move(leases)) {}

  void Run(int64_t task) override;

 private:
  std::atomic<int64_t> ran_{0};
  Leases leases_;
};

}  // namespace gear_jax

#endif  // GEAR_JAX_FFI_ADDRESSED_GATHER_H_
