// A transport between vectors, which does what a test tells it to.
#ifndef GEAR_JAX_FFI_TESTS_FAKE_TRANSPORT_H_
#define GEAR_JAX_FFI_TESTS_FAKE_TRANSPORT_H_

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "ffi/transport/transport.h"

namespace gear_jax::transport {

// What a peer does with a read.
struct Behaviour {
  double delay = 0;         // seconds until it answers
  bool silent = false;      // it never answers
  bool refuses = false;     // kRefused
  bool breaks = false;      // kLost
  double flush_delay = 0;   // seconds from Disconnect to the end of what is under way; infinite: it never ends
  uint32_t room = 1 << 30;  // reads under way at most
};

// What a test and its fake share; the fake dies with its session.
struct FakeWorld {
  std::map<int32_t, std::vector<std::vector<uint8_t>>> memory;  // peer -> regions
  std::map<int32_t, std::shared_ptr<const NearMemory>> near;    // peers that any thread may read
  uint64_t max_read = uint64_t{1} << 31;
  std::atomic<bool> reorders{false};

  std::mutex mutex;
  std::map<int32_t, Behaviour> behaviour;
  std::vector<std::pair<int32_t, uint32_t>> posts;  // peer, bytes
  uint32_t most_under_way = 0;                      // of any peer
  std::atomic<int> disconnects{0}, strays{0};
  std::atomic<bool> destroyed{false};

  void Set(int32_t peer, Behaviour b) {
    const std::lock_guard<std::mutex> lock(mutex);
    behaviour[peer] = b;
  }
  Behaviour Get(int32_t peer) {
    const std::lock_guard<std::mutex> lock(mutex);
    return behaviour[peer];
  }
  size_t Posted(int32_t peer) {
    const std::lock_guard<std::mutex> lock(mutex);
    return static_cast<size_t>(std::count_if(posts.begin(), posts.end(), [&](auto& p) { return p.first == peer; }));
  }
};

class FakeTransport final : public Transport {
 public:
  explicit FakeTransport(FakeWorld* world) : world_(world) {}
  ~FakeTransport() override {
    if (!reads_.empty()) ++world_->strays;
    world_->destroyed = true;
  }

  std::string_view name() const override { return "fake"; }
  Capabilities capabilities() const override { return {world_->max_read, true, false}; }

  std::vector<uint8_t> Offer(int32_t peer, std::string* error) override {
    SameThread();
    if (peer == 99) {
      *error = "no such peer";
      return {};
    }
    return {static_cast<uint8_t>(peer)};
  }

  std::string Connect(int32_t peer, const uint8_t* blob, size_t bytes, std::vector<RemoteRegion>) override {
    SameThread();
    if (bytes != 1 || blob[0] != peer) return "blob: got rubbish";
    for (const Pending& read : reads_) {
      if (read.peer == peer) ++world_->strays;  // connected before its reads had ended
    }
    connected_[peer] = true;
    return "";
  }

  void Disconnect(int32_t peer) override {
    SameThread();
    ++world_->disconnects;
    connected_[peer] = false;
    for (Pending& read : reads_) {
      if (read.peer != peer) continue;
      const double delay = world_->Get(peer).flush_delay;
      read.flushed = !std::isinf(delay);
      if (read.flushed) read.when = Clock::now() + Seconds(delay);
    }
  }

  std::shared_ptr<const NearMemory> Near(int32_t peer) const override {
    const auto found = world_->near.find(peer);
    return found == world_->near.end() ? nullptr : found->second;
  }

  bool Post(int32_t peer, int32_t region, uint64_t offset, uint32_t bytes, void* to, uint64_t cookie) override {
    SameThread();
    if (!connected_[peer] || bytes == 0 || bytes > world_->max_read) ++world_->strays;
    const Behaviour b = world_->Get(peer);
    const auto under_way = static_cast<uint32_t>(
        std::count_if(reads_.begin(), reads_.end(), [&](const Pending& r) { return r.peer == peer; }));
    if (under_way >= b.room) return false;
    reads_.push_back({peer, region, offset, bytes, to, cookie, Clock::now() + Seconds(b.delay), false});
    const std::lock_guard<std::mutex> lock(world_->mutex);
    world_->posts.emplace_back(peer, bytes);
    world_->most_under_way = std::max(world_->most_under_way, under_way + 1);
    return true;
  }

  // Memory is written as late as it may be: when the read ends, and in part also where it fails.
  size_t Poll(Completion* completions, size_t max) override {
    SameThread();
    if (world_->reorders) std::shuffle(reads_.begin(), reads_.end(), random_);
    size_t count = 0;
    const auto now = Clock::now();
    for (size_t i = 0; i < reads_.size() && count < max;) {
      const Pending read = reads_[i];
      const Behaviour b = world_->Get(read.peer);
      if (read.when > now || (b.silent && !read.flushed)) {
        ++i;
        continue;
      }
      const Status status = read.flushed ? Status::kLost
                            : b.refuses  ? Status::kRefused
                            : b.breaks   ? Status::kLost
                                         : Status::kOk;
      const auto& region = world_->memory[read.peer][static_cast<size_t>(read.region)];
      std::memcpy(read.to, region.data() + read.offset, status == Status::kOk ? read.bytes : (read.bytes + 1) / 2);
      completions[count++] = {read.cookie, status};
      reads_.erase(reads_.begin() + static_cast<std::ptrdiff_t>(i));
    }
    return count;
  }

  void Wait(double seconds) override {
    SameThread();
    auto until = Clock::now() + Seconds(std::min(seconds, 5.0));
    for (const Pending& read : reads_) {
      if (read.flushed || !world_->Get(read.peer).silent) until = std::min(until, read.when);
    }
    std::unique_lock<std::mutex> lock(wake_);
    woken_.wait_until(lock, until, [&]() { return wakes_; });
    wakes_ = false;
  }

  void Wake() override {
    const std::lock_guard<std::mutex> lock(wake_);
    wakes_ = true;
    woken_.notify_all();
  }

 private:
  using Clock = std::chrono::steady_clock;
  struct Pending {
    int32_t peer, region;
    uint64_t offset;
    uint32_t bytes;
    void* to;
    uint64_t cookie;
    Clock::time_point when;
    bool flushed;
  };

  static Clock::duration Seconds(double s) {
    return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(s));
  }

  void SameThread() {
    if (thread_ == std::thread::id()) thread_ = std::this_thread::get_id();
    if (thread_ != std::this_thread::get_id()) ++world_->strays;
  }

  FakeWorld* const world_;
  std::thread::id thread_;
  std::map<int32_t, bool> connected_;
  std::vector<Pending> reads_;
  std::mt19937 random_{1};
  std::mutex wake_;
  std::condition_variable woken_;
  bool wakes_ = false;
};

}  // namespace gear_jax::transport

#endif  // GEAR_JAX_FFI_TESTS_FAKE_TRANSPORT_H_
