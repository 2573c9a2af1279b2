// The queue pairs to one peer, and the reads under way on them. Only verbs.cc includes this.
#ifndef GEAR_JAX_FFI_TRANSPORT_VERBS_PEER_H_
#define GEAR_JAX_FFI_TRANSPORT_VERBS_PEER_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "ffi/transport/staging_ring.h"
#include "ffi/transport/transport.h"
#include "ffi/transport/verbs_blob.h"
#include "ffi/transport/verbs_device.h"
#include "ffi/transport/verbs_library.h"

namespace gear_jax::transport {

// What all peers of a transport share.
struct VerbsContext {
  const VerbsLibrary* library = nullptr;
  VerbsDevice device;
  ibv_pd* domain = nullptr;
  ibv_comp_channel* channel = nullptr;
  ibv_cq* completions = nullptr;
  Options options;
  uint32_t chunk = 0;        // most bytes of one read
  uint64_t in_flight = 0;    // most bytes under way to a peer
  uint64_t window = 0;       // most reads under way to a peer
  uint32_t reads = 0;        // most of them on one queue pair
  uint32_t queue_pairs = 0;  // of each peer
};

class VerbsPeer {
 public:
  explicit VerbsPeer(const VerbsContext* context) : context_(context) {}
  ~VerbsPeer();
  VerbsPeer(const VerbsPeer&) = delete;
  VerbsPeer& operator=(const VerbsPeer&) = delete;

  // Makes new queue pairs, in place of such that no Connect has taken, and says what the peer must know of them. A
  // connection goes on meanwhile. "" or the error.
  std::string Prepare(VerbsEnd* mine);

  // Brings the new queue pairs to RTS; those of the last connection must have been dropped. They are numbered from
  // *serial on. "" or the error, after which there are none.
  std::string Connect(const VerbsEnd& theirs, std::vector<RemoteRegion> regions, uint32_t* serial);

  // Destroys the queue pairs of the connection; nothing comes in afterwards. What was under way ends as kLost in
  // `ended`.
  void Drop(std::vector<Completion>* ended);

  bool prepared() const { return !next_.empty(); }
  bool connected() const { return connected_; }
  bool spent() const { return spent_; }  // by an error; only Drop and a new connection help
  size_t regions() const { return regions_.size(); }
  size_t queue_pairs() const { return pairs_.size(); }
  uint32_t serial(size_t pair) const { return pairs_[pair]->serial; }

  // As Transport::Post, for a peer that is connected and not spent.
  bool Post(int32_t region, uint64_t offset, uint32_t bytes, void* to, uint64_t cookie);

  // What a completion of one of the queue pairs means; a read's bytes are copied to their place. False: nothing.
  bool Complete(size_t pair, const ibv_wc& wc, Completion* completion);

 private:
  struct UnderWay {
    uint64_t cookie;
    void* to;
    uint64_t at;  // in the staging memory
    uint32_t bytes;
    uint32_t sequence;
  };
  struct QueuePair {
    QueuePair(uint64_t base, uint64_t bytes) : base(base), ring(bytes) {}
    ibv_qp* qp = nullptr;
    uint32_t serial = 0;
    uint32_t sequence = 0;  // of the next read
    uint32_t psn = 0;
    uint64_t base;  // of its part of the staging memory
    StagingRing ring;
    std::deque<UnderWay> under_way;  // reads of a queue pair end in the order they were posted
  };

  using QueuePairs = std::vector<std::unique_ptr<QueuePair>>;

  std::string Register();
  std::string CreateQueuePair(uint32_t index);
  std::string TakeRegions(const std::vector<RemoteRegion>& regions);
  std::string ToReady(const QueuePair& pair, const VerbsEnd& theirs, const QueuePairEnd& end);

  void Destroy(QueuePairs* pairs);

  const VerbsContext* context_;
  void* staging_ = nullptr;  // kept from connection to connection
  uint64_t staging_bytes_ = 0;
  uint64_t pair_bytes_ = 0;
  ibv_mr* registration_ = nullptr;
  QueuePairs pairs_, next_;  // of the connection, and those that wait for an answer; they use the same memory
  struct Region {
    uint64_t address, bytes;
    uint32_t key;
  };
  std::vector<Region> regions_;
  uint64_t under_way_ = 0, bytes_under_way_ = 0;
  uint32_t reads_ = 0;  // as the peer has answered
  bool connected_ = false, spent_ = false;
};

}  // namespace gear_jax::transport

#endif  // GEAR_JAX_FFI_TRANSPORT_VERBS_PEER_H_
