#include "ffi/sumtree.h"

#include <algorithm>
#include <cstring>

// Drawing is twice as fast with AVX2; the same operations in the same order, so the same bits. Not under the address
// sanitizer, which is not up yet when the loader picks a version.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__)
#define GEAR_JAX_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define GEAR_JAX_CLONES
#endif

namespace gear_jax {
namespace {

// The sum of 16 children in the order that sumtree.h states.
float Sum16(const float* child) {
  float a[8];
  for (int i = 0; i < 8; ++i) a[i] = child[i] + child[i + 8];
  for (int i = 0; i < 4; ++i) a[i] += a[i + 4];
  return (a[0] + a[2]) + (a[1] + a[3]);
}

// The same over the last, short group of leaves: what is missing counts as zero.
float SumTail(const float* child, int64_t count) {
  float padded[kFanout] = {};
  std::copy_n(child, count, padded);
  return Sum16(padded);
}

float LeafSum(const float* mass, int64_t leaves, int64_t node) {
  const int64_t count = leaves - node * kFanout;
  return count >= kFanout ? Sum16(mass + node * kFanout) : SumTail(mass + node * kFanout, count);
}

void Rebuild(const SumTreeLayout& layout, const float* mass, float* sums) {
  for (int64_t node = 0; node < layout.nodes[0]; ++node) sums[node] = LeafSum(mass, layout.leaves, node);
  for (size_t level = 1; level < layout.nodes.size(); ++level) {
    const float* below = sums + layout.offset[level - 1];
    float* here = sums + layout.offset[level];
    for (int64_t node = 0; node < layout.nodes[level]; ++node) here[node] = Sum16(below + node * kFanout);
  }
}

void RefreshPath(const SumTreeLayout& layout, const float* mass, float* sums, int64_t leaf) {
  int64_t node = leaf / kFanout;
  sums[node] = LeafSum(mass, layout.leaves, node);
  for (size_t level = 1; level < layout.nodes.size(); ++level) {
    node /= kFanout;
    sums[layout.offset[level] + node] = Sum16(sums + layout.offset[level - 1] + node * kFanout);
  }
}

// Of four values, the one in whose share of the sum `target` falls; takes what lies before it off `target`.
__attribute__((always_inline)) inline int64_t Pick(const double (&value)[4], double& target) {
  const double one = value[0], two = one + value[1], three = two + value[2];
  const bool a = one <= target, b = two <= target, c = three <= target;
  // Products, not branches: where a draw falls cannot be predicted. The sum is one, two or three to the bit.
  target -= (a * value[0] + b * value[1]) + c * value[2];
  return a + b + c;
}

// Also true for a denormal on a thread that flushes denormals to zero, as XLA's do: a comparison of floats calls it zero.
bool HasMass(float mass) {
  int32_t bits;
  std::memcpy(&bits, &mass, sizeof(bits));
  return bits > 0;
}

// The last child with mass takes a draw that rounding left beyond all of them: the sum above was a little larger.
int64_t LastWithMass(const float* child, double& target) {
  int64_t last = kFanout - 1;
  while (last > 0 && !HasMass(child[last])) --last;
  target = child[last];
  return last;
}

// The child in which `target` falls, of 16; takes the mass before it off `target`. The children are in the order
// 0 4 8 12, 1 5 9 13, ...: a column of four at a time, so that the column sums are vertical adds.
__attribute__((always_inline)) inline int64_t Descend(const float* child, double& target) {
  double column[4];
  for (int j = 0; j < 4; ++j) {
    column[j] = (static_cast<double>(child[j]) + child[4 + j]) + (static_cast<double>(child[8 + j]) + child[12 + j]);
  }
  const int64_t j = Pick(column, target);
  const double in_column[4] = {child[j], child[4 + j], child[8 + j], child[12 + j]};
  const int64_t chosen = 4 * Pick(in_column, target) + j;
  // Pick takes the last of four whatever the target, so only a draw beyond the end can be at a child without mass
  // or reach that child's own mass.
  if (__builtin_expect(!(target < child[chosen]), 0)) return LastWithMass(child, target);
  return chosen;
}

// Draws [begin, end), level by level over a group of draws: their loads are independent, so that cache misses overlap.
GEAR_JAX_CLONES void DrawRange(const SumTreeSample& tree, const std::vector<double>& prefix, int64_t last,
                               int64_t begin, int64_t end) {
  const SumTreeLayout& layout = tree.layout;
  constexpr int64_t kGroup = 32;
  double target[kGroup];
  int64_t partition[kGroup], node[kGroup];
  const double total = prefix.back();
  for (int64_t base = begin; base < end; base += kGroup) {
    const int64_t group = std::min(kGroup, end - base);
    for (int64_t i = 0; i < group; ++i) {
      const uint64_t word = (static_cast<uint64_t>(tree.bits[2 * (base + i)]) << 32) | tree.bits[2 * (base + i) + 1];
      const double t = static_cast<double>(word >> 11) * 0x1p-53 * total;
      int64_t p = std::upper_bound(prefix.begin() + 1, prefix.end(), t) - prefix.begin() - 1;
      p = std::min(p, last);
      target[i] = t - prefix[p];
      partition[i] = p - tree.first;
      node[i] = 0;
    }
    for (size_t level = layout.nodes.size(); level-- > 1;) {
      for (int64_t i = 0; i < group; ++i) {
        if (partition[i] < 0 || partition[i] >= tree.partitions) continue;
        const float* row = tree.sums + partition[i] * layout.width + layout.offset[level - 1];
        // The minimum does nothing but keep sums that are not of this mass (all ones, say) inside the arrays.
        node[i] = std::min(node[i] * kFanout + Descend(row + node[i] * kFanout, target[i]), layout.nodes[level - 1] - 1);
        const float* below = level > 1 ? tree.sums + partition[i] * layout.width + layout.offset[level - 2]
                                       : tree.mass + partition[i] * layout.leaves;
        __builtin_prefetch(below + node[i] * kFanout);
      }
    }
    for (int64_t i = 0; i < group; ++i) {
      int32_t& s = tree.slot[base + i];
      float& d = tree.drawn[base + i];
      if (partition[i] < 0 || partition[i] >= tree.partitions) {
        s = -1, d = 0;
        continue;
      }
      const float* leaf = tree.mass + partition[i] * layout.leaves + node[i] * kFanout;
      const int64_t count = layout.leaves - node[i] * kFanout;
      float padded[kFanout] = {};
      if (count < kFanout) leaf = std::copy_n(leaf, count, padded) - count;
      const int64_t chosen = std::min(Descend(leaf, target[i]), count - 1);
      s = static_cast<int32_t>((tree.first + partition[i]) * layout.leaves + node[i] * kFanout + chosen);
      d = leaf[chosen];
    }
  }
}

}  // namespace

SumTreeLayout::SumTreeLayout(int64_t leaves) : leaves(leaves) {
  int64_t count = leaves;
  do {
    count = (count + kFanout - 1) / kFanout;
    nodes.push_back(count);
    offset.push_back(width);
    width += (count + kFanout - 1) / kFanout * kFanout;
  } while (count > 1);
}

void SumTreeUpdate::Run(const SumTreeLayout& layout, int64_t count, const int32_t* slot, const float* new_priority,
                        const float* new_mass) const {
  const int64_t leaves = layout.leaves;
  const int64_t slots = partitions * leaves;
  for (int64_t i = 0; i < count; ++i) {
    if (slot[i] < 0 || slot[i] >= slots) continue;
    priority[slot[i]] = new_priority[i];
    mass[slot[i]] = new_mass[i];
  }
  // A path costs a node a level, anew for each write; a rebuild costs every node once, and runs faster for each.
  const int64_t levels = static_cast<int64_t>(layout.nodes.size());
  if (count * levels * 4 > partitions * layout.width) {
    for (int64_t p = 0; p < partitions; ++p) Rebuild(layout, mass + p * leaves, sums + p * layout.width);
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    if (slot[i] < 0 || slot[i] >= slots) continue;
    const int64_t p = slot[i] / leaves;
    RefreshPath(layout, mass + p * leaves, sums + p * layout.width, slot[i] % leaves);
  }
}

float SumTreeSample::Prepare() {
  prefix_.assign(1, 0.0);
  for (int64_t p = 0; p < all_partitions; ++p) {
    prefix_.push_back(prefix_.back() + roots[p]);
    if (roots[p] > 0) last_ = p;
  }
  return static_cast<float>(prefix_.back());
}

void SumTreeSample::Run(int64_t task) {
  const int64_t begin = task * kChunk, end = std::min(draws, begin + kChunk);
  if (last_ < 0) {
    std::fill(slot + begin, slot + end, -1);
    std::fill(drawn + begin, drawn + end, 0.0f);
    return;
  }
  DrawRange(*this, prefix_, last_, begin, end);
}

}  // namespace gear_jax
