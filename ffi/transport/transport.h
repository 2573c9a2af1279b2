// One way to read another process's memory: verbs or ucx. A session (session.h) drives it from one progress thread,
// which cuts reads into chunks, bounds those under way, and watches deadlines. No XLA, no Python.
#ifndef GEAR_JAX_FFI_TRANSPORT_TRANSPORT_H_
#define GEAR_JAX_FFI_TRANSPORT_TRANSPORT_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "ffi/transport/reader.h"
#include "ffi/transport/same_host.h"

namespace gear_jax::transport {

// What a user may set; a transport ignores what it has no use for. 0 or "": the transport's own choice.
struct Options {
  double timeout = 2.0;      // seconds that a read may take
  uint32_t chunk = 0;        // most bytes of one read on the wire
  uint32_t window = 0;       // chunks under way at a time, for each peer
  uint32_t queue_pairs = 2;  // for each peer (verbs)
  std::string device;        // verbs: "mlx5_0"; ucx: a list for UCX_NET_DEVICES
  int32_t port = 1;
  int32_t gid_index = -1;  // -1: the first RoCE v2 or InfiniBand one that is not link-local
  uint32_t mtu = 0;        // bytes: 256 ... 4096
  uint32_t traffic_class = 0;
  uint32_t retries = 7;
  uint32_t ack_timeout = 18;  // exponent: 4.096 us * 2^18, about 1 s
};

struct Capabilities {
  uint64_t max_read;    // most bytes of one Post
  bool checks_keys;     // the exposing side's hardware or library refuses a wrong key by itself
  bool needs_progress;  // the exposing process must run a progress thread
};

// A region as its peer describes it.
struct RemoteRegion {
  uint64_t address;
  uint64_t bytes;
  std::vector<uint8_t> key;  // verbs: 4 bytes; ucx: a packed key
};

struct Completion {
  uint64_t cookie;
  Status status;
};

// All methods are called from one thread at a time, except Wake.
class Transport {
 public:
  virtual ~Transport() = default;

  virtual std::string_view name() const = 0;
  virtual Capabilities capabilities() const = 0;

  // What the exposing side of a peer must know of this reader before the two are connected; a blob for the control
  // connection. `error` is set (what, got, wanted, fix) and the blob empty if that fails.
  virtual std::vector<uint8_t> Offer(int32_t peer, std::string* error) = 0;

  // Connects to a peer whose exposing side has answered with `blob`, and takes up its regions. Nothing in the blob or
  // the regions is trusted: what is malformed is refused. Returns "" or the error.
  virtual std::string Connect(int32_t peer, const uint8_t* blob, size_t bytes, std::vector<RemoteRegion> regions) = 0;

  // The memory of a connected peer, where any thread of this process may read it by `ReadProcess`; null: it may not.
  virtual std::shared_ptr<const NearMemory> Near(int32_t) const { return nullptr; }

  // Ends a connection. What is under way ends as kLost by later Polls, soon, and until then Post is not called for the
  // peer.
  // A peer may be connected again.
  virtual void Disconnect(int32_t peer) = 0;

  // Starts a read of 1 ... max_read bytes; `to` is any host memory. False: no room now, try again after a Poll.
  // The session has checked the bounds.
  virtual bool Post(int32_t peer, int32_t region, uint64_t offset, uint32_t bytes, void* to, uint64_t cookie) = 0;

  // Makes progress and hands out what has ended, at most `max`. What reads ask for is written here, by this thread, and
  // after a completion not any more.
  virtual size_t Poll(Completion* completions, size_t max) = 0;

  // Sleeps until there may be something to poll, Wake is called, or `seconds` have passed.
  virtual void Wait(double seconds) = 0;
  virtual void Wake() = 0;  // from any thread
};

}  // namespace gear_jax::transport

#endif  // GEAR_JAX_FFI_TRANSPORT_TRANSPORT_H_
