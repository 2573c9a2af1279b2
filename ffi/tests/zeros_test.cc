#include "ffi/zeros.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <thread>
#include <vector>

namespace gear_jax {
namespace {

constexpr int64_t kPiece = 4 << 20;
constexpr int64_t kGuard = 64;

void DrainWith(Work& work, int threads) {
  std::vector<std::thread> helpers;
  for (int i = 1; i < threads; ++i) helpers.emplace_back([&work] { work.Drain(); });
  work.Drain();
  for (std::thread& t : helpers) t.join();
}

class ZerosTest : public testing::TestWithParam<std::tuple<int64_t, int>> {};

TEST_P(ZerosTest, ZeroesAllItsBytesAndNoOthers) {
  const auto [bytes, threads] = GetParam();
  std::vector<uint8_t> memory(bytes + 2 * kGuard, 0xAB);
  Zeros work(memory.data() + kGuard, bytes);
  EXPECT_EQ(work.size(), (bytes + kPiece - 1) / kPiece);
  DrainWith(work, threads);
  const auto begin = memory.begin() + kGuard, end = begin + bytes;
  EXPECT_EQ(std::count(begin, end, 0), bytes);
  EXPECT_EQ(std::count(memory.begin(), begin, 0xAB), kGuard);
  EXPECT_EQ(std::count(end, memory.end(), 0xAB), kGuard);
}

INSTANTIATE_TEST_SUITE_P(Sizes, ZerosTest,
                         testing::Combine(testing::Values(0, 1, 63, kPiece - 1, kPiece, kPiece + 1, 5 * kPiece + 7),
                                          testing::Values(1, 2, 4)));

TEST(Zeros, EachTaskRunsOnceWhoeverTakesIt) {
  std::vector<uint8_t> memory(7 * kPiece);
  Zeros work(memory.data(), static_cast<int64_t>(memory.size()));
  std::vector<int64_t> ran(4);
  std::vector<std::thread> threads;
  for (int64_t& count : ran) threads.emplace_back([&] { count = work.Drain(); });
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(ran[0] + ran[1] + ran[2] + ran[3], work.size());
  EXPECT_EQ(work.Drain(), 0);
}

TEST(Zeros, MemoryThatIsNotAtAPageBoundaryIsFine) {
  std::vector<uint8_t> memory(3 * kPiece, 1);
  Zeros work(memory.data() + 5, 2 * kPiece);
  work.Drain();
  EXPECT_EQ(memory[4], 1);
  EXPECT_EQ(memory[5], 0);
  EXPECT_EQ(memory[2 * kPiece + 4], 0);
  EXPECT_EQ(memory[2 * kPiece + 5], 1);
}

}  // namespace
}  // namespace gear_jax
