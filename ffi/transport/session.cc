#include "ffi/transport/session.h"

#include <sstream>
#include <utility>

#include "ffi/transport/session_loop.h"

namespace gear_jax::transport {
namespace {

constexpr size_t kMaxRegions = 1 << 16;
constexpr uint64_t kHereBytes = 1 << 20;

}  // namespace

Session::Session(std::unique_ptr<Transport> transport, int32_t self, int32_t peers, std::vector<OwnMemory> own,
                 const Options& options)
    : loop_(std::make_shared<SessionLoop>(std::move(transport), self, peers, std::move(own), options)) {
  SessionLoop::Start(loop_);
}

Session::~Session() { loop_->Close(); }

void Session::Read(std::vector<Piece> pieces, Done done) { loop_->Read(std::move(pieces), std::move(done)); }

bool Session::ReadHere(const std::vector<Piece>& pieces) { return loop_->ReadHere(pieces); }

bool Session::Alive(int32_t peer) const { return loop_->Alive(peer); }
int32_t Session::self() const { return loop_->self; }
int32_t Session::peers() const { return loop_->peers; }
uint64_t Session::RegionBytes(int32_t peer, int32_t region) const { return loop_->RegionBytes(peer, region); }

const void* Session::OwnRegion(int32_t region) const {
  if (region < 0 || static_cast<size_t>(region) >= loop_->own.size()) return nullptr;
  return loop_->own[static_cast<size_t>(region)].data;
}

std::vector<uint8_t> Session::Offer(int32_t peer, std::string* error) {
  std::vector<uint8_t> blob;
  error->clear();
  const bool ran = loop_->Run([&](Transport& transport) { blob = transport.Offer(peer, error); });
  if (!ran) *error = "session: got an offer for a peer after close, wanted an open session. Make a new one.";
  return blob;
}

std::string Session::Connect(int32_t peer, std::vector<uint8_t> blob, std::vector<RemoteRegion> regions) {
  return loop_->Connect(peer, std::move(blob), std::move(regions));
}

void Session::Disconnect(int32_t peer) { loop_->Disconnect(peer); }
bool Session::Run(std::function<void(Transport&)> f) { return loop_->Run(f); }
Counters Session::counters() const { return loop_->counters(); }
uint64_t Session::Close() { return loop_->Close(); }

// ---- What other threads ask of the progress thread.

void SessionLoop::Read(std::vector<Piece> pieces, Reader::Done done) {
  auto batch = std::make_unique<Batch>();
  batch->start = Clock::now();
  batch->deadline = batch->start + timeout_;
  batch->left = pieces.size();
  batch->states.resize(pieces.size());
  for (size_t i = 0; i < pieces.size(); ++i) batch->states[i].unasked = pieces[i].bytes;
  batch->pieces = std::move(pieces);
  batch->done = std::move(done);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!closing_) {
      inbox_.push_back(std::move(batch));
      if (sleeping_) transport_->Wake();
      return;
    }
  }
  batch->done(std::vector<Status>(batch->pieces.size(), Status::kClosed));
}

bool SessionLoop::ReadHere(const std::vector<Piece>& pieces) {
  const auto start = Clock::now();
  std::vector<std::shared_ptr<const NearMemory>> from;
  uint64_t bytes = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const Piece& piece : pieces) {
      if (closing_ || piece.peer < 0 || piece.peer >= peers || near_[static_cast<size_t>(piece.peer)] == nullptr) {
        return false;
      }
      const auto& regions = region_bytes_[static_cast<size_t>(piece.peer)];
      if (piece.region < 0 || static_cast<size_t>(piece.region) >= regions.size()) return false;
      const uint64_t whole = regions[static_cast<size_t>(piece.region)];
      if (piece.offset > whole || piece.bytes > whole - piece.offset || piece.bytes > kHereBytes - bytes) return false;
      bytes += piece.bytes;
      from.push_back(near_[static_cast<size_t>(piece.peer)]);
    }
    ++here_;
  }
  bool read = true;
  for (size_t first = 0, last; first < pieces.size() && read; first = last) {
    VmRead reads[kMaxVmReads];
    for (last = first; last < pieces.size() && last - first < kMaxVmReads && from[last] == from[first]; ++last) {
      const uint64_t address = from[last]->addresses[static_cast<size_t>(pieces[last].region)];
      reads[last - first] = {address + pieces[last].offset, pieces[last].to, pieces[last].bytes};
    }
    read = ReadProcess(from[first]->process, reads, last - first) == Status::kOk;
  }
  if (read) {
    reads_ += pieces.size();
    bytes_ += bytes;
    wait_ns_ += std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count();
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  --here_;
  if (closing_) changed_.notify_all();
  return read;
}

bool SessionLoop::Run(std::function<void(Transport&)> f) {
  if (std::this_thread::get_id() == thread_id_) {
    if (transport_ == nullptr) return false;
    f(*transport_);
    return true;
  }
  Command command{&f};
  std::unique_lock<std::mutex> lock(mutex_);
  if (closing_) return false;
  commands_.push_back(&command);
  if (sleeping_) transport_->Wake();
  changed_.wait(lock, [&]() { return command.ended; });
  return command.ran;
}

std::string SessionLoop::Connect(int32_t peer, std::vector<uint8_t> blob, std::vector<RemoteRegion> regions) {
  std::ostringstream error;
  if (peer < 0 || peer >= peers || peer == self) {
    error << "peer: got " << peer << ", wanted one of 0 ... " << peers - 1 << " except this process, " << self
          << ". Connect the peers of the job.";
    return error.str();
  }
  if (regions.size() > kMaxRegions) {
    error << "regions of peer " << peer << ": got " << regions.size() << ", wanted at most " << kMaxRegions
          << ". Check that the peer runs the same version.";
    return error.str();
  }
  for (size_t i = 0; i < regions.size(); ++i) {
    if (regions[i].bytes > UINT64_MAX - regions[i].address) {
      error << "region " << i << " of peer " << peer << ": got " << regions[i].bytes << " bytes at "
            << regions[i].address << ", wanted an end below 2^64. Check that the peer runs the same version.";
      return error.str();
    }
  }
  std::vector<uint64_t> bytes;
  for (const RemoteRegion& region : regions) bytes.push_back(region.bytes);
  // What is under way on the last connection must end first: a transport tells its chunks apart by the connection.
  const auto deadline = Clock::now() + timeout_;
  bool waits = true;
  std::string refused;
  while (waits && Clock::now() <= deadline) {
    const bool ran = Run([&](Transport& transport) {
      Peer& state = state_[static_cast<size_t>(peer)];
      if (state.connected) Fail(peer, Status::kLost, nullptr);
      if (state.under_way > 0) return;
      waits = false;
      refused = transport.Connect(peer, blob.data(), blob.size(), std::move(regions));
      if (!refused.empty()) return;
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        region_bytes_[static_cast<size_t>(peer)] = std::move(bytes);
        near_[static_cast<size_t>(peer)] = transport.Near(peer);
      }
      if (state.was_connected) ++reconnects_;
      state.connected = state.was_connected = true;
      alive_[static_cast<size_t>(peer)] = true;
    });
    if (!ran) return "session: got a peer to connect after close, wanted an open session. Make a new one.";
    if (waits) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  if (waits) {
    error << "peer " << peer << ": got reads that have not ended since it was lost, wanted none. Connect it later.";
    return error.str();
  }
  return refused;
}

void SessionLoop::Disconnect(int32_t peer) {
  if (peer < 0 || peer >= peers || peer == self) return;
  Run([&](Transport&) { Fail(peer, Status::kLost, nullptr); });
}

bool SessionLoop::Alive(int32_t peer) const {
  return peer >= 0 && peer < peers && alive_[static_cast<size_t>(peer)].load();
}

uint64_t SessionLoop::RegionBytes(int32_t peer, int32_t region) const {
  if (peer < 0 || peer >= peers || region < 0) return 0;
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto& bytes = region_bytes_[static_cast<size_t>(peer)];
  return static_cast<size_t>(region) < bytes.size() ? bytes[static_cast<size_t>(region)] : 0;
}

Counters SessionLoop::counters() const {
  return {bytes_, reads_, refused_, timeouts_, lost_, losses_, reconnects_, static_cast<double>(wait_ns_) * 1e-9};
}

uint64_t SessionLoop::Close() {
  uint64_t unended;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    closing_ = true;
    if (sleeping_) transport_->Wake();
    if (std::this_thread::get_id() == thread_id_) return 0;
    changed_.wait(lock, [&]() { return ended_ && here_ == 0; });
    unended = unended_;
  }
  const std::lock_guard<std::mutex> lock(join_);
  if (thread_.joinable()) thread_.join();
  return unended;
}

}  // namespace gear_jax::transport
