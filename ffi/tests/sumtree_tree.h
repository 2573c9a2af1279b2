// A table in memory and calls on it, for the tests of the sum tree, of its kernels and of what their threads do.
#ifndef GEAR_JAX_FFI_TESTS_SUMTREE_TREE_H_
#define GEAR_JAX_FFI_TESTS_SUMTREE_TREE_H_

#include <gtest/gtest.h>

#ifdef __SSE2__
#include <immintrin.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "ffi/sumtree.h"

namespace gear_jax {

inline constexpr int64_t kSizes[] = {1, 2, 15, 16, 17, 255, 256, 257, 4096, 4097};
inline constexpr float kInf = std::numeric_limits<float>::infinity();
inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// As bits: NaN equals NaN, and 0 is not -0.
inline std::vector<uint32_t> BitsOf(const std::vector<float>& values) {
  std::vector<uint32_t> bits(values.size());
  if (!values.empty()) std::memcpy(bits.data(), values.data(), 4 * values.size());
  return bits;
}

inline std::vector<float> Random(size_t count, uint32_t seed, double share_of_zeros = 0) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<double> uniform;
  std::vector<float> values(count);
  for (float& v : values)
    v = uniform(random) < share_of_zeros ? 0 : static_cast<float>(std::exp(20 * uniform(random) - 10));
  return values;
}

struct Writes {
  std::vector<int32_t> slot;
  std::vector<float> priority, mass;

  Writes() = default;
  Writes(std::vector<int32_t> slots, std::vector<float> masses) : slot(std::move(slots)), mass(std::move(masses)) {
    for (const float m : mass) priority.push_back(2 * m);
  }
  // To random slots, some of them outside.
  Writes(size_t count, int64_t slots, uint32_t seed)
      : priority(Random(count, seed)), mass(Random(count, seed + 1, 0.2)) {
    std::mt19937 random(seed);
    for (size_t i = 0; i < count; ++i) slot.push_back(static_cast<int32_t>(random() % (slots + 2)) - 1);
    const int32_t far[] = {std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max()};
    if (count > 10) std::copy_n(far, 2, slot.begin() + 3);
  }
};

struct Tree {
  Tree(int64_t partitions, int64_t leaves)
      : layout(leaves),
        partitions(partitions),
        priority(partitions * leaves),
        mass(partitions * leaves),
        sums(partitions * layout.width) {
    for (size_t i = 0; i < mass.size(); ++i) {
      length.push_back(static_cast<int32_t>(i + 1));
      generation.push_back(~static_cast<uint32_t>(i));
    }
  }

  Tree(int64_t partitions, int64_t leaves, const std::vector<float>& values) : Tree(partitions, leaves) {
    std::vector<int32_t> slots(values.size());
    std::iota(slots.begin(), slots.end(), 0);
    Update({slots, values});
  }

  void Update(const Writes& writes) {
    SumTreeUpdate{partitions, priority.data(), mass.data(), sums.data()}.Run(
        layout, static_cast<int64_t>(writes.slot.size()), writes.slot.data(), writes.priority.data(),
        writes.mass.data());
  }

  // What is left of the table where only some partitions are held, in memory of its own.
  Tree Held(int64_t first, int64_t held) const {
    const auto part = [&](const auto& all, int64_t each, auto& out) {
      out.assign(all.begin() + first * each, all.begin() + (first + held) * each);
    };
    Tree tree(0, layout.leaves);
    tree.partitions = held;
    part(priority, layout.leaves, tree.priority);
    part(mass, layout.leaves, tree.mass);
    part(sums, layout.width, tree.sums);
    part(length, layout.leaves, tree.length);
    part(generation, layout.leaves, tree.generation);
    return tree;
  }

  std::vector<float> Roots() const {
    std::vector<float> roots;
    for (int64_t p = 0; p < partitions; ++p) roots.push_back(sums[p * layout.width + layout.root()]);
    return roots;
  }

  SumTreeLayout layout;
  int64_t partitions;
  std::vector<float> priority, mass, sums;
  std::vector<int32_t> length;       // of a slot: its number and 1
  std::vector<uint32_t> generation;  // its number's complement
};

// Denormals are zero, as on XLA's CPU threads and in the kernels.
class FlushDenormals {
 public:
#ifdef __SSE2__
  FlushDenormals() : state_(_mm_getcsr()) { _mm_setcsr(state_ | 0x8040); }
  ~FlushDenormals() { _mm_setcsr(state_); }

 private:
  unsigned state_;
#endif
};

struct Batch {
  int64_t draws = 0;
  bool stratified = false;
  bool from_key = false;
  int32_t first = 0;
  int64_t held = -1;                 // partitions; -1: all
  std::vector<uint32_t> given = {};  // the words; none: those below

  // Random, and the ends of the range, where rounding may leave a draw beyond the last slot with mass.
  std::vector<uint32_t> Words() const {
    if (!given.empty()) return given;
    std::mt19937 random(static_cast<uint32_t>(draws));
    std::vector<uint32_t> words(std::max<int64_t>(2, 2 * draws));
    for (uint32_t& w : words) w = static_cast<uint32_t>(random());
    const uint32_t all = std::numeric_limits<uint32_t>::max(), ends[] = {0, 0, all, all, all, 0, 0, all};
    if (from_key) return words;
    std::copy_n(ends, std::min<size_t>(words.size(), 8), words.begin());
    std::fill(words.end() - 2, words.end(), all);
    return words;
  }
  int64_t Held(const Tree& tree) const { return held < 0 ? tree.partitions : held; }
};

struct Drawn {
  explicit Drawn(int64_t draws)
      : slot(draws, -7),
        partition(draws, -7),
        length(draws, -7),
        generation(draws, 7),
        probability(draws, -7),
        least(DrawnRows::Groups(draws), -7) {}

  DrawnRows Rows() {
    return {slot.data(), partition.data(), probability.data(), length.data(), generation.data(), least.data()};
  }

  std::vector<int32_t> slot, partition, length;
  std::vector<uint32_t> generation;
  std::vector<float> probability, least;
  float total = -7;
};

inline void ExpectSame(const Drawn& got, const Drawn& wanted) {
  EXPECT_EQ(BitsOf({got.total}), BitsOf({wanted.total}));
  ASSERT_EQ(got.slot, wanted.slot);
  ASSERT_EQ(got.partition, wanted.partition);
  ASSERT_EQ(got.length, wanted.length);
  ASSERT_EQ(got.generation, wanted.generation);
  ASSERT_EQ(BitsOf(got.probability), BitsOf(wanted.probability));
  ASSERT_EQ(BitsOf(got.least), BitsOf(wanted.least));
}

// What is said of slots must be what the table says, as far as they are held.
inline void ExpectReads(const Tree& tree, const Drawn& drawn) {
  std::vector<float> least(drawn.least.size(), kInf);
  for (size_t i = 0; i < drawn.slot.size(); ++i) {
    const int32_t slot = drawn.slot[i];
    const bool here = slot >= 0;
    if (here) {
      ASSERT_EQ(drawn.partition[i], slot / tree.layout.leaves);
    }
    ASSERT_EQ(drawn.length[i], here ? tree.length[slot] : 0);
    ASSERT_EQ(drawn.generation[i], here ? tree.generation[slot] : 0);
    ASSERT_EQ(drawn.probability[i], here ? Probability(tree.mass[slot], drawn.total) : 0);
    if (drawn.probability[i] > 0) least[i / kDrawGroup] = std::min(least[i / kDrawGroup], drawn.probability[i]);
  }
  ASSERT_EQ(drawn.least, least);
}

inline Drawn OnCpu(const Tree& tree, const Batch& batch, int threads = 1) {
  const std::vector<uint32_t> words = batch.Words();
  const std::vector<float> roots = tree.Roots();
  const Tree held = tree.Held(batch.first, batch.Held(tree));
  SumTreeSample sample(tree.layout.leaves);
  sample.all_partitions = tree.partitions;
  sample.first = batch.first;
  sample.partitions = held.partitions;
  sample.roots =
      batch.held < 0 ? RootArray{tree.sums.data() + tree.layout.root(), tree.layout.width} : RootArray{roots.data()};
  sample.mass = held.mass.data(), sample.sums = held.sums.data();
  sample.length = held.length.data(), sample.generation = held.generation.data();
  sample.draws = batch.draws;
  if (!batch.from_key) sample.bits = words.data();
  std::copy_n(words.begin(), 2, sample.key);
  sample.stratified = batch.stratified;
  Drawn drawn(batch.draws);
  sample.rows = drawn.Rows();
  drawn.total = sample.Prepare();
  std::vector<std::thread> helpers;
  for (int i = 1; i < threads; ++i) helpers.emplace_back([&sample] { sample.Drain(); });
  sample.Drain();
  for (std::thread& t : helpers) t.join();
  return drawn;
}

}  // namespace gear_jax

#endif  // GEAR_JAX_FFI_TESTS_SUMTREE_TREE_H_
