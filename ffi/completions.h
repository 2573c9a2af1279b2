// Threads that end calls whose data came on a thread that must not wait. Setting the promise of an FFI call may run the
// rest of a program, for as long as that takes; so each end gets a thread that nobody else needs meanwhile.
#ifndef GEAR_JAX_FFI_COMPLETIONS_H_
#define GEAR_JAX_FFI_COMPLETIONS_H_

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>

namespace gear_jax {

// As many threads as there were ends at once; idle ones are kept. Thread-safe.
class Completions {
 public:
  // The one of the process; it is never destroyed, because calls may be on their way when the process ends.
  static Completions& Global();

  // Runs `end` soon, on a thread that runs nothing else. Does not block.
  void Run(std::function<void()> end);

  int64_t threads();

 private:
  void Loop();

  std::mutex mutex_;
  std::condition_variable some_;
  std::deque<std::function<void()>> waiting_;
  int64_t idle_ = 0, threads_ = 0;
};

}  // namespace gear_jax

#endif  // GEAR_JAX_FFI_COMPLETIONS_H_
