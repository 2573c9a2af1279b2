// A Reader over one transport: a progress thread that cuts reads into chunks, bounds those under way for each peer,
// serves the peers in turn, and ends what takes too long. No XLA, no Python.
#ifndef GEAR_JAX_FFI_TRANSPORT_SESSION_H_
#define GEAR_JAX_FFI_TRANSPORT_SESSION_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ffi/transport/reader.h"
#include "ffi/transport/transport.h"

namespace gear_jax::transport {

// What has happened so far. Pieces of the process's own memory count in none but `wait_seconds`.
struct Counters {
  uint64_t bytes;       // delivered
  uint64_t reads;       // pieces asked for
  uint64_t refused;     // pieces that ended as kRefused
  uint64_t timeouts;    // pieces that ended as kTimeout
  uint64_t lost;        // pieces that ended as kLost
  uint64_t losses;      // how often a peer that was there was lost
  uint64_t reconnects;  // how often a peer that was lost was connected again
  double wait_seconds;  // from each Read to its end, summed up
};

// Memory of this process, for reads of its own.
struct OwnMemory {
  const void* data;
  uint64_t bytes;
};

class SessionLoop;  // the progress thread's side (session_loop.h)

// A read has `options.timeout` seconds, counted from Read and waiting in the queue included. When they are over, the
// peers that still owe something are lost: what the read still wants of them ends as kTimeout, all else that is under
// way or waits for them as kLost, and their connections end. A lost peer's reads end at once until Connect is called
// for it again.
class Session final : public Reader {
 public:
  // `self` is one of the `peers`; its reads are copies out of `own`, made on the progress thread.
  Session(std::unique_ptr<Transport> transport, int32_t self, int32_t peers, std::vector<OwnMemory> own,
          const Options& options);
  ~Session() override;  // closes

  // Refused without touching the wire: peers and regions that there are not, and what lies outside a region's bounds.
  // `done` may read again. Pieces of a peer travel in the order asked, those of different peers in turn.
  void Read(std::vector<Piece> pieces, Done done) override;

  // Reads in the caller's thread, where all pieces are of processes whose memory may be read directly, and few bytes:
  // handing them to the progress thread and back would take longer than the copy. True: all of them have been read.
  // False: ask Read, whatever the reason.
  bool ReadHere(const std::vector<Piece>& pieces);

  bool Alive(int32_t peer) const override;
  int32_t self() const override;
  int32_t peers() const override;
  uint64_t RegionBytes(int32_t peer, int32_t region) const override;
  const void* OwnRegion(int32_t region) const override;

  // As in transport.h, run on the progress thread; they wait for it. Connect waits for what is under way on the peer's
  // last connection to end.
  std::vector<uint8_t> Offer(int32_t peer, std::string* error);
  std::string Connect(int32_t peer, std::vector<uint8_t> blob, std::vector<RemoteRegion> regions);

  // The peer is lost: what it owes ends as kLost. Returns once the transport has been told.
  void Disconnect(int32_t peer);

  // Runs `f` with the transport on the progress thread and waits for it. False: closed, `f` did not run.
  bool Run(std::function<void(Transport&)> f);

  Counters counters() const;

  // Gives what is under way half a second, ends all reads as kClosed, waits until nothing is under way, stops the
  // thread and destroys the transport. Called from `done`, it does not wait. Thread-safe; a second call waits too.
  // Returns how many reads on the wire the transport had not ended by the deadline: 0, or it is at fault.
  uint64_t Close();

 private:
  std::shared_ptr<SessionLoop> loop_;
};

}  // namespace gear_jax::transport

#endif  // GEAR_JAX_FFI_TRANSPORT_SESSION_H_
