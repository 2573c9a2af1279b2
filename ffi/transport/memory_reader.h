// A Reader of memory of this process alone: for a job of one process, and for tests of what stands on a Reader.
#ifndef GEAR_JAX_FFI_TRANSPORT_MEMORY_READER_H_
#define GEAR_JAX_FFI_TRANSPORT_MEMORY_READER_H_

#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "ffi/transport/reader.h"

namespace gear_jax::transport {

struct MemoryRegion {
  const void* data;
  uint64_t bytes;
};

// Several "peers" may be told apart, all of them in this process's memory; `self` is one of them. Reads run in order on
// a thread of its own. The memory must live as long as the reader.
class MemoryReader final : public Reader {
 public:
  // `regions[p]` are those of peer p.
  MemoryReader(int32_t self, std::vector<std::vector<MemoryRegion>> regions);
  ~MemoryReader() override;  // ends what is under way as kClosed

  void Read(std::vector<Piece> pieces, Done done) override;
  bool Alive(int32_t peer) const override;
  int32_t self() const override { return self_; }
  int32_t peers() const override;
  uint64_t RegionBytes(int32_t peer, int32_t region) const override;
  const void* OwnRegion(int32_t region) const override;

  // Whether a peer answers from now on. Thread-safe.
  void SetAlive(int32_t peer, bool alive);

 private:
  struct State;  // shared with the thread, which may outlive the reader by its last `done`

  const int32_t self_;
  const std::shared_ptr<State> state_;
  std::thread thread_;
};

}  // namespace gear_jax::transport

#endif  // GEAR_JAX_FFI_TRANSPORT_MEMORY_READER_H_
