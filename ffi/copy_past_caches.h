// Copies of what is not read again soon. A store that goes to memory directly spares it the read of each line that is
// written, a third of a copy's traffic, and leaves in the caches what was there.
#ifndef GEAR_JAX_FFI_COPY_PAST_CACHES_H_
#define GEAR_JAX_FFI_COPY_PAST_CACHES_H_

#include <cstdint>
#include <cstring>

namespace gear_jax {

// Bytes of a copy below which it does not pay.
inline constexpr int64_t kLeastPastCaches = 1024;

// Bytes that a call writes, or may write to, from which on they are not in the caches when they are read. By
// measurement: what the system says of its caches may be anything in a virtual machine.
inline constexpr int64_t kPastCachesBytes = 16 << 20;

// As memcpy. Where the processor has such stores, others see them in order only after FencePastCaches on this thread.
void CopyPastCaches(uint8_t* to, const uint8_t* from, int64_t bytes);
void FencePastCaches();

// A copy of a call that may go past the caches, where it pays.
inline void CopyBytes(uint8_t* to, const uint8_t* from, int64_t bytes, bool past_caches) {
  if (past_caches && bytes >= kLeastPastCaches) {
    CopyPastCaches(to, from, bytes);
  } else {
    std::memcpy(to, from, bytes);
  }
}

}  // namespace gear_jax

#endif  // GEAR_JAX_FFI_COPY_PAST_CACHES_H_
