#include "ffi/sumtree.h"

#include <gtest/gtest.h>

#ifdef __SSE2__
#include <immintrin.h>
#endif

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <thread>
#include <vector>

namespace gear_jax {
namespace {

constexpr int64_t kSizes[] = {1, 2, 15, 16, 17, 255, 256, 257, 4096, 4097};

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

struct Tree {
  Tree(int64_t partitions, int64_t leaves)
      : layout(leaves),
        partitions(partitions),
        priority(partitions * leaves),
        mass(partitions * leaves),
        sums(partitions * layout.width) {}

  void Update(const std::vector<int32_t>& slot, const std::vector<float>& value) {
    std::vector<float> doubled;
    for (const float v : value) doubled.push_back(2 * v);
    SumTreeUpdate update{partitions, priority.data(), mass.data(), sums.data()};
    update.Run(layout, static_cast<int64_t>(slot.size()), slot.data(), doubled.data(), value.data());
  }

  void Check() const {
    for (int64_t p = 0; p < partitions; ++p) {
      const auto leaf = mass.begin() + p * layout.leaves;
      const std::vector<float> wanted = Sums(std::vector<float>(leaf, leaf + layout.leaves));
      const auto row = sums.begin() + p * layout.width;
      ASSERT_EQ(std::vector<float>(row, row + layout.width), wanted) << "partition " << p;
    }
  }

  struct Draws {
    float total;
    std::vector<int32_t> slot;
    std::vector<float> drawn;
  };

  Draws Draw(const std::vector<uint32_t>& bits, int threads = 1, int64_t first = 0, int64_t held = -1,
             bool stratified = false) const {
    std::vector<float> roots;
    for (int64_t p = 0; p < partitions; ++p) roots.push_back(sums[p * layout.width + layout.root()]);
    SumTreeSample sample(layout.leaves);
    sample.all_partitions = partitions;
    sample.first = first;
    sample.partitions = held < 0 ? partitions : held;
    sample.roots = roots.data();
    sample.mass = mass.data() + first * layout.leaves;
    sample.sums = sums.data() + first * layout.width;
    sample.draws = static_cast<int64_t>(bits.size() / 2);
    sample.bits = bits.data();
    sample.stratified = stratified;
    Draws draws{0, std::vector<int32_t>(sample.draws, -7), std::vector<float>(sample.draws, -7)};
    sample.slot = draws.slot.data();
    sample.drawn = draws.drawn.data();
    draws.total = sample.Prepare();
    std::vector<std::thread> helpers;
    for (int i = 1; i < threads; ++i) helpers.emplace_back([&sample] { sample.Drain(); });
    sample.Drain();
    for (std::thread& t : helpers) t.join();
    return draws;
  }

  SumTreeLayout layout;
  int64_t partitions;
  std::vector<float> priority, mass, sums;
};

std::vector<int32_t> AllSlots(const Tree& tree) {
  std::vector<int32_t> slots(tree.mass.size());
  for (size_t i = 0; i < slots.size(); ++i) slots[i] = static_cast<int32_t>(i);
  return slots;
}

// Random bits, and the ends of the range, where rounding may leave a draw beyond the last slot with mass.
std::vector<uint32_t> Bits(int64_t draws, uint32_t seed = 0) {
  std::mt19937 random(seed);
  std::vector<uint32_t> bits(2 * draws);
  for (uint32_t& b : bits) b = static_cast<uint32_t>(random());
  const uint32_t all = std::numeric_limits<uint32_t>::max();
  const uint32_t ends[] = {0, 0, all, all, all, 0, 0, all};
  std::copy_n(ends, std::min<size_t>(bits.size(), 8), bits.begin());
  return bits;
}

std::vector<float> Random(size_t count, uint32_t seed, double share_of_zeros = 0) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<double> uniform;
  std::vector<float> values(count);
  for (float& v : values)
    v = uniform(random) < share_of_zeros ? 0 : static_cast<float>(std::exp(20 * uniform(random) - 10));
  return values;
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
    Tree few(3, leaves), many(3, leaves);
    const std::vector<int32_t> slots = AllSlots(few);
    const std::vector<float> values = Random(slots.size(), 1, 0.3);
    for (size_t i = 0; i < slots.size(); ++i) few.Update({slots[i]}, {values[i]});
    many.Update(slots, values);
    few.Check();
    many.Check();
    EXPECT_EQ(few.sums, many.sums);
    EXPECT_EQ(few.mass, values);
    EXPECT_EQ(few.priority[0], 2 * values[0]);
  }
}

TEST(SumTreeUpdate, TheLastWriteStays) {
  Tree tree(1, 4000);
  tree.Update({9, 9, 3, 9}, {1, 2, 3, 4});
  EXPECT_EQ(tree.mass[9], 4);
  EXPECT_EQ(tree.priority[9], 8);
  tree.Check();
}

TEST(SumTreeUpdate, SlotsOutsideAreSkipped) {
  for (const size_t count : {size_t{4}, size_t{4000}}) {
    Tree tree(2, 20);
    std::vector<int32_t> slots(count, -1);
    slots[0] = 40, slots[1] = std::numeric_limits<int32_t>::min(), slots[2] = std::numeric_limits<int32_t>::max();
    tree.Update(slots, std::vector<float>(count, 1));
    EXPECT_EQ(tree.sums, std::vector<float>(tree.sums.size()));
  }
}

TEST(SumTreeUpdate, NoWrites) {
  Tree tree(2, 20);
  tree.Update({}, {});
  EXPECT_EQ(tree.mass, std::vector<float>(40));
}

TEST(SumTreeUpdate, NoDrift) {
  Tree tree(2, 700);
  std::mt19937 random(5);
  for (int round = 0; round < 2000; ++round) {
    std::vector<int32_t> slots(7);
    for (int32_t& s : slots) s = static_cast<int32_t>(random() % 1400);
    tree.Update(slots, Random(slots.size(), round, 0.2));
  }
  tree.Check();
}

TEST(SumTreeSample, DrawsOnlyMass) {
  for (const int64_t leaves : kSizes) {
    for (const double zeros : {0.0, 0.5, 0.95}) {
      Tree tree(3, leaves);
      std::vector<float> values = Random(tree.mass.size(), 3, zeros);
      values[values.size() / 2] = 1e-30f;
      tree.Update(AllSlots(tree), values);
      const Tree::Draws draws = tree.Draw(Bits(3000));
      for (size_t i = 0; i < draws.slot.size(); ++i) {
        ASSERT_GE(draws.slot[i], 0);
        ASSERT_LT(draws.slot[i], 3 * leaves);
        ASSERT_GT(tree.mass[draws.slot[i]], 0);
        ASSERT_EQ(draws.drawn[i], tree.mass[draws.slot[i]]);
      }
    }
  }
}

TEST(SumTreeSample, OneSlotWithMass) {
  for (const float value : {std::numeric_limits<float>::denorm_min(), std::numeric_limits<float>::min(), 1.0f, 3e38f}) {
    for (const int64_t leaves : kSizes) {
      Tree tree(3, leaves);
      const int32_t slot = static_cast<int32_t>(leaves + leaves / 2);
      tree.Update({slot}, {value});
      const Tree::Draws draws = tree.Draw(Bits(100));
      EXPECT_EQ(draws.slot, std::vector<int32_t>(100, slot));
      EXPECT_EQ(draws.total, value);
    }
  }
}

// Finite masses whose sum is infinite: any slot with mass will do.
TEST(SumTreeSample, SumsThatOverflow) {
  for (const int64_t leaves : kSizes) {
    Tree tree(3, leaves);
    std::vector<float> values(tree.mass.size(), 3e38f);
    for (size_t i = 0; i < values.size(); i += 2) values[i] = 0;
    values[1] = 3e38f;
    tree.Update(AllSlots(tree), values);
    for (const bool stratified : {false, true}) {
      for (const int32_t s : tree.Draw(Bits(2000), 1, 0, -1, stratified).slot) {
        ASSERT_GE(s, 0);
        ASSERT_LT(s, 3 * leaves);
        ASSERT_GT(tree.mass[s], 0);
      }
    }
  }
}

// Sums that a thread formed which counts denormals, drawn from by one that takes them for zero, as XLA's do.
TEST(SumTreeSample, DenormalsAreMassOrNot) {
#ifdef __SSE2__
  Tree tree(1, 64);
  std::vector<int32_t> slots = {20, 21, 22, 23, 24, 25, 26, 27};
  tree.Update(slots, std::vector<float>(slots.size(), 1e-38f));
  const unsigned state = _mm_getcsr();
  _mm_setcsr(state | 0x8040);  // flush to zero, denormals are zero
  const Tree::Draws draws = tree.Draw(Bits(100));
  _mm_setcsr(state);
  for (const int32_t s : draws.slot) {
    ASSERT_GE(s, 20);
    ASSERT_LE(s, 27);
  }
#endif
}

// Every slot is drawn as often as its probability says, within the two strata at its ends; slots ascend.
TEST(SumTreeSample, Strata) {
  Tree tree(4, 300);
  const std::vector<float> values = Random(tree.mass.size(), 4, 0.3);
  tree.Update(AllSlots(tree), values);
  double total = 0;
  for (const float v : values) total += v;
  const int64_t draws = 5000;
  const Tree::Draws got = tree.Draw(Bits(draws, 8), 3, 0, -1, true);
  std::vector<int64_t> count(values.size());
  for (const int32_t s : got.slot) ++count[s];
  for (size_t i = 0; i < values.size(); ++i) {
    EXPECT_LE(std::abs(count[i] - draws * values[i] / total), 2.01) << "slot " << i;
    EXPECT_TRUE(count[i] == 0 || values[i] > 0) << "slot " << i;
  }
  EXPECT_TRUE(std::is_sorted(got.slot.begin(), got.slot.end()));
}

TEST(SumTreeSample, ProbabilitiesOnAGrid) {
  Tree tree(4, 37);
  std::vector<float> values = Random(tree.mass.size(), 9, 0.3);
  tree.Update(AllSlots(tree), values);
  const int64_t draws = 1 << 16;
  std::vector<uint32_t> bits(2 * draws);
  for (int64_t i = 0; i < draws; ++i) bits[2 * i] = static_cast<uint32_t>(i << 16);
  const Tree::Draws got = tree.Draw(bits, 2);
  std::vector<int64_t> count(values.size());
  for (const int32_t s : got.slot) ++count[s];
  double total = 0;
  for (const float v : values) total += v;
  for (size_t i = 0; i < values.size(); ++i) EXPECT_NEAR(count[i], draws * values[i] / total, 1.05) << "slot " << i;
}

TEST(SumTreeSample, ThreadsDoNotShow) {
  Tree tree(4, 300);
  tree.Update(AllSlots(tree), Random(tree.mass.size(), 4, 0.3));
  for (const int64_t draws : {0, 1, 1023, 1024, 1025, 20000}) {
    const std::vector<uint32_t> bits = Bits(draws, 2);
    const Tree::Draws one = tree.Draw(bits), three = tree.Draw(bits, 3);
    EXPECT_EQ(one.slot, three.slot);
    EXPECT_EQ(one.drawn, three.drawn);
  }
}

TEST(SumTreeSample, PartitionsHeldApart) {
  Tree tree(8, 37);
  tree.Update(AllSlots(tree), Random(tree.mass.size(), 6, 0.3));
  const std::vector<uint32_t> bits = Bits(3000, 3);
  const Tree::Draws whole = tree.Draw(bits);
  for (const int64_t held : {1, 2, 4, 8}) {
    for (int64_t first = 0; first < 8; first += held) {
      const Tree::Draws part = tree.Draw(bits, 2, first, held);
      EXPECT_EQ(part.total, whole.total);
      for (size_t i = 0; i < part.slot.size(); ++i) {
        const bool here = whole.slot[i] / 37 >= first && whole.slot[i] / 37 < first + held;
        ASSERT_EQ(part.slot[i], here ? whole.slot[i] : -1);
        ASSERT_EQ(part.drawn[i], here ? whole.drawn[i] : 0);
      }
    }
  }
}

TEST(SumTreeSample, NoMass) {
  for (const int64_t partitions : {0, 1, 8}) {
    const Tree::Draws draws = Tree(partitions, 20).Draw(Bits(3000), 2);
    EXPECT_EQ(draws.slot, std::vector<int32_t>(3000, -1));
    EXPECT_EQ(draws.drawn, std::vector<float>(3000, 0));
    EXPECT_EQ(draws.total, 0);
  }
}

// Nothing may be read outside the arrays, whatever is in them.
TEST(SumTreeSample, SumsOfAnotherMass) {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  for (const int64_t leaves : kSizes) {
    for (const float sum : {1.0f, -1.0f, inf, nan}) {
      for (const float value : {0.0f, 1.0f, -1.0f, inf, nan}) {
        Tree tree(2, leaves);
        tree.sums.assign(tree.sums.size(), sum);
        tree.mass.assign(tree.mass.size(), value);
        for (const int64_t draws : {1, 15, 300, 3000}) {  // from the root, and from levels below it
          for (const int32_t s : tree.Draw(Bits(draws)).slot) {
            ASSERT_GE(s, -1);
            ASSERT_LT(s, 2 * leaves);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace gear_jax
