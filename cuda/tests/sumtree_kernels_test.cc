// sumtree_sample and sumtree_update on a GPU, compared bit by bit with the CPU's. Small enough for compute-sanitizer.
#include "cuda/sumtree_kernels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "cuda/tests/device.h"
#include "cuda/tests/sumtree_call.h"
#include "ffi/sumtree.h"

namespace gear_jax {
namespace {

class SumTreeKernels : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!HasDevice()) GTEST_SKIP() << "needs a GPU";
  }
};

// Draws on the device. It holds its own partitions only, so that compute-sanitizer sees what is read beyond them.
void ExpectSameDraws(const Tree& tree, const Batch& batch) {
  SCOPED_TRACE(std::to_string(tree.partitions) + " x " + std::to_string(tree.layout.leaves) + ", " +
               std::to_string(batch.draws) + " draws");
  const Tree held = tree.Held(batch.first, batch.Held(tree));
  Drawn drawn(batch.draws);
  const DeviceArray<float> mass(held.mass), sums(held.sums), roots(tree.Roots());
  const DeviceArray<int32_t> length(held.length), first({batch.first}), ticket({5}), ticket_out({-7});
  const DeviceArray<uint32_t> generation(held.generation), words(batch.Words()), generations(drawn.generation);
  const DeviceArray<int32_t> slots(drawn.slot), partitions(drawn.partition), lengths(drawn.length);
  const DeviceArray<float> probability(drawn.probability), least(drawn.least), total({-7});
  DeviceDraws draws = DrawsOf(tree, batch);
  draws.tree.mass = mass.data(), draws.tree.sums = sums.data();
  draws.first = first.data();
  draws.roots = {roots.data()};
  if (batch.held < 0) draws.roots = {sums.data() + tree.layout.root(), tree.layout.width};
  draws.length = length.data(), draws.generation = generation.data();
  (batch.from_key ? draws.key : draws.bits) = words.data();
  draws.rows = {slots.data(), partitions.data(), probability.data(), lengths.data(), generations.data(), least.data()};
  draws.total = total.data();
  draws.ticket = ticket.data(), draws.ticket_out = ticket_out.data();
  ASSERT_CUDA(LaunchSumTreeSample(draws, nullptr));
  ASSERT_CUDA(cudaDeviceSynchronize());
  drawn.slot = slots.Content(), drawn.partition = partitions.Content(), drawn.length = lengths.Content();
  drawn.generation = generations.Content();
  drawn.probability = probability.Content(), drawn.least = least.Content();
  drawn.total = total.Content()[0];
  EXPECT_EQ(ticket_out.Content(), std::vector<int32_t>{5});
  ExpectSame(drawn, OnCpu(tree, batch));
}

TEST_F(SumTreeKernels, DrawsAreThoseOfTheCpu) {
  for (const int64_t partitions : {1, 3}) {
    for (const int64_t leaves : kSizes) {
      std::vector<float> values = Random(partitions * leaves, 3, 0.6);
      values[values.size() / 2] = 1e-30f;
      const Tree tree(partitions, leaves, values);
      for (const int64_t draws : {0, 1, 300, 3000}) {
        for (const bool stratified : {false, true}) {
          ExpectSameDraws(tree, {draws, stratified, true});
          ExpectSameDraws(tree, {draws, stratified, false});
        }
      }
    }
  }
}

// 8192 nodes to begin with take more shared memory than a block has without asking; more draws than threads.
TEST_F(SumTreeKernels, DrawsFromALargeTable) {
  for (const auto& [partitions, leaves] : {std::pair<int64_t, int64_t>{1, 1 << 17}, {1, 300001}, {3, 40001}}) {
    const Tree tree(partitions, leaves, Random(partitions * leaves, 4, 0.1));
    for (const int64_t draws : {1, 20000, 300000}) ExpectSameDraws(tree, {draws, false, true});
    ExpectSameDraws(tree, {20000, true, true});
  }
}

TEST_F(SumTreeKernels, DrawsFromManyPartitions) {
  const Tree tree(8000, 20, Random(160000, 5, 0.5));
  ExpectSameDraws(tree, {5000, false, true});
  int64_t limit = 0;
  ASSERT_CUDA(SharedMemoryLimit(&limit));
  EXPECT_GE(limit, 99 << 10);
}

TEST_F(SumTreeKernels, DrawsFromPartitionsHeldApartAndFromNone) {
  const Tree tree(8, 37, Random(8 * 37, 6, 0.3));
  for (const int32_t first : {0, 3, 6}) {
    for (const int64_t draws : {5, 3000}) ExpectSameDraws(tree, {draws, false, false, first, 2});
  }
  for (const int64_t partitions : {0, 1, 3}) ExpectSameDraws(Tree(partitions, 20), {300});
}

// The CPU thread takes denormals for zero, as XLA's do.
TEST_F(SumTreeKernels, Denormals) {
  for (const int64_t leaves : kSizes) {
    std::vector<float> values(3 * leaves, 0.0f);
    for (size_t i = 0; i < values.size(); i += 3) values[i] = 5e-39f;
    const Tree counted(3, leaves, values);
    FlushDenormals flush;
    ExpectSameDraws(counted, {3000});
    ExpectSameDraws(Tree(3, leaves, values), {3000});
  }
}

void ExpectSameUpdate(Tree tree, const Writes& writes) {
  const DeviceArray<float> priority(tree.priority), mass(tree.mass), sums(tree.sums);
  const DeviceArray<int32_t> slot(writes.slot);
  const DeviceArray<float> new_priority(writes.priority), new_mass(writes.mass);
  DeviceTree device(tree.layout, tree.partitions);
  device.priority = priority.data(), device.mass = mass.data(), device.sums = sums.data();
  const int64_t count = static_cast<int64_t>(writes.slot.size());
  ASSERT_CUDA(LaunchSumTreeUpdate(device, {count, slot.data(), new_priority.data(), new_mass.data()}, nullptr));
  ASSERT_CUDA(cudaDeviceSynchronize());
  tree.Update(writes);
  ASSERT_EQ(BitsOf(priority.Content()), BitsOf(tree.priority)) << count << " writes";
  ASSERT_EQ(BitsOf(mass.Content()), BitsOf(tree.mass)) << count << " writes";
  ASSERT_EQ(BitsOf(sums.Content()), BitsOf(tree.sums)) << count << " writes";
}

// Up to 4096 writes are one block's, more are several kernels'.
TEST_F(SumTreeKernels, UpdatesAreThoseOfTheCpu) {
  for (const int64_t partitions : {0, 1, 3}) {
    for (const int64_t leaves : kSizes) {
      const Tree tree(partitions, leaves, Random(partitions * leaves, 9, 0.3));
      for (const size_t count : {0, 1, 40, 1000, 4096, 4097, 20000}) {
        ExpectSameUpdate(tree, Writes(count, partitions * leaves, static_cast<uint32_t>(leaves)));
      }
    }
  }
}

TEST_F(SumTreeKernels, UpdatesOfALargeTable) {
  for (const auto& [partitions, leaves] : {std::pair<int64_t, int64_t>{1, 3000001}, {40, 70001}, {20000, 17}}) {
    const Tree tree(partitions, leaves, Random(partitions * leaves, 10, 0.3));
    for (const size_t count : {1000, 4096, 5000, 100000})
      ExpectSameUpdate(tree, Writes(count, partitions * leaves, 11));
  }
}

}  // namespace
}  // namespace gear_jax
