// zeros on a GPU.
#include "cuda/zeros_kernels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "cuda/tests/device.h"

namespace gear_jax {
namespace {

class ZerosKernels : public ::testing::TestWithParam<bool> {};

TEST_P(ZerosKernels, ZeroAllBytesAndNoOthers) {
  if (!HasDevice()) GTEST_SKIP() << "needs a GPU";
  constexpr int64_t kGuard = 64;
  for (const int64_t bytes : {0, 1, 15, 16, 17, 4097, 131072, (9 << 20) + 17}) {
    for (const int64_t shift : {0, 1, 8, 15}) {
      const DeviceArray<uint8_t> memory(std::vector<uint8_t>(bytes + shift + 2 * kGuard, 0xAB), GetParam());
      ASSERT_CUDA(LaunchZeros(memory.data() + kGuard + shift, bytes, nullptr));
      ASSERT_CUDA(cudaDeviceSynchronize());
      const std::vector<uint8_t> got = memory.Content();
      const auto begin = got.begin() + kGuard + shift, end = begin + bytes;
      EXPECT_EQ(std::count(begin, end, 0), bytes);
      EXPECT_EQ(std::count(got.begin(), begin, 0xAB), kGuard + shift);
      EXPECT_EQ(std::count(end, got.end(), 0xAB), kGuard);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Memory, ZerosKernels, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "OfTheHost" : "OfTheDevice"; });

}  // namespace
}  // namespace gear_jax
