#include "ffi/sumtree.h"

#include <algorithm>
#include <cstring>

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

// The high counter word of draws: _random.py's domain, stream 0.
constexpr uint32_t kDrawStream = 0x67656172;

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
__attribute__((always_inline)) inline int64_t Pick(float v0, float v1, float v2, double& target) {
  const float t = static_cast<float>(target);
  const float one = v0, two = one + v1, three = two + v2;
  const bool a = one <= t, b = two <= t, c = three <= t;
  // Products, not branches: where a draw falls cannot be predicted. The sum is one, two or three to the bit.
  // The float32 comparison may be ahead of the float64 target, which must not fall below zero for it.
  target -= (static_cast<float>(a) * v0 + static_cast<float>(b) * v1) + static_cast<float>(c) * v2;
  target = target > 0 ? target : 0.0;
  return a + b + c;
}

// Also true for a denormal on a thread that takes denormals for zero, as XLA's do.
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

// Threefry-2x32 with 20 rounds of n counters from `counter` on (Salmon et al., SC 2011); the same words as
// gear_jax/_random.py. The loop over counters is innermost, so that it becomes vector code.
template <int64_t n>
__attribute__((always_inline)) inline void Threefry(const uint32_t key[2], uint32_t counter, uint32_t* x0,
                                                    uint32_t* x1) {
  constexpr int kRotations[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  const uint32_t keys[3] = {key[0], key[1], key[0] ^ key[1] ^ 0x1BD11BDAu};
  for (int64_t i = 0; i < n; ++i) {
    x0[i] = kDrawStream + keys[0];
    x1[i] = counter + static_cast<uint32_t>(i) + keys[1];
  }
  for (int round = 0; round < 5; ++round) {
    for (const int r : kRotations[round % 2]) {
      for (int64_t i = 0; i < n; ++i) {
        x0[i] += x1[i];
        x1[i] = ((x1[i] << r) | (x1[i] >> (32 - r))) ^ x0[i];
      }
    }
    for (int64_t i = 0; i < n; ++i) {
      x0[i] += keys[(round + 1) % 3];
      x1[i] += keys[(round + 2) % 3] + static_cast<uint32_t>(round + 1);
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
  // The level depends on the table and the batch alone, so that every device that holds a part of it draws alike.
  level_ = layout.nodes.size() - 1;
  while (level_ > 0 && all_partitions * layout.nodes[level_ - 1] <= std::min(kStarts, draws)) --level_;
  starts_.resize(partitions);
  for (int64_t p = 0; p < partitions; ++p) {
    MakeStart(sums + p * layout.width + layout.offset[level_], layout.nodes[level_], starts_[p]);
  }
  return static_cast<float>(prefix_.back());
}

void SumTreeSample::MakeStart(const float* node, int64_t nodes, Start& start) const {
  start.prefix.assign(1, 0.0);
  start.prefix.reserve(nodes + 1);
  for (int64_t i = 0; i < nodes; ++i) {
    start.prefix.push_back(start.prefix.back() + node[i]);
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
      const uint64_t word = (static_cast<uint64_t>(high[i]) << 32) | low[i];
      const double uniform = static_cast<double>(word >> 11) * 0x1p-53;
      double t = stratified ? (static_cast<double>(base + i) + uniform) * part_of_mass : uniform * total;
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
