// Remote reads with verbs (InfiniBand, RoCE): the reading side, behind MakeVerbs (transports.h). No XLA, no Python.
//
// libibverbs is opened at run time (verbs_library.h), so what is built with this loads where there is none. Each peer
// has several queue pairs of the kind RC. A read goes into registered memory of the transport's own, and its
// completion copies it to the caller's: nothing is ever registered for a read. A queue pair is spent after an error
// completion, and its peer with it: what is posted to the peer then ends as kLost until it is disconnected and
// connected anew.
#if __has_include(<infiniband/verbs.h>)

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ffi/transport/error_text.h"
#include "ffi/transport/transports.h"
#include "ffi/transport/verbs_blob.h"
#include "ffi/transport/verbs_device.h"
#include "ffi/transport/verbs_library.h"
#include "ffi/transport/verbs_peer.h"

namespace gear_jax::transport {
namespace {

// A few large reads keep any link busy; more at a time only stall a slow one. Small reads are bounded by their number.
constexpr uint32_t kChunk = 256 << 10;
constexpr uint32_t kWindow = 4;
constexpr uint32_t kReads = 16;
constexpr int kCompletions = 4096;  // under way to all peers together
constexpr int32_t kMaxPeers = 1 << 20;
constexpr int kBatch = 32;

std::string CheckOptions(const Options& o) {
  const auto bad = [](const char* what, int64_t got, const char* wanted) {
    return ErrorText(std::string("verbs: ") + what, got, wanted, "Correct the option.");
  };
  if (o.queue_pairs < 1 || o.queue_pairs > kMaxQueuePairs) return bad("queue_pairs", o.queue_pairs, "1 ... 64");
  if (o.port < 1 || o.port > 255) return bad("port", o.port, "1 ... 255");
  if (o.gid_index < -1 || o.gid_index > 255) return bad("gid_index", o.gid_index, "-1 (automatic) ... 255");
  if (o.mtu != 0 && !IsMtu(o.mtu)) return bad("mtu", o.mtu, "0 (the port's), 256, 512, 1024, 2048 or 4096");
  if (o.traffic_class > 255) return bad("traffic_class", o.traffic_class, "0 ... 255");
  if (o.retries > 7) return bad("retries", o.retries, "0 ... 7");
  if (o.ack_timeout < 1 || o.ack_timeout > 31) return bad("ack_timeout", o.ack_timeout, "1 ... 31");
  if (o.chunk > 1u << 30) return bad("chunk", o.chunk, "0 (256 KiB) ... 2^30 bytes");
  if (o.window > 4096) return bad("window", o.window, "0 (4) ... 4096");
  return "";
}

class Verbs final : public Transport {
 public:
  Verbs() = default;

  ~Verbs() override {
    peers_.clear();
    const VerbsLibrary* library = context_.library;
    if (context_.completions != nullptr) library->destroy_cq(context_.completions);
    if (context_.channel != nullptr) library->destroy_comp_channel(context_.channel);
    if (context_.domain != nullptr) library->dealloc_pd(context_.domain);
    if (context_.device.context != nullptr) library->close_device(context_.device.context);
    if (wake_ >= 0) close(wake_);
  }

  std::string Open(const Options& options) {
    std::string error = CheckOptions(options);
    if (!error.empty()) return error;
    context_.library = OpenVerbsLibrary(&error);
    if (context_.library == nullptr) return error;
    context_.options = options;
    error = OpenVerbsDevice(*context_.library, options, &context_.device);
    if (!error.empty()) return error;
    SetBounds(options);
    const VerbsLibrary& library = *context_.library;
    const auto failed = [](const char* what) {
      return ErrorText(std::string("verbs: ") + what, std::strerror(errno), "success",
                       "`python -m gear_jax doctor` shows the device and its limits.");
    };
    context_.domain = library.alloc_pd(context_.device.context);
    if (context_.domain == nullptr) return failed("making a protection domain");
    context_.channel = library.create_comp_channel(context_.device.context);
    if (context_.channel == nullptr) return failed("making a completion channel");
    fcntl(context_.channel->fd, F_SETFL, fcntl(context_.channel->fd, F_GETFL) | O_NONBLOCK);
    completions_ = std::min(kCompletions, context_.device.limits.max_cqe);
    context_.completions = library.create_cq(context_.device.context, completions_, nullptr, context_.channel, 0);
    if (context_.completions == nullptr) return failed("making a completion queue");
    wake_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (wake_ < 0) return failed("making an eventfd");
    return "";
  }

  std::string_view name() const override { return "verbs"; }
  Capabilities capabilities() const override { return {context_.chunk, true, false}; }

  std::vector<uint8_t> Offer(int32_t peer, std::string* error) override {
    if (peer < 0 || peer >= kMaxPeers) {
      *error = ErrorText("verbs: peer", peer, "0 or more", "Name one of the job's.");
      return {};
    }
    if (static_cast<size_t>(peer) >= peers_.size()) peers_.resize(peer + 1);
    if (peers_[peer] == nullptr) peers_[peer] = std::make_unique<VerbsPeer>(&context_);
    VerbsEnd mine;
    *error = peers_[peer]->Prepare(&mine);
    if (!error->empty()) return {};
    return EncodeVerbsEnd(mine);
  }

  std::string Connect(int32_t peer, const uint8_t* blob, size_t bytes, std::vector<RemoteRegion> regions) override {
    VerbsEnd theirs;
    std::string error = DecodeVerbsEnd(blob, bytes, &theirs);
    if (!error.empty()) return error;
    VerbsPeer* const connecting = Find(peer);
    if (connecting == nullptr || !connecting->prepared()) {
      return ErrorText("verbs: Connect to peer " + std::to_string(peer), "an answer without an offer",
                       "an answer to the last offer", "Call Offer first.");
    }
    Disconnect(peer);
    error = connecting->Connect(theirs, std::move(regions), &serial_);
    for (size_t i = 0; i < connecting->queue_pairs(); ++i) pairs_[connecting->serial(i)] = {peer, i};
    return error;
  }

  void Disconnect(int32_t peer) override {
    if (Find(peer) == nullptr) return;
    VerbsPeer& dropped = *peers_[peer];
    Collect();  // what has come in by now counts
    for (size_t i = 0; i < dropped.queue_pairs(); ++i) pairs_.erase(dropped.serial(i));
    const size_t before = ended_.size();
    dropped.Drop(&ended_);
    under_way_ -= ended_.size() - before;
    Collect();  // what the queue still holds of the dropped queue pairs is thrown away, and its room is free again
  }

  bool Post(int32_t peer, int32_t region, uint64_t offset, uint32_t bytes, void* to, uint64_t cookie) override {
    VerbsPeer* const from = Find(peer);
    if (from == nullptr || !from->connected() || from->spent()) {
      ended_.push_back({cookie, Status::kLost});
      return true;
    }
    if (region < 0 || static_cast<size_t>(region) >= from->regions() || bytes == 0 || bytes > context_.chunk) {
      ended_.push_back({cookie, Status::kRefused});
      return true;
    }
    if (under_way_ >= static_cast<uint64_t>(completions_)) return false;
    if (from->Post(region, offset, bytes, to, cookie)) {
      ++under_way_;
      return true;
    }
    if (!from->spent()) return false;
    ended_.push_back({cookie, Status::kLost});
    return true;
  }

  size_t Poll(Completion* completions, size_t max) override {
    if (ended_.size() < max) Collect();
    const size_t count = std::min(max, ended_.size());
    std::copy(ended_.begin(), ended_.begin() + count, completions);
    ended_.erase(ended_.begin(), ended_.begin() + count);
    return count;
  }

  void Wait(double seconds) override {
    if (!armed_) {
      armed_ = ibv_req_notify_cq(context_.completions, 0) == 0;
      if (!armed_) seconds = std::min(seconds, 1e-3);  // there will be no word
    }
    Collect();  // what came in before the notification was asked for gives none
    if (!ended_.empty() || seconds <= 0) return;
    pollfd files[2] = {{context_.channel->fd, POLLIN, 0}, {wake_, POLLIN, 0}};
    const double bounded = std::min(seconds, 3600.0);
    timespec limit;
    limit.tv_sec = static_cast<time_t>(bounded);
    limit.tv_nsec = static_cast<long>((bounded - static_cast<double>(limit.tv_sec)) * 1e9);
    if (ppoll(files, 2, &limit, nullptr) <= 0) return;
    if (files[0].revents != 0) {
      ibv_cq* queue = nullptr;
      void* unused = nullptr;
      if (context_.library->get_cq_event(context_.channel, &queue, &unused) == 0) {
        context_.library->ack_cq_events(queue, 1);
      }
      armed_ = false;
    }
    if (files[1].revents != 0) {
      uint64_t times;
      while (read(wake_, &times, sizeof(times)) < 0 && errno == EINTR) {
      }
    }
  }

  void Wake() override {
    const uint64_t once = 1;
    while (write(wake_, &once, sizeof(once)) < 0 && errno == EINTR) {
    }
  }

 private:
  struct Pair {
    int32_t peer;
    size_t index;
  };

  void SetBounds(const Options& options) {
    const ibv_device_attr& limits = context_.device.limits;
    context_.queue_pairs = options.queue_pairs;
    context_.chunk = options.chunk == 0 ? kChunk : options.chunk;
    const uint32_t window = options.window == 0 ? kWindow : options.window;
    context_.in_flight = uint64_t{context_.chunk} * window;
    context_.reads = std::clamp<uint32_t>(limits.max_qp_init_rd_atom, 1, kReads);
    if (options.window != 0) context_.reads = std::min(context_.reads, window);
    context_.window = options.window == 0 ? uint64_t{context_.reads} * context_.queue_pairs : window;
  }

  VerbsPeer* Find(int32_t peer) const {
    return peer >= 0 && static_cast<size_t>(peer) < peers_.size() ? peers_[peer].get() : nullptr;
  }

  // Takes all that the completion queue holds.
  void Collect() {
    ibv_wc batch[kBatch];
    for (int count = kBatch; count == kBatch;) {
      count = ibv_poll_cq(context_.completions, kBatch, batch);
      for (int i = 0; i < count; ++i) {
        const auto pair = pairs_.find(static_cast<uint32_t>(batch[i].wr_id >> 32));
        if (pair == pairs_.end()) continue;  // of a queue pair that is gone
        Completion completion;
        if (!peers_[pair->second.peer]->Complete(pair->second.index, batch[i], &completion)) continue;
        ended_.push_back(completion);
        --under_way_;
      }
    }
  }

  VerbsContext context_;
  int completions_ = 0;  // room of the completion queue
  int wake_ = -1;
  bool armed_ = false;
  uint32_t serial_ = 1;  // of the next queue pair: no completion is taken for another connection's
  uint64_t under_way_ = 0;
  std::vector<std::unique_ptr<VerbsPeer>> peers_;
  std::unordered_map<uint32_t, Pair> pairs_;
  std::vector<Completion> ended_;
};

}  // namespace

std::unique_ptr<Transport> MakeVerbs(const Options& options, std::string* error) {
  auto verbs = std::make_unique<Verbs>();
  *error = verbs->Open(options);
  if (!error->empty()) return nullptr;
  return verbs;
}

}  // namespace gear_jax::transport

#endif  // __has_include(<infiniband/verbs.h>)
