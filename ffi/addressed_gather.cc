#include "ffi/addressed_gather.h"

#include <algorithm>

namespace gear_jax {

bool IsAddressed(const GatherCall& call) {
  return std::any_of(call.columns.begin(), call.columns.end(), [](const auto& c) { return c.address != nullptr; });
}

std::string FindTables(MemoryRegistry& registry, GatherCall& call, Leases& leases) {
  for (size_t k = 0; k < call.columns.size(); ++k) {
    GatherColumn& column = call.columns[k];
    if (column.address == nullptr) continue;
    const int64_t bytes = call.slots * call.steps * column.step_bytes;
    auto found = registry.Find(Address::Read(column.address), bytes);
    if (found.fault != AddressFault::kNone) {
      return AddressFaultText("gather: columns[" + std::to_string(k) + "]", found.fault, found.bytes, bytes);
    }
    column.table = found.base;
    leases.push_back(std::move(found.lease));
  }
  return "";
}

void AddressedGather::Run(int64_t task) {
  Gather::Run(task);
  // With the last task, not with the last thread that holds on to this.
  if (ran_.fetch_add(1, std::memory_order_acq_rel) + 1 == size()) leases_.clear();
}

}  // namespace gear_jax
