#include "ffi/copy_past_caches.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <vector>

namespace gear_jax {
namespace {

// Every byte, and no other; wherever source and target begin and end, the source at the very end of its memory.
TEST(CopyPastCaches, CopiesAsMemcpy) {
  for (const int64_t bytes : {0, 1, 15, 16, 63, 64, 65, 127, 128, 200, 1024, 5000}) {
    for (const int64_t from : {0, 1, 8, 63}) {
      for (const int64_t to : {0, 1, 16, 33, 63}) {
        std::vector<uint8_t> source(from + bytes), target(to + bytes + 70, 0xCD);
        std::iota(source.begin(), source.end(), uint8_t{1});
        std::vector<uint8_t> wanted = target;
        std::copy(source.begin() + from, source.end(), wanted.begin() + to);
        CopyPastCaches(target.data() + to, source.data() + from, bytes);
        FencePastCaches();
        ASSERT_EQ(target, wanted) << bytes << " bytes from " << from << " to " << to;
      }
    }
  }
}

}  // namespace
}  // namespace gear_jax
