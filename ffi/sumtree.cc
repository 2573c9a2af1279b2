#include "ffi/sumtree.h"

#include <algorithm>

// Drawing is faster with AVX2; the same operations in the same order, so the same bits. Not under a sanitizer, which is
// not up yet when the loader picks a version.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)
#define GEAR_JAX_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define GEAR_JAX_CLONES
#endif

namespace gear_jax {
namespace {

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

// The last child with mass takes a draw that rounding left beyond all of them: the sum above was a little larger.
int64_t LastWithMass(const float* child, double& target) {
  int64_t last = kFanout - 1;
  while (last > 0 && !HasMass(child[last])) --last;
  target = child[last];
  return last;
}

// The child in which `target` falls, of 16; takes the mass before it off `target`.
__attribute__((always_inline)) inline int64_t Descend(const float* child, double& target) {
  float four[3];
  for (int j = 0; j < 3; ++j) four[j] = (child[4 * j] + child[4 * j + 1]) + (child[4 * j + 2] + child[4 * j + 3]);
  const int64_t j = 4 * Pick(four[0], four[1], four[2], target);
  const int64_t chosen = j + Pick(child[j], child[j + 1], child[j + 2], target);
  // Pick takes the last of four whatever the target, so only a draw beyond the end can be at a child without mass
  // or reach that child's own mass.
  if (__builtin_expect(!(target < child[chosen]), 0)) return LastWithMass(child, target);
  return chosen;
}

// Prefix sums in the order that sumtree.h states.
class RunningSum {
 public:
  double Add(double value) {
    within_ += value;
    ++count_;
    if (count_ % kFanout == 0) inner_ += within_, within_ = 0;
    if (count_ % (kFanout * kFanout) == 0) outer_ += inner_, inner_ = 0;
    return outer_ + (inner_ + within_);
  }

 private:
  double outer_ = 0, inner_ = 0, within_ = 0;
  int64_t count_ = 0;
};

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
  RunningSum sum;
  for (int64_t p = 0; p < all_partitions; ++p) {
    prefix_.push_back(sum.Add(roots[p]));
    if (roots[p] > 0) last_ = p;
  }
  level_ = StartLevel(layout.nodes.data(), static_cast<int>(layout.nodes.size()), all_partitions, draws);
  starts_.resize(partitions);
  for (int64_t p = 0; p < partitions; ++p) {
    MakeStart(sums + p * layout.width + layout.offset[level_], layout.nodes[level_], starts_[p]);
  }
  return static_cast<float>(prefix_.back());
}

void SumTreeSample::MakeStart(const float* node, int64_t nodes, Start& start) const {
  start.prefix.assign(1, 0.0);
  start.prefix.reserve(nodes + 1);
  RunningSum sum;
  for (int64_t i = 0; i < nodes; ++i) {
    start.prefix.push_back(sum.Add(node[i]));
    if (node[i] > 0) start.last = i;
  }
  const double total = start.prefix.back();
  start.scale = total > 0 ? static_cast<double>(nodes) / total : 0;
  start.guide.resize(nodes);
  int32_t at = 0;
  for (int64_t part = 0; part < nodes; ++part) {
    const double begin = static_cast<double>(part) * total / static_cast<double>(nodes);
    while (at < start.last && start.prefix[at + 1] <= begin) ++at;
    start.guide[part] = at;
  }
}

void SumTreeSample::Run(int64_t task) {
  const int64_t begin = task * kChunk, end = std::min(draws, begin + kChunk);
  if (last_ < 0) {
    std::fill(slot + begin, slot + end, -1);
    std::fill(drawn + begin, drawn + end, 0.0f);
    return;
  }
  DrawRange(begin, end);
}

// Level by level over a group of draws: their loads are independent, so that cache misses overlap.
GEAR_JAX_CLONES void SumTreeSample::DrawRange(int64_t begin, int64_t end) {
  constexpr int64_t kGroup = 32;
  double target[kGroup];
  int64_t partition[kGroup], node[kGroup];
  uint32_t high[kGroup], low[kGroup];
  const double total = prefix_.back(), part_of_mass = total / static_cast<double>(draws);
  int64_t before = -1, at = 0;  // the last draw's partition and node
  for (int64_t base = begin; base < end; base += kGroup) {
    const int64_t group = std::min(kGroup, end - base);
    if (bits == nullptr) {
      Threefry<kGroup>(key, static_cast<uint32_t>(base), high, low);
    } else {
      for (int64_t i = 0; i < group; ++i) high[i] = bits[2 * (base + i)], low[i] = bits[2 * (base + i) + 1];
    }
    for (int64_t i = 0; i < group; ++i) {
      double t = Target(stratified, base + i, Uniform(high[i], low[i]), total, part_of_mass);
      int64_t p = 0;
      if (all_partitions > 1) {
        p = std::upper_bound(prefix_.begin() + 1, prefix_.end(), t) - prefix_.begin() - 1;
        p = std::min(p, last_);
        t -= prefix_[p];
      }
      partition[i] = p - first;
      if (partition[i] < 0 || partition[i] >= partitions) continue;
      const Start& start = starts_[partition[i]];
      if (!stratified || partition[i] != before) {
        // Not a number where the sum of the masses is infinite; no cast may see that.
        const double part = t * start.scale, parts = static_cast<double>(start.guide.size());
        at = start.guide[part > 0 ? static_cast<int64_t>(std::min(part, parts - 1)) : 0];
        before = partition[i];
      }  // else the draws ascend: the last one's node is close below
      while (at > 0 && t < start.prefix[at]) --at;
      while (at < start.last && t >= start.prefix[at + 1]) ++at;
      target[i] = t - start.prefix[at];
      node[i] = at;
      __builtin_prefetch(Below(partition[i], level_) + at * kFanout);
    }
    for (size_t level = level_; level > 0; --level) {
      for (int64_t i = 0; i < group; ++i) {
        if (partition[i] < 0 || partition[i] >= partitions) continue;
        const int64_t child = node[i] * kFanout + Descend(Below(partition[i], level) + node[i] * kFanout, target[i]);
        // The minimum does nothing but keep sums that are not of this mass (all ones, say) inside the arrays.
        node[i] = std::min(child, layout.nodes[level - 1] - 1);
        __builtin_prefetch(Below(partition[i], level - 1) + node[i] * kFanout);
      }
    }
    for (int64_t i = 0; i < group; ++i) {
      int32_t& s = slot[base + i];
      float& d = drawn[base + i];
      if (partition[i] < 0 || partition[i] >= partitions) {
        s = -1, d = 0;
        continue;
      }
      const float* leaf = Below(partition[i], 0) + node[i] * kFanout;
      const int64_t count = layout.leaves - node[i] * kFanout;
      float padded[kFanout] = {};
      if (count < kFanout) leaf = std::copy_n(leaf, count, padded) - count;
      const int64_t chosen = std::min(Descend(leaf, target[i]), count - 1);
      s = static_cast<int32_t>((first + partition[i]) * layout.leaves + node[i] * kFanout + chosen);
      d = leaf[chosen];
    }
  }
}

}  // namespace gear_jax
