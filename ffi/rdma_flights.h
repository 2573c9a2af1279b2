// Fetches between their start and their end: memory for what travels, and who waits for it. The core, without XLA.
#ifndef GEAR_JAX_FFI_RDMA_FLIGHTS_H_
#define GEAR_JAX_FFI_RDMA_FLIGHTS_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "ffi/rdma_fetch.h"
#include "ffi/staged_gather.h"
#include "ffi/staging.h"

namespace gear_jax {

// One fetch in flight. It has memory of its own for the results, and copies of the rows: XLA may reuse theirs.
class FetchFlight {
 public:
  FetchFlight(FetchCall call, bool error_on_loss);

  // The call, into this memory.
  const FetchCall& call() const { return call_; }
  bool error_on_loss() const { return error_on_loss_; }
  void Holds(std::shared_ptr<Fetch> fetch) { fetch_ = std::move(fetch); }
  Fetch& fetch() { return *fetch_; }

  bool Fits(const std::vector<StagedPart>& parts) const;

  // The fetch has ended.
  void Land();

  // Has `then` run when it has; false: it has already, and `then` does not run. Once.
  bool WhenLanded(std::function<void()> then);

  void CopyOut(const std::vector<StagedPart>& parts) const;

 private:
  FetchCall call_;
  const bool error_on_loss_;
  std::vector<int32_t> shard_, slot_, anchor_, length_;
  std::vector<uint32_t> generation_;
  std::vector<int64_t> part_bytes_;
  std::vector<std::unique_ptr<uint8_t[]>> parts_;
  std::shared_ptr<Fetch> fetch_;
  std::mutex mutex_;
  bool landed_ = false;
  std::function<void()> then_;
};

// The flights of each queue on each device, by the handles that XLA gets. Thread-safe.
class FetchFlights {
 public:
  // The one of the process; it is never destroyed, because calls may be on their way when the process ends.
  static FetchFlights& Global();

  FetchFlights() : owner_(NewStagingOwner()) {}

  // A queue of depth d has d flights at most: one more drops the oldest.
  StagingHandle Add(int64_t queue, int32_t device, int64_t depth, std::shared_ptr<FetchFlight> flight);

  // The flight that a handle names, once; null if the handle is stale, or of another device, or names other parts.
  std::shared_ptr<FetchFlight> Take(const StagingHandle& handle, int32_t device, const std::vector<StagedPart>& parts);

  // Drops what a queue has on every device.
  void Release(int64_t queue);

 private:
  struct Entry {
    int64_t sequence;
    std::shared_ptr<FetchFlight> flight;
  };

  const int32_t owner_;
  std::mutex mutex_;
  int64_t sequence_ = 0;
  std::map<std::pair<int64_t, int32_t>, std::deque<Entry>> queues_;
};

}  // namespace gear_jax

#endif  // GEAR_JAX_FFI_RDMA_FLIGHTS_H_
