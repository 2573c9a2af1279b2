#include "ffi/staging.h"

#include <algorithm>
#include <cstdlib>
#include <random>

namespace gear_jax {
namespace {

int64_t RoundUp(int64_t bytes) {
  return (bytes + StagingLayout::kAlign - 1) / StagingLayout::kAlign * StagingLayout::kAlign;
}

}  // namespace

int32_t NewStagingOwner() {
  std::random_device random;
  for (;;) {
    if (const int32_t number = static_cast<int32_t>(random())) return number;
  }
}

StagingLayout::StagingLayout(const std::vector<int64_t>& part_bytes) {
  for (const int64_t part : part_bytes) {
    offset.push_back(bytes);
    bytes += RoundUp(part);
  }
}

RetiredQueues& RetiredQueues::Global() {
  static RetiredQueues* const retired = new RetiredQueues;
  return *retired;
}

void RetiredQueues::Add(int64_t queue) {
  const std::lock_guard<std::mutex> lock(mutex_);
  queues_.insert(queue);
}

void RetiredQueues::Remove(int64_t queue) {
  const std::lock_guard<std::mutex> lock(mutex_);
  queues_.erase(queue);
}

bool RetiredQueues::Contains(int64_t queue) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return queues_.count(queue) > 0;
}

struct HostStaging::Block {
  explicit Block(int64_t bytes)
      : capacity(std::max(RoundUp(bytes), StagingLayout::kAlign)),
        data(static_cast<uint8_t*>(std::aligned_alloc(StagingLayout::kAlign, capacity)), &std::free) {}

  const int64_t capacity;
  const std::unique_ptr<uint8_t, void (*)(void*)> data;
  int64_t leases = 0;  // guarded by the staging's mutex, so that who finds 0 sees all that was written
};

HostStaging::Lease::~Lease() {
  if (block_ == nullptr) return;
  const std::lock_guard<std::mutex> lock(staging_->mutex_);
  --block_->leases;
}

uint8_t* HostStaging::Lease::data() const { return block_->data.get(); }

HostStaging& HostStaging::Global() {
  static HostStaging* const staging = new HostStaging;
  return *staging;
}

HostStaging::Started HostStaging::Start(int64_t queue, int32_t device, int64_t depth, int64_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  RetiredQueues::Global().Remove(queue);
  const auto retired = [&](int64_t q, int32_t d) { return d == device && RetiredQueues::Global().Contains(q); };
  const auto drop = [&](Entry& entry) {
    if (entry.block != nullptr) held_ -= entry.block->capacity;
    entry = Entry{};
  };
  queues_.Release(retired, [&](int32_t, Entry& entry) { drop(entry); });
  const auto claim = queues_.Next(queue, device, depth);
  Entry& entry = *claim.entry;
  entry.sequence = 0;
  // Somebody may still be writing the data that is dropped, or copying it out.
  if (entry.block != nullptr && (entry.block->leases > 0 || entry.block->capacity < bytes)) drop(entry);
  if (entry.block == nullptr) {
    auto block = std::make_shared<Block>(bytes);
    if (block->data == nullptr) return {};
    held_ += block->capacity;
    entry.block = std::move(block);
  }
  entry.sequence = claim.sequence;
  entry.bytes = bytes;
  entry.device = device;
  ++entry.block->leases;
  return {{claim.number, claim.sequence, owner_}, Lease(this, entry.block)};
}

HostStaging::Lease HostStaging::Finish(const StagingHandle& handle, int32_t device, int64_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Entry* const entry = handle.owner == owner_ ? queues_.Find(handle.entry) : nullptr;
  if (entry == nullptr || handle.sequence == 0 || entry->sequence != handle.sequence) return {};
  if (entry->device != device || entry->bytes != bytes) return {};
  entry->sequence = 0;
  ++entry->block->leases;
  return Lease(this, entry->block);
}

void HostStaging::Release(int64_t queue) {
  const std::lock_guard<std::mutex> lock(mutex_);
  queues_.Release([&](int64_t q, int32_t) { return q == queue; },
                  [&](int32_t, Entry& entry) {
                    if (entry.block != nullptr) held_ -= entry.block->capacity;
                    entry = Entry{};
                  });
}

int64_t HostStaging::bytes() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return held_;
}

}  // namespace gear_jax
