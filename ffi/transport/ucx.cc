#include "ffi/transport/ucx.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <thread>
#include <utility>

#include "ffi/transport/sealed.h"

namespace gear_jax::transport {
namespace {

constexpr uint64_t kNearBytes = 1 << 20;  // of the same host, between two looks at the others
constexpr int kProgressInPoll = 64;
constexpr auto kEndSeconds = std::chrono::seconds(5);  // that all endpoints have to end in, when the session does

// Packed addresses and keys differ between versions of UCX.
uint64_t Kind(const char letters[4], const UcxApi& api) {
  uint64_t kind = 0;
  std::memcpy(&kind, letters, 4);
  return kind | static_cast<uint64_t>(api.major & 0xffff) << 32 | static_cast<uint64_t>(api.minor) << 48;
}

// Whether UCX_TLS lets processes of one host read each other's memory: a list of transports, after a ^ of those not
// to use.
bool ReadsNear() {
  const char* const tls = std::getenv("UCX_TLS");
  if (tls == nullptr) return true;
  std::string list(tls);
  const bool without = !list.empty() && list[0] == '^';
  if (without) list.erase(0, 1);
  bool named = false;
  std::istringstream words(list);
  for (std::string word; std::getline(words, word, ',');) {
    named = named || word == "cma" || word == "sm" || word == "shm" || word == "all";
  }
  return named != without;
}

}  // namespace

std::unique_ptr<Transport> MakeUcx(const Options& options, std::string* error) {
  return UcxTransport::Make(options, error);
}

std::string UcxVersion() {
  std::string error;
  const UcxApi* api = UcxApi::Load(&error);
  if (api == nullptr) return "";
  return std::to_string(api->major) + "." + std::to_string(api->minor) + "." + std::to_string(api->release);
}

std::unique_ptr<UcxTransport> UcxTransport::Make(const Options& options, std::string* error) {
  const UcxApi* api = UcxApi::Load(error);
  if (api == nullptr) return nullptr;
  std::unique_ptr<UcxTransport> transport(new UcxTransport(api));
  *error = transport->Start(options);
  return error->empty() ? std::move(transport) : nullptr;
}

std::string UcxTransport::Start(const Options& options) {
  ucp_config_t* config;
  ucs_status_t status = api_->ucp_config_read(nullptr, nullptr, &config);
  if (status != UCS_OK) return UcxFailed(*api_, "ucp_config_read", status);
  // Shared memory takes part in error handling only if told to. Over TCP, UCX would send long answers in pieces of
  // 8 KiB, with a call of the system for each. (Sent from where they lie they would be as fast, but a send that fails
  // then completes twice.)
  const std::pair<const char*, const char*> ours[] = {{"TLS", "tcp,posix,sysv,self"},
                                                      {"POSIX_ERROR_HANDLING", "y"},
                                                      {"SYSV_ERROR_HANDLING", "y"},
                                                      {"TCP_TX_SEG_SIZE", "64k"}};
  for (const auto& [name, value] : ours) {
    if (status == UCS_OK && std::getenv((std::string("UCX_") + name).c_str()) == nullptr) {
      status = api_->ucp_config_modify(config, name, value);
    }
  }
  if (status == UCS_OK && !options.device.empty()) {
    status = api_->ucp_config_modify(config, "NET_DEVICES", options.device.c_str());
  }
  if (status == UCS_OK) {
    ucp_params_t params{};
    params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_NAME;
    params.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;  // no RMA: nobody can write here
    params.name = "gear_jax";
    status = api_->ucp_init_version(UCP_API_MAJOR, UCP_API_MINOR, &params, config, &context_);
  }
  api_->ucp_config_release(config);
  if (status != UCS_OK) return UcxFailed(*api_, "ucp_init", status);

  std::string error;
  exposer_ = UcxWorker::Make(api_, context_, kRequest, &UcxTransport::OnRequest, this, &error);
  if (exposer_ != nullptr) reader_ = MakeReader(&error);
  if (!error.empty()) return error;
  wake_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (wake_fd_ < 0) return "eventfd: got none, wanted a file descriptor. Raise `ulimit -n`.";
  if (getrandom(key_.data(), key_.size(), 0) != static_cast<ssize_t>(key_.size())) {
    return "getrandom: got no key, wanted one. Check that the process may call it.";
  }

  std::vector<uint8_t> address;
  error = exposer_->Address(&address);
  if (!error.empty()) return error;
  const HostProcess process = mark_.Describe();
  std::array<uint8_t, 16> mark;
  const VmRead own{process.mark_address, mark.data(), mark.size()};
  if (!ReadOwn(&own, 1)) {
    return "process_vm_readv: got nothing of this process's own memory, wanted it: answers are copied so. Allow the "
           "call in the container's seccomp profile.";
  }
  std::vector<uint8_t> blob(sizeof(process));
  std::memcpy(blob.data(), &process, sizeof(process));
  blob.insert(blob.end(), address.begin(), address.end());
  address_ = Seal(Kind("GJUA", *api_), blob.data(), blob.size());
  reads_near_ = ReadsNear();
  return "";
}

std::unique_ptr<UcxWorker> UcxTransport::MakeReader(std::string* error) {
  return UcxWorker::Make(api_, context_, kAnswer, &UcxTransport::OnAnswer, this, error);
}

UcxTransport::~UcxTransport() {
  mark_.Clear();
  while (!connections_.empty()) Disconnect(connections_.begin()->first);
  // Nothing is read any more; what ends here is not told to anybody.
  const auto until = std::chrono::steady_clock::now() + kEndSeconds;
  while (reader_ != nullptr && (reader_->closing() || !ended_workers_.empty()) &&
         std::chrono::steady_clock::now() < until) {
    Progress();
  }
  ended_workers_.clear();
  reader_.reset();
  exposer_.reset();
  if (context_ != nullptr) api_->ucp_cleanup(context_);
  if (wake_fd_ >= 0) close(wake_fd_);
}

Capabilities UcxTransport::capabilities() const { return {kMaxRead, !reads_near_, true}; }

// ---- Exposing

std::string UcxTransport::Expose(const std::vector<OwnMemory>& memory, std::vector<RemoteRegion>* regions) {
  exposed_ = memory;
  for (const OwnMemory& own : memory) {
    const std::vector<uint8_t> key = Seal(Kind("GJUK", *api_), key_.data(), key_.size());
    regions->push_back({reinterpret_cast<uintptr_t>(own.data), own.bytes, key});
  }
  return "";
}

std::vector<uint8_t> UcxTransport::Accept(int32_t peer, const uint8_t* offer, size_t bytes, std::string* error) {
  if (!Unseal(Kind("GJUO", *api_), offer, bytes)) {
    *error = "offer of peer " + std::to_string(peer) + ": got " + std::to_string(bytes) + " bytes that no UCX " +
             std::to_string(api_->major) + "." + std::to_string(api_->minor) +
             " has made, wanted an offer. Install the same libucx everywhere.";
    return {};
  }
  return address_;
}

std::string UcxTransport::Way(int32_t peer) const {
  const auto found = connections_.find(peer);
  if (found == connections_.end()) return "";
  return found->second->near != nullptr ? "its memory directly" : "UCX";
}

std::shared_ptr<const NearMemory> UcxTransport::Near(int32_t peer) const {
  const auto found = connections_.find(peer);
  return found == connections_.end() ? nullptr : found->second->near;
}

// ---- Reading

std::vector<uint8_t> UcxTransport::Offer(int32_t, std::string*) { return Seal(Kind("GJUO", *api_), nullptr, 0); }

std::string UcxTransport::Connect(int32_t peer, const uint8_t* blob, size_t bytes, std::vector<RemoteRegion> regions) {
  const std::string who = " of peer " + std::to_string(peer);
  const std::string fix = " Install the same libucx everywhere.";
  constexpr size_t kProcess = sizeof(HostProcess);
  if (bytes < kProcess + 24 || !Unseal(Kind("GJUA", *api_), blob, bytes)) {
    return "address" + who + ": got " + std::to_string(bytes) + " bytes that are malformed or of another UCX, wanted " +
           std::to_string(api_->major) + "." + std::to_string(api_->minor) + "'s." + fix;
  }
  for (size_t i = 0; i < regions.size(); ++i) {
    const RemoteRegion& region = regions[i];
    const bool sized = region.key.size() == sizeof(Key) + 24;
    if (region.bytes > 0 && (!sized || !Unseal(Kind("GJUK", *api_), region.key.data(), region.key.size()))) {
      return "key of region " + std::to_string(i) + who + ": got " + std::to_string(region.key.size()) +
             " bytes that are malformed or of another UCX, wanted a key." + fix;
    }
  }
  Disconnect(peer);
  auto connection = std::make_unique<Connection>();
  connection->worker = reader_.get();
  std::string error;
  const std::vector<uint8_t> address(blob + 16 + kProcess, blob + bytes - 8);
  std::vector<uint8_t>& known = known_[peer];
  // A peer that was given up, and runs on. What UCX keeps of the new connection is to go with it, where that of a
  // process, or a session, that has ended goes by itself.
  if (known == address) {
    connection->own = MakeReader(&error);
    connection->worker = connection->own.get();
  }
  if (error.empty()) {
    error = connection->worker->Connect(address, &UcxTransport::EndpointFailed, &connection->endpoint);
  }
  if (!error.empty()) return error;
  known = address;
  NearMemory near;
  std::memcpy(&near.process, blob + 16, kProcess);
  for (const RemoteRegion& region : regions) {
    if (region.bytes > 0) std::memcpy(connection->key.data(), region.key.data() + 16, connection->key.size());
    near.addresses.push_back(region.address);
  }
  if (reads_near_ && CanRead(near.process)) connection->near = std::make_shared<const NearMemory>(std::move(near));
  connections_[peer] = std::move(connection);
  return "";
}

void UcxTransport::Disconnect(int32_t peer) {
  const auto found = connections_.find(peer);
  if (found == connections_.end()) return;
  std::unique_ptr<Connection> connection = std::move(found->second);
  connections_.erase(found);
  for (auto read = near_.begin(); read != near_.end();) {
    if (read->peer == peer) {
      ended_.push_back({read->cookie, Status::kLost});
      read = near_.erase(read);
    } else {
      ++read;
    }
  }
  posted_ -= connection->posted.size();
  for (const Piece& piece : connection->posted) ended_.push_back({piece.cookie, Status::kLost});
  for (auto next = asked_.begin(); next != asked_.end();) {
    const auto asked = next++;
    if (asked->second.peer == peer) EndRequest(asked->first, Status::kLost);
  }
  connection->worker->Close(connection->endpoint);
  if (connection->own != nullptr) ended_workers_.push_back(std::move(connection->own));
}

// Of all workers; whether anything has happened.
bool UcxTransport::Progress() {
  bool any = exposer_->Progress();
  any = reader_->Progress() || any;
  for (const auto& [peer, connection] : connections_) any = (connection->own && connection->own->Progress()) || any;
  for (const auto& worker : ended_workers_) any = worker->Progress() || any;
  const auto ended = [](const auto& worker) { return !worker->closing(); };
  ended_workers_.erase(std::remove_if(ended_workers_.begin(), ended_workers_.end(), ended), ended_workers_.end());
  return any;
}

bool UcxTransport::Post(int32_t peer, int32_t region, uint64_t offset, uint32_t bytes, void* to, uint64_t cookie) {
  Connection* const connection = connections_.at(peer).get();
  if (connection->near != nullptr) {
    near_.push_back({peer, {connection->near->addresses[static_cast<size_t>(region)] + offset, to, bytes}, cookie});
  } else {
    connection->posted.push_back({static_cast<uint32_t>(region), bytes, offset, to, cookie});
    ++posted_;
  }
  return true;
}

// Some of what waits, all of one peer: the thread has others to serve.
void UcxTransport::ReadNear() {
  const int32_t peer = near_.front().peer;
  VmRead reads[kMaxVmReads];
  size_t count = 0;
  for (uint64_t bytes = 0; count < std::min(kMaxVmReads, near_.size()) && near_[count].peer == peer; ++count) {
    bytes += near_[count].read.bytes;
    if (count > 0 && bytes > kNearBytes) break;
    reads[count] = near_[count].read;
  }
  const HostProcess& process = connections_.at(peer)->near->process;
  const Status status = ReadProcess(process, reads, count);
  for (size_t i = 0; i < count; ++i) {
    const bool alone = status == Status::kRefused && count > 1;  // memory of some is gone, not that of all
    ended_.push_back({near_[i].cookie, alone ? ReadProcess(process, &reads[i], 1) : status});
  }
  near_.erase(near_.begin(), near_.begin() + static_cast<std::ptrdiff_t>(count));
}

size_t UcxTransport::Poll(Completion* completions, size_t max) {
  if (posted_ > 0) {
    for (const auto& [peer, connection] : connections_) {
      if (!connection->posted.empty()) Ask(peer, connection.get());
    }
  }
  for (int i = 0; i < kProgressInPoll && ended_.size() - handed_out_ < max; ++i) {
    if (!Progress()) break;
  }
  if (!near_.empty()) ReadNear();
  const size_t count = std::min(max, ended_.size() - handed_out_);
  std::copy_n(ended_.begin() + static_cast<std::ptrdiff_t>(handed_out_), count, completions);
  handed_out_ += count;
  if (handed_out_ == ended_.size()) {
    ended_.clear();
    handed_out_ = 0;
  }
  return count;
}

void UcxTransport::Wait(double seconds) {
  if (handed_out_ < ended_.size() || !near_.empty() || posted_ > 0) return;
  std::vector<const UcxWorker*> workers = {exposer_.get(), reader_.get()};
  for (const auto& [peer, connection] : connections_) {
    if (connection->own != nullptr) workers.push_back(connection->own.get());
  }
  for (const auto& worker : ended_workers_) workers.push_back(worker.get());
  std::vector<pollfd> files = {{wake_fd_, POLLIN, 0}};
  for (const UcxWorker* worker : workers) {
    if (!worker->Arm()) {
      // There is something to poll, or to send as soon as the peer has made room: it may be waiting for this very core.
      std::this_thread::yield();
      return;
    }
    files.push_back({worker->fd(), POLLIN, 0});
  }
  const double milliseconds = std::min(std::ceil(seconds * 1e3), 1e6);
  poll(files.data(), files.size(), static_cast<int>(milliseconds));
  if (files[0].revents != 0) {
    uint64_t count;
    [[maybe_unused]] const ssize_t got = read(wake_fd_, &count, sizeof(count));
  }
}

void UcxTransport::Wake() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t put = write(wake_fd_, &one, sizeof(one));
}

}  // namespace gear_jax::transport
