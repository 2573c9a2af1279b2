#include "ffi/memory_registry.h"

#include <utility>

#include "ffi/staging.h"

namespace gear_jax {

std::string AddressFaultText(const std::string& what, AddressFault fault, int64_t have, int64_t bytes) {
  const auto text = [&](const std::string& got, const std::string& wanted, const char* fix) {
    return what + ": got " + got + ", wanted " + wanted + ". " + fix;
  };
  switch (fault) {
    case AddressFault::kForeign:
      return text(
          "an address that no memory of this process has", "one that gear_jax.external gave out here",
          "Take the addresses again: they can be neither saved nor sent to another process, and on a GPU those of "
          "memory of the CPU are none (take those of an array in pinned_host, or pass device=).");
    case AddressFault::kFreed:
      return text("the address of a table that was closed or freed", "one of a table that is still there",
                  "Keep the External, or the Addresses, until the last gather has run; take the addresses of the next "
                  "table anew (for a GPU those of an array in pinned_host: memory of the CPU has none there).");
    case AddressFault::kSmall:
      return text("the address of " + (have < 0 ? "fewer" : std::to_string(have)) + " bytes",
                  bytes < 0 ? "all that the column has" : std::to_string(bytes),
                  "Pass Addresses as gear_jax.external made them, with their own shape and dtype.");
    case AddressFault::kMisaligned:
      return text("the address of memory that begins elsewhere", "the alignment that the Addresses say",
                  "Pass Addresses as gear_jax.external made them.");
    case AddressFault::kNone:
      break;
  }
  return "";
}

MemoryRegistry::Lease::~Lease() {
  if (registry_ == nullptr) return;
  const std::lock_guard<std::mutex> lock(registry_->mutex_);
  // Under the lock: who waits may otherwise go on and take the registry away.
  if (--registry_->readers_[entry_] == 0) registry_->left_.notify_all();
}

MemoryRegistry& MemoryRegistry::Global() {
  static MemoryRegistry* const registry = new MemoryRegistry;
  return *registry;
}

MemoryRegistry::MemoryRegistry() : owner_(NewStagingOwner()) {}

Address MemoryRegistry::Add(const void* base, int64_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (unused_.empty()) {
    unused_.push_back(static_cast<int32_t>(entries_.size()));
    entries_.emplace_back();
    readers_.push_back(0);
  }
  const int32_t entry = unused_.back();
  unused_.pop_back();
  entries_[entry] = {static_cast<const uint8_t*>(base), bytes, ++sequence_};
  return {entry, sequence_, owner_};
}

bool MemoryRegistry::Remove(const Address& address) {
  std::unique_lock<std::mutex> lock(mutex_);
  AddressFault fault;
  const int64_t count = static_cast<int64_t>(entries_.size());
  if (FindMemory(entries_.data(), count, owner_, address, 0, &fault) == nullptr) return false;
  entries_[address.entry] = RegisteredMemory{};
  left_.wait(lock, [&] { return readers_[address.entry] == 0; });
  unused_.push_back(address.entry);
  return true;
}

MemoryRegistry::Found MemoryRegistry::Find(const Address& address, int64_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Found found;
  const int64_t count = static_cast<int64_t>(entries_.size());
  const RegisteredMemory* const memory = FindMemory(entries_.data(), count, owner_, address, bytes, &found.fault);
  if (memory == nullptr) {
    if (found.fault == AddressFault::kSmall) found.bytes = entries_[address.entry].bytes;
    return found;
  }
  ++readers_[address.entry];
  return {AddressFault::kNone, memory->base, memory->bytes, Lease(this, address.entry)};
}

}  // namespace gear_jax
