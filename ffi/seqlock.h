// The order of a seqlock's words and the bytes between them, for readers in other processes. No XLA, no Python.
#ifndef GEAR_JAX_FFI_SEQLOCK_H_
#define GEAR_JAX_FFI_SEQLOCK_H_

#include <atomic>
#include <cstdint>

namespace gear_jax {

// Before the bytes: the odd stamp is seen no later than any of them. A full fence, for memcpy may copy large pieces by
// non-temporal stores, which on x86 stay behind an earlier store only where a fence says so. ThreadSanitizer knows no
// fences; it does not see the readers either, which are in other processes or are network cards.
inline void FenceAfterOpening() {
#if !defined(__SANITIZE_THREAD__)
  std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
}

// All that this thread has written before is seen no later than the stamp.
inline void StoreStamp(uint32_t* stamp, uint32_t value) { __atomic_store_n(stamp, value, __ATOMIC_RELEASE); }

// Nothing that this thread reads after is older than the stamp.
inline uint32_t LoadStamp(const uint32_t* stamp) { return __atomic_load_n(stamp, __ATOMIC_ACQUIRE); }

// After the bytes were read: a stamp that is loaded now is no older than they are.
inline void FenceBeforeClosing() {
#if !defined(__SANITIZE_THREAD__)
  std::atomic_thread_fence(std::memory_order_acquire);
#endif
}

}  // namespace gear_jax

#endif  // GEAR_JAX_FFI_SEQLOCK_H_
