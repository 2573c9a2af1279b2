#include "ffi/sumtree.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "ffi/sumtree_descend.h"

// Drawing is faster with wider vectors; the same operations in the same order, so the same bits. Not under a sanitizer,
// which is not up yet when the loader picks a version.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)
#define GEAR_JAX_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
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
  return total_ = static_cast<float>(prefix_.back());
}

void SumTreeSample::MakeStart(const float* node, int64_t nodes, Start& start) const {
  start.prefix.assign(1, 0.0);
  start.prefix.reserve(nodes + 1);
  RunningSum sum;
  int64_t last = 0;
  for (int64_t i = 0; i < nodes; ++i) {
    start.prefix.push_back(sum.Add(node[i]));
    if (node[i] > 0) last = i;
  }
  const double total = start.prefix.back();
  start.scale = total > 0 ? static_cast<double>(nodes) / total : 0;
  start.guide.resize(nodes);
  int32_t at = 0;
  for (int64_t part = 0; part < nodes; ++part) {
    const double begin = static_cast<double>(part) * total / static_cast<double>(nodes);
    while (at < last && start.prefix[at + 1] <= begin) ++at;
    start.guide[part] = at;
  }
  start.prefix[last + 1] = std::numeric_limits<double>::quiet_NaN();
}

// The way of some draws, in order. Several go level by level together: their loads are independent, so that cache
// misses overlap. kOne: the table has one partition, which is held here.
class SumTreeSample::Walk {
 public:
  explicit GEAR_JAX_INLINE Walk(const SumTreeSample& call) : call_(call), start_(call.starts_.data()) {}

  template <bool kOne>
  GEAR_JAX_INLINE void Draw(int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i += kTogether) {
      FindStarts<kOne>(i, std::min(end, i + kTogether));
      size_t level = call_.level_;
      if (call_.stratified) {
        GoDown<kOne, true>(level);
      } else {
        GoDown<kOne, false>(level);
      }
      while (level-- > 0) GoDown<kOne, false>(level);
    }
  }

 private:
  static constexpr int64_t kTogether = 32;

  // The partition of each draw and its node at the level of the starts.
  template <bool kOne>
  GEAR_JAX_INLINE void FindStarts(int64_t begin, int64_t end) {
    const bool stratified = call_.stratified;
    const double total = call_.prefix_.back(), part = total / static_cast<double>(call_.draws);
    MakeWords(begin, end);
    size_ = 0;
    for (int64_t i = 0; i < end - begin; ++i) {
      double t = Target(stratified, begin + i, Uniform(high_[i], low_[i]), total, part);
      int64_t p = 0;
      if (!kOne) {
        const std::vector<double>& prefix = call_.prefix_;
        p = std::min(std::upper_bound(prefix.begin() + 1, prefix.end(), t) - prefix.begin() - 1, call_.last_);
        t -= prefix[p];
        call_.rows.partition[begin + i] = static_cast<int32_t>(p);
        p -= call_.first;
        if (p < 0 || p >= call_.partitions) continue;
        start_ = &call_.starts_[p];
      }
      if (!stratified || p != last_partition_) {
        last_partition_ = p;
        last_node_ = Guess(t);
        while (last_node_ > 0 && t < start_->prefix[last_node_]) --last_node_;
        // Most are one or two further on. Which cannot be predicted: sums, not branches.
        for (int step = 0; step < 2; ++step) last_node_ += t >= start_->prefix[last_node_ + 1];
      }  // else the draws ascend, and the last one's node is close below
      while (t >= start_->prefix[last_node_ + 1]) ++last_node_;
      draw_[size_] = begin + i;
      partition_[size_] = p;
      target_[size_] = t - start_->prefix[last_node_];
      node_[size_++] = last_node_;
      if (!stratified) Fetch(p, call_.level_, last_node_);
    }
  }

  GEAR_JAX_INLINE void MakeWords(int64_t begin, int64_t end) {
    if (call_.bits == nullptr) return Threefry<kTogether>(call_.key, static_cast<uint32_t>(begin), high_, low_);
    for (int64_t i = begin; i < end; ++i) {
      high_[i - begin] = call_.bits[2 * i], low_[i - begin] = call_.bits[2 * i + 1];
    }
  }

  // A node near that in which `target` falls.
  GEAR_JAX_INLINE int64_t Guess(double target) const {
    // Not a number where the sum of the masses is infinite; no cast may see that.
    const double part = target * start_->scale, parts = static_cast<double>(start_->guide.size());
    return start_->guide[part > 0 ? static_cast<int64_t>(std::min(part, parts - 1)) : 0];
  }

  // From the nodes of a level to those of the level under it, or to the leaves, and to what is known of those.
  // kFan: the draws ascend from where they start, so that several in a row come to one node.
  template <bool kOne, bool kFan>
  GEAR_JAX_INLINE void GoDown(size_t level) {
    const SumTreeLayout& layout = call_.layout;
    const int64_t leaves = layout.leaves, below = level > 0 ? layout.nodes[level - 1] : leaves;
    const int64_t stride = level > 0 ? layout.width : leaves, size = size_;
    const float* const first_child = call_.Below(0, level);
    const float* at[kTogether];
    int64_t four[kTogether];
    float padded[kFanout];
    for (int64_t i = 0; i < size; ++i) {
      const int64_t begin = node_[i] * kFanout;
      at[i] = first_child + (kOne ? 0 : partition_[i] * stride) + begin;
      const float* child = Children(at[i], below - begin, padded);
      if (kFan) {
        if (!fan_.IsOf(at[i])) fan_.Take(at[i], child);
        Arrive<kOne>(i, level, begin + fan_.Descend(target_[i]), below);
      } else {
        four[i] = FindFour(child, target_[i]);
      }
    }
    if (kFan) return;
    // In two passes fewer operations wait for each other.
    for (int64_t i = 0; i < size; ++i) {
      const int64_t begin = node_[i] * kFanout;
      const float* child = Children(at[i], below - begin, padded);
      Arrive<kOne>(i, level, begin + FindInFour(child, four[i], target_[i]), below);
    }
  }

  // A draw comes to a node of the level under `level`, which has `below` of them, or to a leaf.
  template <bool kOne>
  GEAR_JAX_INLINE void Arrive(int64_t i, size_t level, int64_t node, int64_t below) {
    // The minimum does nothing but keep sums that are not of this mass (all ones, say) inside the arrays.
    node_[i] = std::min(node, below - 1);
    if (level > 0) {
      Fetch(kOne ? 0 : partition_[i], level - 1, node_[i]);
    } else {
      Store<kOne>(i);
    }
  }

  // The 16 children of a node. Where there are fewer, `padded`: levels lie padded, leaves do not.
  static GEAR_JAX_INLINE const float* Children(const float* node, int64_t count, float* padded) {
    if (__builtin_expect(count >= kFanout, 1)) return node;
    std::fill(padded, padded + kFanout, 0.0f);
    std::copy_n(node, count, padded);
    return padded;
  }

  // A draw whose node is a leaf.
  template <bool kOne>
  GEAR_JAX_INLINE void Store(int64_t i) const {
    const int64_t leaves = call_.layout.leaves, row = node_[i] + (kOne ? 0 : partition_[i] * leaves), to = draw_[i];
    const DrawnRows& rows = call_.rows;
    rows.slot[to] = static_cast<int32_t>(row + (kOne ? 0 : call_.first * leaves));
    rows.probability[to] = call_.mass[row];  // divided later
    rows.length[to] = call_.length[row];
    rows.generation[to] = call_.generation[row];
  }

  // Reads ahead what a draw at a node will need.
  GEAR_JAX_INLINE void Fetch(int64_t partition, size_t level, int64_t node) const {
    __builtin_prefetch(call_.Below(partition, level) + node * kFanout);
    if (level > 0) return;
    __builtin_prefetch(call_.length + partition * call_.layout.leaves + node * kFanout);
    __builtin_prefetch(call_.generation + partition * call_.layout.leaves + node * kFanout);
  }

  const SumTreeSample& call_;
  const Start* start_;                           // of the last draw's partition
  int64_t last_partition_ = -1, last_node_ = 0;  // of the last draw
  uint32_t high_[kTogether], low_[kTogether];
  // Of the draws under way, those that fall into a partition held here:
  int64_t size_ = 0;
  int64_t draw_[kTogether], partition_[kTogether], node_[kTogether];
  double target_[kTogether];
  Fan fan_;
};

void SumTreeSample::Run(int64_t task) {
  const int64_t begin = task * kChunk, end = std::min(draws, begin + kChunk);
  if (all_partitions == 1 && first == 0 && partitions == 1 && last_ == 0) {
    std::fill(rows.partition + begin, rows.partition + end, 0);
    DrawOne(begin, end);
  } else {
    std::fill(rows.partition + begin, rows.partition + end, -1);
    StoreNone(begin, end);
    if (last_ >= 0) DrawMany(begin, end);
  }
}

// What stands where nothing has mass or nothing is held here.
void SumTreeSample::StoreNone(int64_t begin, int64_t end) const {
  std::fill(rows.slot + begin, rows.slot + end, -1);
  std::fill(rows.probability + begin, rows.probability + end, 0.0f);
  std::fill(rows.length + begin, rows.length + end, 0);
  std::fill(rows.generation + begin, rows.generation + end, 0);
  std::fill(rows.least + begin / kDrawGroup, rows.least + DrawnRows::Groups(end),
            std::numeric_limits<float>::infinity());
}

GEAR_JAX_CLONES void SumTreeSample::DrawOne(int64_t begin, int64_t end) const {
  Walk(*this).Draw<true>(begin, end);
  Divide(begin, end);
}

GEAR_JAX_CLONES void SumTreeSample::DrawMany(int64_t begin, int64_t end) const {
  Walk(*this).Draw<false>(begin, end);
  Divide(begin, end);
}

// Makes probabilities of masses.
GEAR_JAX_INLINE void SumTreeSample::Divide(int64_t begin, int64_t end) const {
  float* const probability = rows.probability;
  const float total = total_;
  for (; begin < end; begin += kDrawGroup) {
    uint32_t least = LeastBits(0);
    for (int64_t i = begin; i < std::min(end, begin + kDrawGroup); ++i) {
      probability[i] = Probability(probability[i], total);
      least = std::min(least, LeastBits(probability[i]));
    }
    memcpy(rows.least + begin / kDrawGroup, &least, sizeof(least));
  }
}

}  // namespace gear_jax
