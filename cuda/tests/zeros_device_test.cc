// The work of the kernel of zeros, run on the CPU.
#include "cuda/zeros_device.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace gear_jax {
namespace {

constexpr int64_t kGuard = 64;

TEST(ZeroShare, AllThreadsTogetherZeroAllBytesAndNoOthers) {
  for (const int64_t bytes : {0, 1, 2, 15, 16, 17, 31, 32, 33, 1000, 4096, 65537}) {
    for (int64_t shift = 0; shift < 16; ++shift) {
      for (const int64_t threads : {1, 7, 512}) {
        std::vector<uint8_t> memory(bytes + shift + 2 * kGuard, 0xAB);
        const auto begin = memory.begin() + kGuard + shift, end = begin + bytes;
        for (int64_t t = 0; t < threads; ++t) ZeroShare(&*begin, bytes, t, threads);
        ASSERT_EQ(std::count(begin, end, 0), bytes);
        ASSERT_EQ(std::count(memory.begin(), begin, 0xAB), kGuard + shift);
        ASSERT_EQ(std::count(end, memory.end(), 0xAB), kGuard);
      }
    }
  }
}

TEST(ZeroShare, ThreadsDoNotShareBytes) {
  std::vector<uint8_t> memory(1000, 0xAB);
  int64_t zeroed = 0;
  for (int64_t t = 0; t < 32; ++t) {
    std::vector<uint8_t> alone(memory);
    ZeroShare(alone.data() + 3, 990, t, 32);
    zeroed += std::count(alone.begin(), alone.end(), 0);
  }
  EXPECT_EQ(zeroed, 990);
}

}  // namespace
}  // namespace gear_jax
