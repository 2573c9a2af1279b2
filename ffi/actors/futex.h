// Waiting for a word of shared memory to change, across processes, with a deadline.
#ifndef GEAR_JAX_FFI_ACTORS_FUTEX_H_
#define GEAR_JAX_FFI_ACTORS_FUTEX_H_

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

namespace gear_jax {
namespace actors {

// Nanoseconds of CLOCK_MONOTONIC, which all processes of a machine share.
inline int64_t Now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t{t.tv_sec} * 1000000000 + t.tv_nsec;
}

static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t) && std::atomic<uint32_t>::is_always_lock_free, "");
static_assert(sizeof(std::atomic<uint64_t>) == sizeof(uint64_t) && std::atomic<uint64_t>::is_always_lock_free, "");

// Returns once `word` may differ from `seen`, or `deadline` (of Now) has passed, or for no reason.
inline void FutexWait(std::atomic<uint32_t>& word, uint32_t seen, int64_t deadline) {
  if (deadline <= 0) return;
  timespec t;
  t.tv_sec = static_cast<time_t>(deadline / 1000000000);
  t.tv_nsec = static_cast<long>(deadline % 1000000000);
  // Not private: the waker is another process. Of the BITSET form the deadline is a point in time.
  syscall(SYS_futex, &word, FUTEX_WAIT_BITSET, seen, &t, nullptr, FUTEX_BITSET_MATCH_ANY);
}

inline void FutexWake(std::atomic<uint32_t>& word) { syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX); }

// Tells those who wait for it that something happened. The call to the kernel is left out where nobody waits.
inline void Notify(std::atomic<uint32_t>& events, const std::atomic<uint32_t>& waiting) {
  events.fetch_add(1, std::memory_order_seq_cst);
  if (waiting.load(std::memory_order_seq_cst) != 0) FutexWake(events);
}

// Waits until `done()`, asking again after each event; false if `deadline` passes first. A wait of more than
// `slice` nanoseconds is cut, so that a peer that dies between its deed and its call costs that much, not the deadline.
template <typename Done>
bool AwaitEvent(std::atomic<uint32_t>& events, std::atomic<uint32_t>& waiting, int64_t deadline, Done done,
                int64_t slice = 50000000) {
  if (done()) return true;
  bool got = false;
  while (!got) {
    // Whoever changes something first changes it, then counts the event, then looks whether anyone waits; here it is
    // the other way round, so one of the two sees the other.
    waiting.store(1, std::memory_order_seq_cst);
    const uint32_t seen = events.load(std::memory_order_seq_cst);
    got = done();
    const int64_t now = Now();
    if (got || now >= deadline) break;
    FutexWait(events, seen, deadline - now > slice ? now + slice : deadline);
    got = done();
  }
  waiting.store(0, std::memory_order_seq_cst);
  return got;
}

}  // namespace actors
}  // namespace gear_jax

#endif  // GEAR_JAX_FFI_ACTORS_FUTEX_H_
