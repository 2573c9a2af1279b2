// Splits a piece of work over threads. Knows nothing of XLA: a handler brings the threads.
#ifndef GEAR_JAX_FFI_PARALLEL_H_
#define GEAR_JAX_FFI_PARALLEL_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>

namespace gear_jax {

// Work that falls into `size()` independent tasks, which may run in any order and on any thread.
class Work {
 public:
  virtual ~Work() = default;
  virtual int64_t size() const = 0;
  virtual void Run(int64_t task) = 0;

  // Runs tasks until none is left, and says how many it ran; called at once by as many threads as like to help.
  int64_t Drain() {
    int64_t ran = 0;
    for (int64_t task; (task = next_.fetch_add(1, std::memory_order_relaxed)) < size(); ++ran) Run(task);
    return ran;
  }

 private:
  std::atomic<int64_t> next_{0};
};

// Bytes below which a hand-over to another thread costs more than it saves.
inline constexpr int64_t kInlineBytes = 1 << 20;

// Bytes of one task: several for each thread, so that they end together, but not so small that the hand-over shows.
inline int64_t TaskBytes(int64_t total, int64_t threads) {
  const int64_t piece = total / std::max<int64_t>(1, threads * 4);
  return std::clamp<int64_t>(piece, 64 << 10, 2 << 20) / 64 * 64;
}

// Asks for huge pages behind a large buffer that is about to be written for the first time: a fault for every 4 KiB
// limits such a write to a few GB/s. A hint; without effect on memory that is already there.
void AdviseHugePages(void* data, int64_t bytes);

}  // namespace gear_jax

#endif  // GEAR_JAX_FFI_PARALLEL_H_
