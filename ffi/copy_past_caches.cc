#include "ffi/copy_past_caches.h"

#include <algorithm>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace gear_jax {

#if defined(__x86_64__)

void CopyPastCaches(uint8_t* to, const uint8_t* from, int64_t bytes) {
  constexpr int64_t kLine = 64, kAhead = 512;
  const int64_t head = std::min<int64_t>(bytes, -reinterpret_cast<uintptr_t>(to) % kLine);
  if (head > 0) std::memcpy(to, from, head);
  to += head, from += head, bytes -= head;
  for (; bytes >= kLine; to += kLine, from += kLine, bytes -= kLine) {
    // By address: beyond the end it may be no memory, which a hint does not mind.
    _mm_prefetch(reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(from) + kAhead), _MM_HINT_T0);
    __m128i part[4];
    for (int i = 0; i < 4; ++i) part[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + i);
    for (int i = 0; i < 4; ++i) _mm_stream_si128(reinterpret_cast<__m128i*>(to) + i, part[i]);
  }
  if (bytes > 0) std::memcpy(to, from, bytes);
}

void FencePastCaches() { _mm_sfence(); }

#else

void CopyPastCaches(uint8_t* to, const uint8_t* from, int64_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}

void FencePastCaches() {}

#endif

}  // namespace gear_jax
