#include "cuda/device_read.h"

#include <algorithm>
#include <mutex>
#include <utility>
#include <vector>

#include "cuda/host_wait.h"
#include "cuda/page_locked.h"

namespace gear_jax {
namespace {

// Page-locked memory, in as many pieces as there are reads at once. A piece begins with a word that counts its reads.
class HostPieces {
 public:
  struct Piece {
    uint8_t* memory = nullptr;
    int64_t capacity = 0;
    uint32_t reads = 0;  // mod 2^32
    uint32_t* word() const { return reinterpret_cast<uint32_t*>(memory); }
  };

  // Never destroyed: reads may be on their way when the process ends.
  static HostPieces& Global() {
    static HostPieces* const pieces = new HostPieces;
    return *pieces;
  }

  // A piece of at least `bytes` that nobody uses. Too small ones are replaced.
  StagingFault Take(int64_t bytes, Piece* piece) {
    Piece small;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      auto best = free_.end();
      for (auto it = free_.begin(); it != free_.end(); ++it) {
        if (it->capacity >= bytes && (best == free_.end() || it->capacity < best->capacity)) best = it;
      }
      if (best == free_.end() && !free_.empty()) best = std::prev(free_.end());
      if (best != free_.end()) {
        *piece = *best;
        free_.erase(best);
        if (piece->capacity >= bytes) return {};
        small = *piece;
      }
    }
    if (small.memory != nullptr) {
      const cudaError_t error = cudaFreeHost(small.memory);
      if (error != cudaSuccess) return {error, "replacing page-locked memory"};
    }
    uint8_t* memory = nullptr;
    if (StagingFault fault = AllocatePageLocked(bytes, &memory)) return fault;
    *piece = {memory, bytes, 0};
    *piece->word() = 0;
    return {};
  }

  void GiveBack(const Piece& piece) {
    const std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(piece);
  }

 private:
  std::mutex mutex_;
  std::vector<Piece> free_;
};

struct Travelling {
  std::shared_ptr<ReadRegions> read;
  std::function<void(const ReadRegions&)> ended;
  HostPieces::Piece piece;
};

void CUDART_CB Begin(void* data) {
  auto& travelling = *static_cast<Travelling*>(data);
  travelling.read->Start([word = travelling.piece.word(), reads = travelling.piece.reads] {
    __atomic_store_n(word, reads, __ATOMIC_RELEASE);
  });
}

void CUDART_CB End(void* data) {
  const std::unique_ptr<Travelling> travelling(static_cast<Travelling*>(data));
  travelling->ended(*travelling->read);
  HostPieces::Global().GiveBack(travelling->piece);
}

}  // namespace

StagingFault EnqueueRegionsRead(RegionsCall call, std::shared_ptr<transport::Reader> reader,
                                std::function<void(const ReadRegions&)> ended, cudaStream_t stream) {
  const auto shards = static_cast<int64_t>(call.shards.size());
  std::vector<int64_t> bytes{8, shards};
  for (const RegionsCall::Field& field : call.fields) bytes.push_back(shards * field.bytes);
  const StagingLayout layout(bytes);
  auto travelling = std::make_unique<Travelling>();
  HostPieces::Piece& piece = travelling->piece;
  if (StagingFault fault = HostPieces::Global().Take(layout.bytes, &piece)) return fault;
  ++piece.reads;
  // What is copied when it has come: to, from, bytes.
  std::vector<std::pair<void*, int64_t>> copies{{call.here, 1}};
  call.here = reinterpret_cast<bool*>(piece.memory + layout.offset[1]);
  for (size_t i = 0; i < call.fields.size(); ++i) {
    copies.emplace_back(call.fields[i].out, i + 2);
    call.fields[i].out = piece.memory + layout.offset[i + 2];
  }
  travelling->read = std::make_shared<ReadRegions>(std::move(call), std::move(reader));
  travelling->ended = std::move(ended);
  const HostPieces::Piece at = piece;
  cudaError_t error = cudaLaunchHostFunc(stream, Begin, travelling.get());
  if (error != cudaSuccess) {
    HostPieces::Global().GiveBack(at);
    return {error, "asking for the regions"};
  }
  Travelling* const on_its_way = travelling.release();  // End deletes it
  error = EnqueueHostWait(at.word(), at.reads, stream);
  for (const auto& [to, part] : copies) {
    if (error != cudaSuccess || bytes[part] == 0) continue;
    error = cudaMemcpyAsync(to, at.memory + layout.offset[part], bytes[part], cudaMemcpyHostToDevice, stream);
  }
  if (error == cudaSuccess) error = cudaLaunchHostFunc(stream, End, on_its_way);
  return {error, "copying the regions"};
}

}  // namespace gear_jax
