// The draws of the sum tree's kernel, made on the CPU and compared bit by bit with the CPU's own.
#include "cuda/sumtree_draw.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cuda/tests/sumtree_call.h"
#include "ffi/sumtree.h"

namespace gear_jax {
namespace {

// What the kernel does, one thread after another between its barriers. The trees are copied, so that whatever the
// device reads beyond its own partitions is beyond the memory.
Drawn Emulated(const Tree& tree, const Batch& batch, int threads = 64) {
  const std::vector<uint32_t> words = batch.Words();
  const std::vector<float> roots = tree.Roots();
  Tree held = tree.Held(batch.first, batch.Held(tree));
  Drawn drawn(batch.draws);
  DeviceDraws draws = DrawsOf(tree, batch);
  draws.tree = DeviceOf(held);
  draws.first = &batch.first;
  draws.roots = {roots.data()};
  draws.length = held.length.data(), draws.generation = held.generation.data();
  draws.bits = batch.from_key ? nullptr : words.data();
  draws.key = words.data();
  draws.rows = drawn.Rows();
  std::mt19937 random(1);
  std::vector<double> memory((draws.MemoryBytes() + 7) / 8, std::numeric_limits<double>::quiet_NaN());
  for (const auto& step : {SumGroups, SumBlocks, SumAll}) {
    ForEachThread(threads, random, [&](int64_t t) { step(draws, memory.data(), static_cast<int>(t), threads); });
  }
  drawn.total = Narrow(Total(draws, memory.data()));
  std::vector<uint32_t> least(drawn.least.size(), LeastBits(0));
  for (int64_t i = 0; i < batch.draws; ++i) {
    const uint32_t bits = LeastBits(Draw(draws, memory.data(), i));
    least[i / kDrawGroup] = std::min(least[i / kDrawGroup], bits);
  }
  if (!least.empty()) std::memcpy(drawn.least.data(), least.data(), 4 * least.size());
  return drawn;
}

void ExpectSame(const Tree& tree, const Batch& batch) {
  SCOPED_TRACE(std::to_string(tree.partitions) + " x " + std::to_string(tree.layout.leaves) + ", " +
               std::to_string(batch.draws) + " draws");
  ExpectSame(Emulated(tree, batch), OnCpu(tree, batch));
}

TEST(Words, AreThoseOfThePythonFunction) {
  // gear_jax._random.threefry(1, 2, 0x67656172, [0, 1, 4000000000])
  const uint32_t key[2] = {1, 2};
  const uint32_t counter[] = {0, 1, 4000000000};
  const uint32_t wanted[3][2] = {{0x47914d40, 0xaadca6f7}, {0xfa032b60, 0x577b4176}, {0xa68a55c1, 0x3a7ac4c8}};
  for (int i = 0; i < 3; ++i) {
    uint32_t high, low;
    Threefry<1>(key, counter[i], &high, &low);
    EXPECT_EQ(high, wanted[i][0]);
    EXPECT_EQ(low, wanted[i][1]);
  }
}

TEST(Words, DoNotDependOnHowManyAreMadeAtOnce) {
  const uint32_t key[2] = {0xDEADBEEF, 7};
  uint32_t high[32], low[32];
  Threefry<32>(key, 1000, high, low);
  for (uint32_t i = 0; i < 32; ++i) {
    uint32_t h, l;
    Threefry<1>(key, 1000 + i, &h, &l);
    EXPECT_EQ(h, high[i]);
    EXPECT_EQ(l, low[i]);
  }
}

TEST(PrefixSums, OrderAndSearch) {
  for (const int32_t n : {0, 1, 15, 16, 17, 255, 256, 257, 271, 272, 4096, 4097, 8192, 20000}) {
    const std::vector<float> values = Random(n, n, 0.3);
    std::vector<double> memory(PrefixSums::Size(n)), wanted(1, 0.0);
    const PrefixSums sums(memory.data(), n);
    for (int32_t group = 0; group < PrefixSums::Groups(n); ++group) {
      const Children value = ReadChildren(values.data() + 16 * group, n - 16 * group);
      sums.SumGroup(group, value.v);
    }
    for (int32_t block = 0; block < PrefixSums::Blocks(n); ++block) sums.SumBlock(block);
    sums.SumAll();
    double outer = 0, inner = 0, within = 0;
    for (int32_t i = 1; i <= n; ++i) {
      within += values[i - 1];
      if (i % 16 == 0) inner += within, within = 0;
      if (i % 256 == 0) outer += inner, inner = 0;
      wanted.push_back(outer + (inner + within));
    }
    for (int32_t i = 0; i <= n; ++i) {
      ASSERT_EQ(sums.Before(i), wanted[i]) << i << " of " << n;
      for (const double target : {wanted[i], std::nextafter(wanted[i], -1.0), std::nextafter(wanted[i], 1e300)}) {
        if (target < 0) continue;
        const auto above = std::upper_bound(wanted.begin() + 1, wanted.end(), target);
        ASSERT_EQ(sums.Find(target), above - wanted.begin() - 1) << i << " of " << n;
      }
    }
    EXPECT_EQ(sums.Find(std::numeric_limits<double>::quiet_NaN()), n);
  }
}

// One draw begins at the root, 20000 at a level of up to 8192 nodes.
TEST(Draws, AreThoseOfTheCpu) {
  for (const int64_t partitions : {1, 3, 20}) {
    for (const int64_t leaves : kSizes) {
      for (const double zeros : {0.0, 0.6, 0.97}) {
        std::vector<float> values = Random(partitions * leaves, 3, zeros);
        values[values.size() / 2] = 1e-30f;
        Tree tree(partitions, leaves, values);
        for (const int64_t draws : {1, 33, 300, 3000}) {
          for (const bool stratified : {false, true}) {
            ExpectSame(tree, {draws, stratified, true});
            ExpectSame(tree, {draws, stratified, false});
          }
        }
      }
    }
  }
}

TEST(Draws, FromALargeTable) {
  for (const auto& [partitions, leaves] : {std::pair<int64_t, int64_t>{1, 1 << 17}, {1, 300001}, {3, 40001}}) {
    Tree tree(partitions, leaves, Random(partitions * leaves, 4, 0.1));
    for (const int64_t draws : {1, 20000}) ExpectSame(tree, {draws, false, true});
    ExpectSame(tree, {20000, true, true});
    FlushDenormals flush;
    ExpectSame(tree, {20000, false, true});
  }
}

// Many partitions: draws begin at the root, and prefix sums of the roots are all there is.
TEST(Draws, FromManyPartitions) {
  Tree tree(5000, 20, Random(100000, 5, 0.5));
  for (const int64_t draws : {1, 20000}) ExpectSame(tree, {draws, false, true});
}

// The last of some strata ends where rounding says that all mass does, and behind that partitions have none.
TEST(Draws, BeyondTheEnd) {
  std::vector<float> values = Random(5 * 37, 8, 0.3);
  std::fill(values.begin() + 2 * 37 + 20, values.end(), 0.0f);
  Tree tree(5, 37, values);
  for (int64_t draws = 1; draws < 500; ++draws) {
    ExpectSame(tree, {draws, true});
    ASSERT_GT(Emulated(tree, {draws, true}).probability.back(), 0) << draws << " draws";
  }
}

TEST(Draws, OneHugeMassAmongTinyOnes) {
  for (const int64_t leaves : kSizes) {
    std::vector<float> values(3 * leaves, 1e-30f);
    values[leaves + leaves / 2] = 3e38f;
    Tree tree(3, leaves, values);
    ExpectSame(tree, {3000, false, true});
    ExpectSame(tree, {3000, true, true});
  }
}

TEST(Draws, Denormals) {
  for (const int64_t leaves : kSizes) {
    std::vector<float> values(3 * leaves, 0.0f);
    for (size_t i = 0; i < values.size(); i += 3) values[i] = 5e-39f;
    Tree counted(3, leaves, values);  // its sums may be normal
    for (const int64_t draws : {1, 3000}) {
      ExpectSame(counted, {draws, false, true});
      FlushDenormals flush;
      ExpectSame(counted, {draws, false, true});
      for (const int32_t s : Emulated(counted, {draws, false, true}).slot) {
        ASSERT_TRUE(s == -1 || values[s] > 0 || BitsOf(values)[s] != 0) << s;
      }
      Tree flushed(3, leaves, values);
      const Drawn drawn = Emulated(flushed, {draws});
      EXPECT_EQ(drawn.slot, std::vector<int32_t>(draws, -1));
      EXPECT_EQ(drawn.probability, std::vector<float>(draws, 0.0f));
      EXPECT_EQ(BitsOf({drawn.total}), BitsOf({0.0f}));
    }
  }
}

TEST(Draws, NoMass) {
  for (const int64_t partitions : {0, 1, 3}) {
    Tree tree(partitions, 20);
    for (const int64_t draws : {0, 1, 300}) {
      ExpectSame(tree, {draws});
      EXPECT_EQ(Emulated(tree, {draws}).slot, std::vector<int32_t>(draws, -1));
    }
  }
}

TEST(Draws, PartitionsHeldApart) {
  Tree tree(8, 37, Random(8 * 37, 6, 0.3));
  for (const bool stratified : {false, true}) {
    for (const int64_t draws : {5, 3000}) {
      const Drawn whole = Emulated(tree, {draws, stratified});
      for (const int64_t held : {1, 2, 4, 8}) {
        for (int32_t first = 0; first < 8; first += static_cast<int32_t>(held)) {
          const Batch batch{draws, stratified, false, first, held};
          ExpectSame(tree, batch);
          const Drawn part = Emulated(tree, batch);
          for (int64_t i = 0; i < draws; ++i) {
            const bool here = whole.slot[i] / 37 >= first && whole.slot[i] / 37 < first + held;
            ASSERT_EQ(part.slot[i], here ? whole.slot[i] : -1);
            ASSERT_EQ(part.partition[i], whole.partition[i]);
          }
        }
      }
    }
  }
}

TEST(Draws, SumsThatOverflow) {
  for (const int64_t leaves : kSizes) {
    std::vector<float> values(3 * leaves, 3e38f);
    for (size_t i = 0; i < values.size(); i += 2) values[i] = 0;
    values[1] = 3e38f;
    Tree tree(3, leaves, values);
    for (const bool stratified : {false, true}) {
      for (const int64_t draws : {1, 3000}) {
        for (const int32_t s : Emulated(tree, {draws, stratified}).slot) {
          ASSERT_GE(s, 0);
          ASSERT_LT(s, 3 * leaves);
          ASSERT_GT(tree.mass[s], 0);
        }
      }
    }
  }
}

// Nothing may be read outside the arrays, whatever is in them.
TEST(Draws, SumsOfAnotherMass) {
  for (const int64_t leaves : kSizes) {
    for (const float sum : {0.0f, 1.0f, -1.0f, kInf, kNaN}) {
      for (const float value : {0.0f, 1.0f, -1.0f, kInf, kNaN}) {
        Tree tree(2, leaves);
        tree.sums.assign(tree.sums.size(), sum);
        tree.mass.assign(tree.mass.size(), value);
        for (const int64_t draws : {1, 15, 300, 3000}) {
          for (const int32_t s : Emulated(tree, {draws}).slot) {
            ASSERT_GE(s, sum == 1.0f ? 0 : -1);
            ASSERT_LT(s, 2 * leaves);
          }
        }
      }
    }
  }
}

// More than the children have: draws go to the last of the padded children, which is no node.
TEST(Draws, RootsLargerThanTheirSums) {
  for (const int64_t leaves : kSizes) {
    Tree tree(2, leaves);
    tree.sums.assign(tree.sums.size(), 1.0f);
    tree.mass.assign(tree.mass.size(), 1.0f);
    for (int64_t p = 0; p < 2; ++p) tree.sums[p * tree.layout.width + tree.layout.root()] = 1e6f;
    for (const int64_t draws : {1, 15, 300, 3000}) ExpectSame(tree, {draws});
  }
}

}  // namespace
}  // namespace gear_jax
