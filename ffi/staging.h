// Staging: where the data of a gather lies between its start and its end. It is this library's own memory: XLA may
// copy, free or reuse its arrays in between. XLA gets numbers that name an entry, and stale numbers are recognised. The
// core, without XLA and CUDA.
#ifndef GEAR_JAX_FFI_STAGING_H_
#define GEAR_JAX_FFI_STAGING_H_

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "ffi/host_device.h"

namespace gear_jax {

// What a start hands to XLA and gets back at the end, as int32[4].
struct StagingHandle {
  int32_t entry = 0;
  int64_t sequence = 0;  // the number of the start, from 1 on; 0: none
  int32_t owner = 0;     // a random number of the process (and, on CUDA, the device)

  GEAR_JAX_HD static StagingHandle Read(const int32_t* word) {
    const uint64_t low = static_cast<uint32_t>(word[1]), high = static_cast<uint32_t>(word[2]);
    return {word[0], static_cast<int64_t>(high << 32 | low), word[3]};
  }
  GEAR_JAX_HD void Write(int32_t* word) const {
    word[0] = entry;
    word[1] = static_cast<int32_t>(static_cast<uint64_t>(sequence));
    word[2] = static_cast<int32_t>(static_cast<uint64_t>(sequence) >> 32);
    word[3] = owner;
  }
};

// A random number that is not 0.
int32_t NewStagingOwner();

// Where the parts of a gather's data lie in an entry's memory: one behind the other, each on a multiple of kAlign. The
// only place that says so; the start and the end go by the same sizes.
struct StagingLayout {
  static constexpr int64_t kAlign = 256;

  explicit StagingLayout(const std::vector<int64_t>& part_bytes);

  std::vector<int64_t> offset;
  int64_t bytes = 0;  // in all, a multiple of kAlign
};

// Queues that get no more starts. The next start on a device frees what they have there; not the retiring itself,
// because earlier calls may still be on their way.
class RetiredQueues {
 public:
  static RetiredQueues& Global();
  void Add(int64_t queue);
  void Remove(int64_t queue);  // a compiled program may outlive the object that held its queue, and start gathers again
  bool Contains(int64_t queue) const;

 private:
  mutable std::mutex mutex_;  // held for nothing that waits
  std::set<int64_t> queues_;
};

// The entries of each queue on each device: starts take them in turn, so that a queue of depth d has d starts in flight
// at most and the next one drops the oldest. Not synchronised.
template <typename Entry>
class StagingQueues {
 public:
  struct Claim {
    int32_t number = -1;  // -1: there are `limit` entries already
    int64_t sequence = 0;
    Entry* entry = nullptr;
  };

  explicit StagingQueues(int32_t limit) : limit_(limit) {}

  // The entry that the next start of a queue takes, among `depth` of them.
  Claim Next(int64_t queue, int32_t device, int64_t depth) {
    Ring& ring = rings_[{queue, device}];
    const size_t at = static_cast<size_t>(ring.starts % depth);
    while (ring.numbers.size() <= at) {
      const int32_t number = NewNumber();
      if (number < 0) return {};
      ring.numbers.push_back(number);
    }
    ++ring.starts;
    return {ring.numbers[at], ++sequence_, &entries_[ring.numbers[at]]};
  }

  // An entry by its number, or null.
  Entry* Find(int32_t number) {
    return number < 0 || number >= static_cast<int32_t>(entries_.size()) ? nullptr : &entries_[number];
  }

  // Gives up the entries of the queues that `wanted(queue, device)` picks. `free(number, entry)` resets each.
  template <typename Wanted, typename Free>
  void Release(Wanted&& wanted, Free&& free) {
    for (auto ring = rings_.begin(); ring != rings_.end();) {
      if (!wanted(ring->first.first, ring->first.second)) {
        ++ring;
        continue;
      }
      for (const int32_t number : ring->second.numbers) {
        free(number, entries_[number]);
        unused_.push_back(number);
      }
      ring = rings_.erase(ring);
    }
  }

 private:
  struct Ring {
    std::vector<int32_t> numbers;
    int64_t starts = 0;
  };

  int32_t NewNumber() {
    if (!unused_.empty()) {
      const int32_t number = unused_.back();
      unused_.pop_back();
      return number;
    }
    if (static_cast<int32_t>(entries_.size()) >= limit_) return -1;
    entries_.emplace_back();
    return static_cast<int32_t>(entries_.size()) - 1;
  }

  int32_t limit_;
  int64_t sequence_ = 0;
  std::map<std::pair<int64_t, int32_t>, Ring> rings_;
  std::deque<Entry> entries_;  // by number; they never move
  std::vector<int32_t> unused_;
};

// Staging in host memory, for all devices of the CPU. Thread-safe.
class HostStaging {
  struct Block;

 public:
  // Memory that nothing else uses while the lease is held.
  class Lease {
   public:
    Lease() = default;
    Lease(Lease&&) = default;
    Lease& operator=(Lease&&) = delete;
    ~Lease();
    explicit operator bool() const { return block_ != nullptr; }
    uint8_t* data() const;

   private:
    friend class HostStaging;
    Lease(HostStaging* staging, std::shared_ptr<Block> block) : staging_(staging), block_(std::move(block)) {}
    HostStaging* staging_ = nullptr;
    std::shared_ptr<Block> block_;
  };

  struct Started {
    StagingHandle handle;
    Lease lease;  // empty: there is no memory
  };

  // The one of the process; it is never destroyed, because calls may be on their way when the process ends.
  static HostStaging& Global();

  HostStaging() : owner_(NewStagingOwner()) {}

  // Memory for `bytes` of a start. What it has in this entry already is dropped.
  Started Start(int64_t queue, int32_t device, int64_t depth, int64_t bytes);

  // The memory that a handle names, once; an empty lease if the handle is stale, or of another device, or names another
  // number of bytes.
  Lease Finish(const StagingHandle& handle, int32_t device, int64_t bytes);

  // Frees what a queue has on every device. Its handles are stale from now on.
  void Release(int64_t queue);

  // Bytes that the entries hold.
  int64_t bytes();

 private:
  struct Entry {
    int64_t sequence = 0;  // of the start that filled it; 0: empty
    int64_t bytes = 0;
    int32_t device = 0;
    std::shared_ptr<Block> block;
  };

  std::mutex mutex_;
  const int32_t owner_;
  StagingQueues<Entry> queues_{INT32_MAX};
  int64_t held_ = 0;
};

}  // namespace gear_jax

#endif  // GEAR_JAX_FFI_STAGING_H_
