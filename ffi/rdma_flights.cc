#include "ffi/rdma_flights.h"

#include <algorithm>
#include <cstring>

namespace gear_jax {

FetchFlight::FetchFlight(FetchCall call, bool error_on_loss)
    : call_(std::move(call)), error_on_loss_(error_on_loss), part_bytes_(PartBytes(call_)) {
  GatherCall& gather = call_.gather;
  const auto keep = [&](auto& own, auto*& from) {
    own.assign(from, from + gather.rows);
    from = own.data();
  };
  keep(shard_, call_.shard);
  keep(slot_, gather.slot);
  keep(anchor_, gather.anchor);
  keep(length_, gather.length);
  if (call_.generation != nullptr) keep(generation_, call_.generation);
  std::vector<uint8_t*> places;
  for (const int64_t bytes : part_bytes_) {
    parts_.emplace_back(new uint8_t[bytes]);
    places.push_back(parts_.back().get());
  }
  PlaceParts(call_, places);
}

bool FetchFlight::Fits(const std::vector<StagedPart>& parts) const {
  return std::equal(parts.begin(), parts.end(), part_bytes_.begin(), part_bytes_.end(),
                    [](const StagedPart& part, int64_t bytes) { return part.bytes == bytes; });
}

void FetchFlight::Land() {
  std::function<void()> then;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    landed_ = true;
    then = std::move(then_);
    then_ = nullptr;
  }
  if (then) then();
}

bool FetchFlight::WhenLanded(std::function<void()> then) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (landed_) return false;
  then_ = std::move(then);
  return true;
}

void FetchFlight::CopyOut(const std::vector<StagedPart>& parts) const {
  for (size_t i = 0; i < parts.size(); ++i) {
    if (parts[i].bytes > 0) std::memcpy(parts[i].out, parts_[i].get(), parts[i].bytes);
  }
}

FetchFlights& FetchFlights::Global() {
  static FetchFlights* flights = new FetchFlights;
  return *flights;
}

StagingHandle FetchFlights::Add(int64_t queue, int32_t device, int64_t depth, std::shared_ptr<FetchFlight> flight) {
  std::deque<Entry> dropped;  // freed outside the lock
  const std::lock_guard<std::mutex> lock(mutex_);
  std::deque<Entry>& entries = queues_[{queue, device}];
  while (!entries.empty() && static_cast<int64_t>(entries.size()) >= depth) {
    dropped.push_back(std::move(entries.front()));
    entries.pop_front();
  }
  entries.push_back({++sequence_, std::move(flight)});
  return {static_cast<int32_t>(queue), sequence_, owner_};
}

std::shared_ptr<FetchFlight> FetchFlights::Take(const StagingHandle& handle, int32_t device,
                                                const std::vector<StagedPart>& parts) {
  if (handle.owner != owner_) return nullptr;
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto queue = queues_.find({handle.entry, device});
  if (queue == queues_.end()) return nullptr;
  for (auto entry = queue->second.begin(); entry != queue->second.end(); ++entry) {
    if (entry->sequence != handle.sequence || !entry->flight->Fits(parts)) continue;
    auto flight = std::move(entry->flight);
    queue->second.erase(entry);
    return flight;
  }
  return nullptr;
}

void FetchFlights::Release(int64_t queue) {
  std::vector<std::deque<Entry>> dropped;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto it = queues_.begin(); it != queues_.end();) {
    if (it->first.first != queue) {
      ++it;
      continue;
    }
    dropped.push_back(std::move(it->second));
    it = queues_.erase(it);
  }
}

}  // namespace gear_jax
