// A table in host memory and calls on it, for the tests of the sum tree's kernels and of what their threads do.
#ifndef GEAR_JAX_CUDA_TESTS_SUMTREE_TREE_H_
#define GEAR_JAX_CUDA_TESTS_SUMTREE_TREE_H_

#ifdef __SSE2__
#include <immintrin.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "cuda/sumtree_device.h"
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

// Runs f(0) … f(n - 1) in any order, as the threads of a grid might.
inline void ForEachThread(int64_t n, std::mt19937& random, const std::function<void(int64_t)>& f) {
  std::vector<int64_t> order(n);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  for (const int64_t i : order) f(i);
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
  // To random slots, some of them outside.
  Writes(size_t count, int64_t slots, uint32_t seed)
      : priority(Random(count, seed)), mass(Random(count, seed + 1, 0.2)) {
    std::mt19937 random(seed);
    for (size_t i = 0; i < count; ++i) slot.push_back(static_cast<int32_t>(random() % (slots + 2)) - 1);
    const int32_t far[] = {std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max()};
    if (count > 10) std::copy_n(far, 2, slot.begin() + 3);
  }
  DeviceWrites Device() const { return {static_cast<int64_t>(slot.size()), slot.data(), priority.data(), mass.data()}; }
};

struct Tree {
  Tree(int64_t partitions, int64_t leaves)
      : layout(leaves),
        partitions(partitions),
        priority(partitions * leaves),
        mass(partitions * leaves),
        sums(partitions * layout.width) {}

  Tree(int64_t partitions, int64_t leaves, const std::vector<float>& values) : Tree(partitions, leaves) {
    Writes writes;
    writes.slot.resize(values.size());
    std::iota(writes.slot.begin(), writes.slot.end(), 0);
    writes.priority = writes.mass = values;
    Update(writes);
  }

  void Update(const Writes& writes) {
    SumTreeUpdate{partitions, priority.data(), mass.data(), sums.data()}.Run(
        layout, static_cast<int64_t>(writes.slot.size()), writes.slot.data(), writes.priority.data(),
        writes.mass.data());
  }

  DeviceTree Device() {
    DeviceTree tree(layout, partitions);
    tree.priority = priority.data(), tree.mass = mass.data(), tree.sums = sums.data();
    return tree;
  }

  SumTreeLayout layout;
  int64_t partitions;
  std::vector<float> priority, mass, sums;
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
  int64_t held = -1;  // partitions; -1: all

  // Random, and the ends of the range, where rounding may leave a draw beyond the last slot with mass.
  std::vector<uint32_t> Words() const {
    std::mt19937 random(static_cast<uint32_t>(draws));
    std::vector<uint32_t> words(std::max<int64_t>(2, 2 * draws));
    for (uint32_t& w : words) w = static_cast<uint32_t>(random());
    const uint32_t all = std::numeric_limits<uint32_t>::max(), ends[] = {0, 0, all, all, all, 0, 0, all};
    if (from_key) return words;
    std::copy_n(ends, std::min<size_t>(words.size(), 8), words.begin());
    std::fill(words.end() - 2, words.end(), all);
    return words;
  }
};

struct Drawn {
  std::vector<int32_t> slot;
  std::vector<float> mass;
  float total = -7;
};

inline std::vector<float> Roots(const Tree& tree) {
  std::vector<float> roots;
  for (int64_t p = 0; p < tree.partitions; ++p) roots.push_back(tree.sums[p * tree.layout.width + tree.layout.root()]);
  return roots;
}

inline Drawn OnCpu(const Tree& tree, const Batch& batch) {
  const std::vector<uint32_t> words = batch.Words();
  const std::vector<float> roots = Roots(tree);
  SumTreeSample sample(tree.layout.leaves);
  sample.all_partitions = tree.partitions;
  sample.first = batch.first;
  sample.partitions = batch.held < 0 ? tree.partitions : batch.held;
  sample.roots = roots.data();
  sample.mass = tree.mass.data() + batch.first * tree.layout.leaves;
  sample.sums = tree.sums.data() + batch.first * tree.layout.width;
  sample.draws = batch.draws;
  if (!batch.from_key) sample.bits = words.data();
  std::copy_n(words.begin(), 2, sample.key);
  sample.stratified = batch.stratified;
  Drawn drawn{std::vector<int32_t>(batch.draws, -7), std::vector<float>(batch.draws, -7)};
  sample.slot = drawn.slot.data(), sample.drawn = drawn.mass.data();
  drawn.total = sample.Prepare();
  sample.Drain();
  return drawn;
}

}  // namespace gear_jax

#endif  // GEAR_JAX_CUDA_TESTS_SUMTREE_TREE_H_
