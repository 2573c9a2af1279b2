// What the CPU handlers share: work spread over XLA's thread pool.
#ifndef GEAR_JAX_FFI_CPU_H_
#define GEAR_JAX_FFI_CPU_H_

#include <cstdint>
#include <memory>
#include <utility>

#include "ffi/errors.h"
#include "ffi/parallel.h"
#include "xla/ffi/api/ffi.h"

namespace gear_jax {

inline xla::ffi::Future Failed(const xla::ffi::Error& error) {
  xla::ffi::Promise promise;
  promise.SetError(error);
  return xla::ffi::Future(promise);
}

// Runs the work on the pool's threads and on this one. This thread never waits for another: the pool may have a single
// thread, and that may be this one. The future is there with the last task, not with the last thread: one that wakes
// too late to help holds nobody up.
inline xla::ffi::Future Spread(xla::ffi::ThreadPool& pool, std::shared_ptr<Work> work, int64_t bytes) {
  const int64_t tasks = work->size();
  if (tasks == 0) {
    xla::ffi::Promise promise;
    promise.SetAvailable();
    return xla::ffi::Future(promise);
  }
  xla::ffi::CountDownPromise left(tasks);
  xla::ffi::Future future(left);
  auto help = [work, left]() mutable {
    if (const int64_t ran = work->Drain()) left.CountDown(ran);
  };
  const int64_t helpers = bytes < kInlineBytes ? 0 : std::min(pool.num_threads(), tasks) - 1;
  for (int64_t i = 0; i < helpers; ++i) {
    auto copy = help;
    pool.Schedule(std::move(copy));
  }
  help();
  return future;
}

}  // namespace gear_jax

#endif  // GEAR_JAX_FFI_CPU_H_
