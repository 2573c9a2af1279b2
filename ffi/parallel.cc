#include "ffi/parallel.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace gear_jax {

void AdviseHugePages(void* data, int64_t bytes) {
#if defined(__linux__)
  constexpr uintptr_t kHuge = 2 << 20;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + kHuge - 1) / kHuge * kHuge;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + static_cast<uintptr_t>(bytes)) / kHuge * kHuge;
  if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)data, (void)bytes;
#endif
}

}  // namespace gear_jax
