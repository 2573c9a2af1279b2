// What an op needs of remote memory: batches of one-sided reads. No XLA, no Python.
//
// A `Reader` is one job's way to the memory that its processes expose. The transports stand behind it (transport.h);
// the ops find it by a small number, for an attribute of an FFI call is part of the program and must be the same in
// every process.
#ifndef GEAR_JAX_FFI_TRANSPORT_READER_H_
#define GEAR_JAX_FFI_TRANSPORT_READER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace gear_jax::transport {

// How a read has ended.
enum class Status : uint8_t {
  kOk,
  kRefused,  // out of the region's bounds, the peer did not admit the key, or its memory is gone
  kTimeout,  // no answer by the deadline; the peer counts as lost from now on
  kLost,     // the peer is gone, or was before
  kClosed,   // the reader was closed meanwhile
};

// A read of `bytes` bytes at `offset` of a peer's region. Any size, 0 too; `to` is any host memory.
struct Piece {
  int32_t peer;
  int32_t region;
  uint64_t offset;
  uint64_t bytes;
  void* to;
};

class Reader {
 public:
  // The state of each piece, in the order asked. Runs on the progress thread: it must not block.
  using Done = std::function<void(const std::vector<Status>&)>;

  virtual ~Reader() = default;

  // Reads all pieces at once; `done` runs exactly once, when none is under way any more: after it no read writes to
  // its memory. It runs by the deadline, whatever the peers do. Thread-safe; never blocks (done may run before Read
  // returns).
  virtual void Read(std::vector<Piece> pieces, Done done) = 0;

  // Whether a peer is there, as far as is known. A lost peer may come back. Thread-safe.
  virtual bool Alive(int32_t peer) const = 0;

  // The number of this process among the peers.
  virtual int32_t self() const = 0;
  virtual int32_t peers() const = 0;

  // Bytes of a peer's region, 0 where there is none.
  virtual uint64_t RegionBytes(int32_t peer, int32_t region) const = 0;

  // This process's own region, for reads that need no transport; null where there is none.
  virtual const void* OwnRegion(int32_t region) const = 0;
};

// Readers by number. Thread-safe.
void AddReader(int64_t number, std::shared_ptr<Reader> reader);
void RemoveReader(int64_t number);
std::shared_ptr<Reader> FindReader(int64_t number);  // null: none

}  // namespace gear_jax::transport

#endif  // GEAR_JAX_FFI_TRANSPORT_READER_H_
