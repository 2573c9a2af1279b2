// What the threads of sumtree_sample's kernel do. Plain code, so that the CPU's tests run it too.
#ifndef GEAR_JAX_CUDA_SUMTREE_DRAW_H_
#define GEAR_JAX_CUDA_SUMTREE_DRAW_H_

#include <cstdint>

#include "cuda/prefix_sums.h"
#include "cuda/sumtree_device.h"

namespace gear_jax {

// Of four values, the one with a number that is known only when the code runs.
GEAR_JAX_HD_INLINE float OfFour(int i, float v0, float v1, float v2, float v3) {
  const float low = i == 0 ? v0 : v1, high = i == 2 ? v2 : v3;
  return i < 2 ? low : high;
}

// The child in which `target` falls, of 16; takes the mass before it off `target`. ffi/sumtree.cc says more.
GEAR_JAX_HD_INLINE int Descend(const Children& child, double& target) {
  const float* v = child.v;
  float four[3];
  for (int j = 0; j < 3; ++j) four[j] = Add(Add(v[4 * j], v[4 * j + 1]), Add(v[4 * j + 2], v[4 * j + 3]));
  const int j = Pick(four[0], four[1], four[2], target);
  float of[4];
  for (int k = 0; k < 4; ++k) of[k] = OfFour(j, v[k], v[4 + k], v[8 + k], v[12 + k]);
  const int k = Pick(of[0], of[1], of[2], target);
  if (target < Widen(OfFour(k, of[0], of[1], of[2], of[3]))) return 4 * j + k;
  // Beyond the end: the last child with mass.
  int last = 0;
  float mass = v[0];
  for (int i = 1; i < kFanout; ++i) {
    if (HasMass(v[i])) last = i, mass = v[i];
  }
  target = Widen(mass);
  return last;
}

// A call of sumtree_sample, as its kernel's argument. The fields are those of SumTreeSample; pointers are the device's.
struct DeviceDraws {
  static constexpr int64_t kWarps = kDrawGroup / 32;  // of a block

  DeviceTree tree;
  int64_t all_partitions = 0;
  const int32_t* first = nullptr;        // [1]
  RootArray roots;                       // [all_partitions]
  const int32_t* length = nullptr;       // [P, S]
  const uint32_t* generation = nullptr;  // [P, S]
  int64_t draws = 0;                     // B
  const uint32_t* bits = nullptr;        // [B, 2]; or null, and they are drawn from `key`
  const uint32_t* key = nullptr;         // [2]
  bool stratified = false;
  DrawnRows rows;
  float* total = nullptr;           // [1]
  const int32_t* ticket = nullptr;  // [1], copied to ticket_out
  int32_t* ticket_out = nullptr;
  int level = 0;  // at which draws begin

  // Draws begin at the root where there are no prefix sums of a lower level.
  GEAR_JAX_HD int64_t Starts() const { return level + 1 < tree.levels ? tree.nodes[level] : 0; }
  GEAR_JAX_HD int64_t Rows() const { return Starts() > 0 ? tree.partitions : 0; }

  // Of shared memory.
  int64_t MemoryBytes() const {
    return Doubles() * static_cast<int64_t>(sizeof(double)) + kWarps * static_cast<int64_t>(sizeof(uint32_t));
  }
  // Of the prefix sums.
  GEAR_JAX_HD int64_t Doubles() const { return PrefixSums::Size(all_partitions) + Rows() * PrefixSums::Size(Starts()); }
  GEAR_JAX_HD uint32_t* LeastOfWarps(double* memory) const { return reinterpret_cast<uint32_t*>(memory + Doubles()); }
  GEAR_JAX_HD PrefixSums Roots(double* memory) const { return {memory, static_cast<int32_t>(all_partitions)}; }
  GEAR_JAX_HD PrefixSums Nodes(double* memory, int64_t partition) const {
    memory += PrefixSums::Size(all_partitions) + partition * PrefixSums::Size(Starts());
    return {memory, static_cast<int32_t>(Starts())};
  }
};

// The three steps of the prefix sums, of which thread `thread` of `threads` does its share; a block waits after each.
GEAR_JAX_HD inline void SumGroups(const DeviceDraws& draws, double* memory, int thread, int threads) {
  const int64_t root_groups = PrefixSums::Groups(draws.all_partitions), groups = PrefixSums::Groups(draws.Starts());
  for (int64_t i = thread; i < root_groups + draws.Rows() * groups; i += threads) {
    if (i < root_groups) {
      Children value;
      for (int k = 0; k < kFanout; ++k) {
        const int64_t p = i * kFanout + k;
        value.v[k] = p < draws.all_partitions ? draws.roots[p] : 0.0f;
      }
      draws.Roots(memory).SumGroup(static_cast<int32_t>(i), value.v);
      continue;
    }
    const int64_t partition = (i - root_groups) / groups, group = (i - root_groups) % groups;
    // What pads the level is read too, and left out of the sums.
    const Children value = ReadChildren(draws.tree.Node(partition, draws.level, group * kFanout), kFanout);
    draws.Nodes(memory, partition).SumGroup(static_cast<int32_t>(group), value.v);
  }
}

GEAR_JAX_HD inline void SumBlocks(const DeviceDraws& draws, double* memory, int thread, int threads) {
  const int64_t root_blocks = PrefixSums::Blocks(draws.all_partitions), blocks = PrefixSums::Blocks(draws.Starts());
  for (int64_t i = thread; i < root_blocks + draws.Rows() * blocks; i += threads) {
    const int64_t partition = i < root_blocks ? 0 : (i - root_blocks) / blocks;
    const int64_t block = i < root_blocks ? i : (i - root_blocks) % blocks;
    const PrefixSums sums = i < root_blocks ? draws.Roots(memory) : draws.Nodes(memory, partition);
    sums.SumBlock(static_cast<int32_t>(block));
  }
}

GEAR_JAX_HD inline void SumAll(const DeviceDraws& draws, double* memory, int thread, int threads) {
  for (int64_t i = thread; i < 1 + draws.Rows(); i += threads) {
    (i == 0 ? draws.Roots(memory) : draws.Nodes(memory, i - 1)).SumAll();
  }
}

GEAR_JAX_HD_INLINE double Total(const DeviceDraws& draws, double* memory) {
  return draws.Roots(memory).Before(static_cast<int32_t>(draws.all_partitions));
}

// The last of n values with mass, or 0: it takes what is beyond all of them.
template <typename Values>
GEAR_JAX_HD int32_t LastWithMass(const Values& value, int64_t n) {
  int64_t last = n - 1;
  while (last > 0 && !(Flushed(value[last]) > 0)) --last;
  return static_cast<int32_t>(last);
}

// Where draw i falls: a partition of the table, or -1; the same as one that is held here, or -1; a leaf of it.
struct Place {
  int32_t in_table = -1;
  int64_t partition = -1, leaf = 0;
};

GEAR_JAX_HD_INLINE Place FindPlace(const DeviceDraws& draws, double* memory, int64_t i) {
  const DeviceTree& tree = draws.tree;
  const double total = Total(draws, memory);
  if (!(total > 0)) return {};
  uint32_t high, low;
  if (draws.bits == nullptr) {
    Threefry<1>(draws.key, static_cast<uint32_t>(i), &high, &low);
  } else {
    high = draws.bits[2 * i], low = draws.bits[2 * i + 1];
  }
  double target = Target(draws.stratified, i, Uniform(high, low), total, total / static_cast<double>(draws.draws));

  const PrefixSums roots = draws.Roots(memory);
  int32_t in_table = roots.Find(target);
  if (in_table == draws.all_partitions) in_table = LastWithMass(draws.roots, draws.all_partitions);
  target -= roots.Before(in_table);
  const int64_t partition = in_table - static_cast<int64_t>(*draws.first);
  if (partition < 0 || partition >= tree.partitions) return {in_table};

  int64_t node = 0;
  if (draws.Starts() > 0) {
    const PrefixSums starts = draws.Nodes(memory, partition);
    int32_t start = starts.Find(target);
    if (start == draws.Starts()) start = LastWithMass(tree.Node(partition, draws.level, 0), draws.Starts());
    target -= starts.Before(start);
    node = start;
  }
  for (int level = draws.level; level >= 0; --level) {
    const int64_t child = node * kFanout + Descend(ChildrenOf(tree, partition, level, node), target);
    // The minimum does nothing but keep sums that are not of this mass (all ones, say) inside the arrays.
    const int64_t last = (level > 0 ? tree.nodes[level - 1] : tree.leaves) - 1;
    node = child < last ? child : last;
  }
  return {in_table, partition, node};
}

// Draw i, once the prefix sums are there. Returns its probability.
GEAR_JAX_HD_INLINE float Draw(const DeviceDraws& draws, double* memory, int64_t i) {
  const Place place = FindPlace(draws, memory, i);
  const bool here = place.partition >= 0;
  const int64_t slot = place.partition * draws.tree.leaves + place.leaf;
  const DrawnRows& rows = draws.rows;
  const float probability = here ? Probability(draws.tree.mass[slot], Narrow(Total(draws, memory))) : 0.0f;
  rows.slot[i] = here ? static_cast<int32_t>(*draws.first * draws.tree.leaves + slot) : -1;
  rows.partition[i] = place.in_table;
  rows.probability[i] = probability;
  rows.length[i] = here ? draws.length[slot] : 0;
  rows.generation[i] = here ? draws.generation[slot] : 0;
  return probability;
}

}  // namespace gear_jax

#endif  // GEAR_JAX_CUDA_SUMTREE_DRAW_H_
