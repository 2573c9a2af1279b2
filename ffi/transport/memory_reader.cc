#include "ffi/transport/memory_reader.h"

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <utility>

namespace gear_jax::transport {

struct MemoryReader::State {
  explicit State(std::vector<std::vector<MemoryRegion>> given) : regions(std::move(given)), alive(regions.size()) {
    for (auto& a : alive) a = true;
  }

  int32_t peers() const { return static_cast<int32_t>(regions.size()); }
  const MemoryRegion* Find(int32_t peer, int32_t region) const {
    if (peer < 0 || peer >= peers() || region < 0) return nullptr;
    return region < static_cast<int64_t>(regions[peer].size()) ? &regions[peer][region] : nullptr;
  }
  Status ReadOne(const Piece& piece) const;
  void Loop();

  const std::vector<std::vector<MemoryRegion>> regions;
  std::vector<std::atomic<bool>> alive;
  std::mutex mutex;
  std::condition_variable some;
  std::deque<std::pair<std::vector<Piece>, Done>> queue;
  bool closed = false;
};

MemoryReader::MemoryReader(int32_t self, std::vector<std::vector<MemoryRegion>> regions)
    : self_(self), state_(std::make_shared<State>(std::move(regions))), thread_([state = state_] { state->Loop(); }) {}

MemoryReader::~MemoryReader() {
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    state_->closed = true;
  }
  state_->some.notify_one();
  if (thread_.get_id() == std::this_thread::get_id()) {
    thread_.detach();  // a `done` held the last reference
  } else {
    thread_.join();
  }
}

int32_t MemoryReader::peers() const { return state_->peers(); }

bool MemoryReader::Alive(int32_t peer) const { return peer >= 0 && peer < peers() && state_->alive[peer]; }

void MemoryReader::SetAlive(int32_t peer, bool alive) {
  if (peer >= 0 && peer < peers()) state_->alive[peer] = alive;
}

uint64_t MemoryReader::RegionBytes(int32_t peer, int32_t region) const {
  const MemoryRegion* found = state_->Find(peer, region);
  return found ? found->bytes : 0;
}

const void* MemoryReader::OwnRegion(int32_t region) const {
  const MemoryRegion* found = state_->Find(self_, region);
  return found ? found->data : nullptr;
}

Status MemoryReader::State::ReadOne(const Piece& piece) const {
  const MemoryRegion* region = Find(piece.peer, piece.region);
  if (region == nullptr) return Status::kRefused;
  if (piece.offset > region->bytes || piece.bytes > region->bytes - piece.offset) return Status::kRefused;
  if (!alive[piece.peer]) return Status::kLost;
  if (piece.bytes > 0) {
    std::memcpy(piece.to, static_cast<const uint8_t*>(region->data) + piece.offset, piece.bytes);
  }
  return Status::kOk;
}

void MemoryReader::Read(std::vector<Piece> pieces, Done done) {
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    if (!state_->closed) {
      state_->queue.emplace_back(std::move(pieces), std::move(done));
      state_->some.notify_one();
      return;
    }
  }
  done(std::vector<Status>(pieces.size(), Status::kClosed));
}

void MemoryReader::State::Loop() {
  std::unique_lock<std::mutex> lock(mutex);
  for (;;) {
    some.wait(lock, [this] { return closed || !queue.empty(); });
    if (queue.empty()) return;
    auto [pieces, done] = std::move(queue.front());
    queue.pop_front();
    const bool ended = closed;
    lock.unlock();
    std::vector<Status> status(pieces.size(), Status::kClosed);
    for (size_t i = 0; i < pieces.size() && !ended; ++i) status[i] = ReadOne(pieces[i]);
    done(status);
    done = nullptr;
    lock.lock();
  }
}

}  // namespace gear_jax::transport
