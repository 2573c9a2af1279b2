// The phases of an update of the sum tree, run on the CPU and compared bit by bit with the CPU's own.
#include "cuda/sumtree_device.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "cuda/tests/sumtree_call.h"
#include "ffi/sumtree.h"

namespace gear_jax {
namespace {

// The launches, one thread after another; `marks`: writes that are told apart at a time.
void Update(Tree& host, const Writes& batch, int top, int64_t marks) {
  const DeviceTree tree = DeviceOf(host);
  const DeviceWrites writes = DeviceOf(batch);
  std::mt19937 random(2);
  for (int64_t first = 0; first < writes.count; first += marks) {
    const int64_t count = std::min(writes.count - first, marks);
    ForEachThread(count, random, [&](int64_t i) { Mark(tree, writes, first, i); });
    ForEachThread(count, random, [&](int64_t i) { Write(tree, writes, first, i); });
  }
  for (int level = 0; level < top; ++level) {
    ForEachThread(FormSize(tree, writes, level), random, [&](int64_t i) { Form(tree, writes, level, i); });
  }
  for (int level = top; level < tree.levels; ++level) {
    ForEachThread(tree.partitions * tree.nodes[level], random,
                  [&](int64_t i) { FormNode(tree, i % tree.partitions, level, i / tree.partitions); });
  }
}

TEST(Updates, AreThoseOfTheCpu) {
  for (const int64_t partitions : {1, 3}) {
    for (const int64_t leaves : kSizes) {
      for (const size_t count : {0, 1, 5, 40, 1000, 20000}) {
        const Writes writes(count, partitions * leaves, static_cast<uint32_t>(leaves));
        Tree cpu(partitions, leaves, Random(partitions * leaves, 9, 0.3));
        const Tree before = cpu;
        cpu.Update(writes);
        const int levels = static_cast<int>(cpu.layout.nodes.size());
        for (const int top : {0, 1, levels}) {
          for (const int64_t marks : {int64_t{7}, DeviceWrites::kMarks}) {
            Tree device = before;
            Update(device, writes, std::min(top, levels), marks);
            ASSERT_EQ(BitsOf(device.priority), BitsOf(cpu.priority));
            ASSERT_EQ(BitsOf(device.mass), BitsOf(cpu.mass));
            ASSERT_EQ(BitsOf(device.sums), BitsOf(cpu.sums));
          }
        }
      }
    }
  }
}

// Marks stand out from whatever the mass was, and what is written is stored as it is.
TEST(Updates, WhateverTheMassWas) {
  uint32_t x86_nan = 0xFFC00000;
  float nan;
  std::memcpy(&nan, &x86_nan, sizeof(nan));
  const std::vector<float> values = {0.0f, -0.0f, -1.0f, -1e-45f, 1e-45f, 3e38f, kInf, -kInf, kNaN, nan};
  for (const float before : values) {
    for (const float after : {0.0f, -0.0f, 1e-45f, 2.0f}) {
      Tree tree(1, 20);
      tree.mass.assign(20, before);
      Writes writes;
      for (int i = 0; i < 5; ++i) writes.slot.push_back(7), writes.priority.push_back(i), writes.mass.push_back(i);
      writes.mass.back() = after;
      Update(tree, writes, 0, DeviceWrites::kMarks);
      EXPECT_EQ(BitsOf({tree.mass[7]}), BitsOf({after}));
      EXPECT_EQ(tree.priority[7], 4);
      EXPECT_EQ(BitsOf({tree.mass[8]}), BitsOf({before}));
    }
  }
}

TEST(Updates, MarksAscend) {
  EXPECT_EQ(MarkOf(0), 0xFFC00001u);
  EXPECT_EQ(MarkOf(DeviceWrites::kMarks - 1), 0xFFFFFFFFu);
}

TEST(Updates, TheTopIsSmall) {
  EXPECT_EQ(TopLevel(DeviceTree(SumTreeLayout(1), 1)), 0);
  EXPECT_EQ(TopLevel(DeviceTree(SumTreeLayout(4096 * 16), 1)), 0);
  EXPECT_EQ(TopLevel(DeviceTree(SumTreeLayout(4096 * 16 + 1), 1)), 1);
  EXPECT_EQ(TopLevel(DeviceTree(SumTreeLayout(10'000'000), 1)), 2);
  EXPECT_EQ(TopLevel(DeviceTree(SumTreeLayout(4096 * 16), 1000)), 1);
  EXPECT_EQ(TopLevel(DeviceTree(SumTreeLayout(1), 1 << 20)), 1);  // no level is small
}

}  // namespace
}  // namespace gear_jax
