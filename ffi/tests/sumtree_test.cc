#include "ffi/sumtree.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "ffi/tests/sumtree_tree.h"

namespace gear_jax {
namespace {

// The sums of one partition, in the order that the header states.
std::vector<float> Sums(const std::vector<float>& leaves) {
  std::vector<float> row, below = leaves;
  do {
    below.resize((below.size() + 15) / 16 * 16, 0.0f);
    std::vector<float> here;
    for (size_t i = 0; i < below.size(); i += 16) {
      std::vector<float> child(below.begin() + i, below.begin() + i + 16);
      for (size_t half = 8; half > 0; half /= 2) {
        for (size_t k = 0; k < half; ++k) child[k] += child[k + half];
      }
      here.push_back(child[0]);
    }
    below = here;
    here.resize((here.size() + 15) / 16 * 16, 0.0f);
    row.insert(row.end(), here.begin(), here.end());
  } while (below.size() > 1);
  return row;
}

void Check(const Tree& tree) {
  for (int64_t p = 0; p < tree.partitions; ++p) {
    const auto leaf = tree.mass.begin() + p * tree.layout.leaves;
    const std::vector<float> wanted = Sums(std::vector<float>(leaf, leaf + tree.layout.leaves));
    const auto row = tree.sums.begin() + p * tree.layout.width;
    ASSERT_EQ(std::vector<float>(row, row + tree.layout.width), wanted) << "partition " << p;
  }
}

TEST(SumTreeLayout, Levels) {
  EXPECT_EQ(SumTreeLayout(1).width, 16);
  EXPECT_EQ(SumTreeLayout(16).width, 16);
  EXPECT_EQ(SumTreeLayout(17).width, 32);
  EXPECT_EQ(SumTreeLayout(257).width, 32 + 16 + 16);
  for (const int64_t leaves : kSizes) {
    const SumTreeLayout layout(leaves);
    EXPECT_EQ(layout.nodes.back(), 1);
    EXPECT_EQ(layout.root(), layout.width - 16);
    EXPECT_EQ(layout.width, static_cast<int64_t>(Sums(std::vector<float>(leaves)).size()));
  }
}

TEST(SumTreeUpdate, PathsAndRebuildsAgree) {
  for (const int64_t leaves : kSizes) {
    const std::vector<float> values = Random(3 * leaves, 1, 0.3);
    Tree few(3, leaves);
    const Tree many(3, leaves, values);
    for (size_t i = 0; i < values.size(); ++i) few.Update({{static_cast<int32_t>(i)}, {values[i]}});
    Check(few);
    Check(many);
    EXPECT_EQ(few.sums, many.sums);
    EXPECT_EQ(few.mass, values);
    EXPECT_EQ(few.priority[0], 2 * values[0]);
  }
}

TEST(SumTreeUpdate, TheLastWriteStays) {
  Tree tree(1, 4000);
  tree.Update({{9, 9, 3, 9}, {1, 2, 3, 4}});
  EXPECT_EQ(tree.mass[9], 4);
  EXPECT_EQ(tree.priority[9], 8);
  Check(tree);
}

TEST(SumTreeUpdate, SlotsOutsideAreSkipped) {
  for (const size_t count : {size_t{4}, size_t{4000}}) {
    Tree tree(2, 20);
    std::vector<int32_t> slots(count, -1);
    slots[0] = 40, slots[1] = std::numeric_limits<int32_t>::min(), slots[2] = std::numeric_limits<int32_t>::max();
    tree.Update({slots, std::vector<float>(count, 1)});
    EXPECT_EQ(tree.sums, std::vector<float>(tree.sums.size()));
  }
}

TEST(SumTreeUpdate, NoWrites) {
  Tree tree(2, 20);
  tree.Update({});
  EXPECT_EQ(tree.mass, std::vector<float>(40));
}

TEST(SumTreeUpdate, NoDrift) {
  Tree tree(2, 700);
  std::mt19937 random(5);
  for (int round = 0; round < 2000; ++round) {
    std::vector<int32_t> slots(7);
    for (int32_t& s : slots) s = static_cast<int32_t>(random() % 1400);
    tree.Update({slots, Random(slots.size(), round, 0.2)});
  }
  Check(tree);
}

void ExpectOnlyMass(const Tree& tree, const Drawn& drawn) {
  for (const int32_t slot : drawn.slot) {
    ASSERT_GE(slot, 0);
    ASSERT_LT(slot, static_cast<int64_t>(tree.mass.size()));
    ASSERT_GT(tree.mass[slot], 0);
  }
  ExpectReads(tree, drawn);
}

TEST(SumTreeSample, DrawsOnlyMass) {
  for (const int64_t partitions : {1, 3}) {
    for (const int64_t leaves : kSizes) {
      for (const double zeros : {0.0, 0.5, 0.95}) {
        std::vector<float> values = Random(partitions * leaves, 3, zeros);
        values[values.size() / 2] = 1e-30f;
        const Tree tree(partitions, leaves, values);
        for (const bool stratified : {false, true}) ExpectOnlyMass(tree, OnCpu(tree, {3000, stratified}));
      }
    }
  }
}

TEST(SumTreeSample, OneSlotWithMass) {
  for (const float value : {std::numeric_limits<float>::denorm_min(), std::numeric_limits<float>::min(), 1.0f, 3e38f}) {
    for (const int64_t leaves : kSizes) {
      Tree tree(3, leaves);
      const int32_t slot = static_cast<int32_t>(leaves + leaves / 2);
      tree.Update({{slot}, {value}});
      const Drawn drawn = OnCpu(tree, {100});
      EXPECT_EQ(drawn.slot, std::vector<int32_t>(100, slot));
      EXPECT_EQ(drawn.probability, std::vector<float>(100, 1.0f));
      EXPECT_EQ(drawn.total, value);
      ExpectReads(tree, drawn);
    }
  }
}

// Finite masses whose sum is infinite: any slot with mass will do.
TEST(SumTreeSample, SumsThatOverflow) {
  for (const int64_t leaves : kSizes) {
    std::vector<float> values(3 * leaves, 3e38f);
    for (size_t i = 0; i < values.size(); i += 2) values[i] = 0;
    values[1] = 3e38f;
    const Tree tree(3, leaves, values);
    for (const bool stratified : {false, true}) ExpectOnlyMass(tree, OnCpu(tree, {2000, stratified}));
  }
}

// Sums that a thread formed which counts denormals, drawn from by one that takes them for zero, as XLA's do.
TEST(SumTreeSample, DenormalsAreMassOrNot) {
#ifdef __SSE2__
  Tree tree(1, 64);
  tree.Update({{20, 21, 22, 23, 24, 25, 26, 27}, std::vector<float>(8, 1e-38f)});
  FlushDenormals flush;
  for (const int32_t s : OnCpu(tree, {100}).slot) {
    ASSERT_GE(s, 20);
    ASSERT_LE(s, 27);
  }
#endif
}

// Every slot is drawn as often as its probability says, within the two strata at its ends; slots ascend.
TEST(SumTreeSample, Strata) {
  const std::vector<float> values = Random(1200, 4, 0.3);
  double total = 0;
  for (const float v : values) total += v;
  for (const int64_t partitions : {1, 4}) {
    const Tree tree(partitions, 1200 / partitions, values);
    for (const int64_t draws : {100, 5000, 40000}) {
      const Drawn got = OnCpu(tree, {draws, true}, 3);
      std::vector<int64_t> count(values.size());
      for (const int32_t s : got.slot) ++count[s];
      for (size_t i = 0; i < values.size(); ++i) {
        EXPECT_LE(std::abs(count[i] - draws * values[i] / total), 2.01) << "slot " << i;
        EXPECT_TRUE(count[i] == 0 || values[i] > 0) << "slot " << i;
      }
      EXPECT_TRUE(std::is_sorted(got.slot.begin(), got.slot.end()));
    }
  }
}

TEST(SumTreeSample, ProbabilitiesOnAGrid) {
  const std::vector<float> values = Random(4 * 37, 9, 0.3);
  const Tree tree(4, 37, values);
  Batch batch{1 << 16};
  batch.given.resize(2 * batch.draws);
  for (int64_t i = 0; i < batch.draws; ++i) batch.given[2 * i] = static_cast<uint32_t>(i << 16);
  const Drawn got = OnCpu(tree, batch, 2);
  std::vector<int64_t> count(values.size());
  for (const int32_t s : got.slot) ++count[s];
  double total = 0;
  for (const float v : values) total += v;
  for (size_t i = 0; i < values.size(); ++i) {
    EXPECT_NEAR(count[i], batch.draws * values[i] / total, 1.05) << "slot " << i;
  }
}

TEST(SumTreeSample, ThreadsDoNotShow) {
  for (const int64_t partitions : {1, 4}) {
    const Tree tree(partitions, 300, Random(300 * partitions, 4, 0.3));
    for (const int64_t draws : {0, 1, 511, 512, 513, 1023, 1024, 1025, 20000}) {
      for (const bool stratified : {false, true}) {
        const Drawn one = OnCpu(tree, {draws, stratified});
        ExpectSame(OnCpu(tree, {draws, stratified}, 3), one);
        ExpectReads(tree, one);
      }
    }
  }
}

TEST(SumTreeSample, PartitionsHeldApart) {
  const Tree tree(8, 37, Random(8 * 37, 6, 0.3));
  for (const bool stratified : {false, true}) {
    const Drawn whole = OnCpu(tree, {3000, stratified});
    for (const int64_t held : {1, 2, 4, 8}) {
      for (int32_t first = 0; first < 8; first += static_cast<int32_t>(held)) {
        const Drawn part = OnCpu(tree, {3000, stratified, false, first, held}, 2);
        EXPECT_EQ(part.total, whole.total);
        EXPECT_EQ(part.partition, whole.partition);
        ExpectReads(tree, part);
        for (size_t i = 0; i < part.slot.size(); ++i) {
          const bool here = whole.slot[i] / 37 >= first && whole.slot[i] / 37 < first + held;
          ASSERT_EQ(part.slot[i], here ? whole.slot[i] : -1);
        }
      }
    }
  }
}

TEST(SumTreeSample, NoMass) {
  for (const int64_t partitions : {0, 1, 8}) {
    const Tree tree(partitions, 20);
    const Drawn drawn = OnCpu(tree, {3000}, 2);
    EXPECT_EQ(drawn.slot, std::vector<int32_t>(3000, -1));
    EXPECT_EQ(drawn.partition, std::vector<int32_t>(3000, -1));
    EXPECT_EQ(drawn.total, 0);
    ExpectReads(tree, drawn);
  }
}

// Nothing may be read outside the arrays, whatever is in them.
TEST(SumTreeSample, SumsOfAnotherMass) {
  for (const int64_t partitions : {1, 2}) {
    for (const int64_t leaves : kSizes) {
      for (const float sum : {1.0f, -1.0f, kInf, kNaN}) {
        for (const float value : {0.0f, 1.0f, -1.0f, kInf, kNaN}) {
          Tree tree(partitions, leaves);
          tree.sums.assign(tree.sums.size(), sum);
          tree.mass.assign(tree.mass.size(), value);
          for (const int64_t draws : {1, 15, 300, 3000}) {  // from the root, and from levels below it
            for (const int32_t s : OnCpu(tree, {draws, draws % 2 == 0}).slot) {
              ASSERT_GE(s, -1);
              ASSERT_LT(s, partitions * leaves);
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace gear_jax
