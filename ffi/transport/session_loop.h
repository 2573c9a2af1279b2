// The progress thread of a session; see session.h.
#ifndef GEAR_JAX_FFI_TRANSPORT_SESSION_LOOP_H_
#define GEAR_JAX_FFI_TRANSPORT_SESSION_LOOP_H_

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "ffi/transport/session.h"

namespace gear_jax::transport {

class SessionLoop {
 public:
  SessionLoop(std::unique_ptr<Transport> transport, int32_t self, int32_t peers, std::vector<OwnMemory> own,
              const Options& options);

  // From any thread.
  void Read(std::vector<Piece> pieces, Reader::Done done);
  bool ReadHere(const std::vector<Piece>& pieces);
  bool Run(std::function<void(Transport&)> f);
  std::string Connect(int32_t peer, std::vector<uint8_t> blob, std::vector<RemoteRegion> regions);
  void Disconnect(int32_t peer);
  bool Alive(int32_t peer) const;
  uint64_t RegionBytes(int32_t peer, int32_t region) const;
  Counters counters() const;

  // Starts the thread, which keeps the loop alive until it has ended.
  static void Start(const std::shared_ptr<SessionLoop>& loop);
  uint64_t Close();

  ~SessionLoop();

  const int32_t self;
  const int32_t peers;
  const std::vector<OwnMemory> own;

 private:
  using Clock = std::chrono::steady_clock;

  struct PieceState {
    Status status = Status::kOk;  // so far
    bool ended = false;
    uint32_t under_way = 0;  // chunks
    uint64_t unasked;        // bytes that no chunk has been posted for
  };

  struct Batch {
    std::vector<Piece> pieces;
    std::vector<PieceState> states;
    size_t left = 0;  // pieces that have not ended
    bool expired = false;
    Reader::Done done;
    Clock::time_point start, deadline;
  };

  // A piece with bytes that have not been asked for yet. Of each peer, only the first may be asked for in part.
  struct Waiting {
    Batch* batch;
    uint32_t piece;
  };

  struct Chunk {
    Batch* batch = nullptr;  // null: free
    uint32_t piece = 0;
    uint32_t bytes = 0;
    uint32_t generation = 0;  // of the slot, so that a stray completion does not pass for another's
  };

  struct Peer {
    std::deque<Waiting> waiting;
    uint32_t under_way = 0;
    uint64_t bytes_under_way = 0;
    bool connected = false;
    bool was_connected = false;
  };

  // A call of another thread that waits for it.
  struct Command {
    const std::function<void(Transport&)>* f;
    bool ended = false;
    bool ran = false;
  };

  void Loop();
  bool TakeWork();  // false: closing
  void Admit(std::unique_ptr<Batch> batch);
  Status Check(const Piece& piece) const;
  bool PostTurn();
  bool PostChunk(int32_t peer);
  bool Poll();
  void ChunkEnded(Batch* batch, uint32_t piece, Status status);
  void EndIfWhole(Batch* batch, uint32_t piece);
  void Fail(int32_t peer, Status status, const Batch* late);
  void Expire();
  void RunDone();
  void Sleep();
  void ShutDown();
  void Abandon();

  // Of the progress thread alone.
  std::unique_ptr<Transport> transport_;  // others may wake it while sleeping_
  const std::chrono::nanoseconds timeout_;
  const uint64_t chunk_bytes_;
  const uint32_t window_;
  const uint64_t window_bytes_;
  std::list<std::unique_ptr<Batch>> batches_;  // in the order of their deadlines
  std::vector<Peer> state_;                    // [peers]
  int32_t turn_ = 0;
  uint64_t waiting_ = 0, under_way_ = 0;  // pieces, chunks
  std::vector<Chunk> chunks_;
  std::vector<uint32_t> free_chunks_;
  std::vector<std::unique_ptr<Batch>> finished_;  // their Done has yet to run
  std::vector<Completion> completions_;
  Clock::time_point progressed_{};

  // Shared.
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::unique_ptr<Batch>> inbox_;
  std::vector<Command*> commands_;
  std::vector<std::vector<uint64_t>> region_bytes_;      // [peers], written by the progress thread
  std::vector<std::shared_ptr<const NearMemory>> near_;  // [peers]; null: not read by other threads
  uint32_t here_ = 0;                                    // calls of ReadHere that are reading
  bool closing_ = false, ended_ = false, sleeping_ = false;
  uint64_t unended_ = 0;  // chunks under way when the transport was given up
  std::vector<std::atomic<bool>> alive_;
  std::atomic<uint64_t> bytes_{0}, reads_{0}, refused_{0}, timeouts_{0}, lost_{0}, losses_{0}, reconnects_{0};
  std::atomic<int64_t> wait_ns_{0};
  std::mutex join_;
  std::thread thread_;
  std::atomic<std::thread::id> thread_id_{};
};

}  // namespace gear_jax::transport

#endif  // GEAR_JAX_FFI_TRANSPORT_SESSION_LOOP_H_
