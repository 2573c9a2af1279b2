// What the threads of the sum tree's kernels do. Plain code, so that the CPU's tests run it too.
#ifndef GEAR_JAX_CUDA_SUMTREE_DEVICE_H_
#define GEAR_JAX_CUDA_SUMTREE_DEVICE_H_

#include <cstdint>
#include <cstring>

#include "ffi/sumtree.h"
#include "ffi/sumtree_math.h"

namespace gear_jax {

// The trees of the partitions that a device holds, as a kernel's argument.
struct DeviceTree {
  static constexpr int kLevels = 16;  // 16^16 leaves

  DeviceTree() = default;
  DeviceTree(const SumTreeLayout& layout, int64_t partitions)
      : partitions(partitions),
        leaves(layout.leaves),
        width(layout.width),
        levels(static_cast<int>(layout.nodes.size())) {
    for (int i = 0; i < levels; ++i) nodes[i] = layout.nodes[i], offset[i] = layout.offset[i];
  }

  int64_t partitions = 0;  // P
  int64_t leaves = 0;      // S
  int64_t width = 0;       // M
  int levels = 0;
  int64_t nodes[kLevels] = {};
  int64_t offset[kLevels] = {};
  float* priority = nullptr;  // [P, S]; null for draws
  float* mass = nullptr;      // [P, S]
  float* sums = nullptr;      // [P, M]

  GEAR_JAX_HD float* Node(int64_t partition, int level, int64_t node) const {
    return sums + partition * width + offset[level] + node;
  }
};

// 16 children, in registers: no member is indexed by a number that is not known when the code is compiled.
struct Children {
  float v[kFanout];
};

// Reads `count` values, those beyond them as zeros; 16 of them in pieces of 16 bytes where they are aligned, which the
// leaves of a partition are not if S is not a multiple of 4.
GEAR_JAX_HD_INLINE Children ReadChildren(const float* from, int64_t count) {
  Children child;
  if (count >= kFanout && reinterpret_cast<uintptr_t>(from) % 16 == 0) {
#if defined(__CUDA_ARCH__)
    for (int j = 0; j < 4; ++j) {
      const float4 quad = reinterpret_cast<const float4*>(from)[j];
      child.v[4 * j] = quad.x, child.v[4 * j + 1] = quad.y, child.v[4 * j + 2] = quad.z, child.v[4 * j + 3] = quad.w;
    }
#else
    memcpy(child.v, from, sizeof(child.v));
#endif
  } else {
    for (int i = 0; i < kFanout; ++i) child.v[i] = i < count ? from[i] : 0.0f;
  }
  return child;
}

// The children of a node; level 0 lies above the leaves.
GEAR_JAX_HD_INLINE Children ChildrenOf(const DeviceTree& tree, int64_t partition, int level, int64_t node) {
  if (level > 0) return ReadChildren(tree.Node(partition, level - 1, node * kFanout), kFanout);
  return ReadChildren(tree.mass + partition * tree.leaves + node * kFanout, tree.leaves - node * kFanout);
}

// sumtree_update. Its phases, each of which begins when the one before has ended everywhere:
//   Mark    every write leaves its number at the leaf, the largest stays: that of the last write;
//   Write   the write that finds its own number there is the last one, and sets the leaf;
//   Form    level by level, sums are formed anew.
// The numbers stand where the masses do, as bits of NaNs which, taken for whole numbers, are larger than those of every
// other float and of the NaN that x86 makes. So no memory is needed, and the masses may have been anything but a NaN
// with bits above 0xFFC00000, which no priority and no zeroed table has.
struct DeviceWrites {
  static constexpr int64_t kMarks = (1 << 22) - 1;  // so many writes can be told apart at a time

  int64_t count = 0;                // K
  const int32_t* slot = nullptr;    // [K]
  const float* priority = nullptr;  // [K]
  const float* mass = nullptr;      // [K]
};

GEAR_JAX_HD inline uint32_t MarkOf(int64_t number) {
  return ~uint32_t{0} - static_cast<uint32_t>(DeviceWrites::kMarks - 1 - number);
}

GEAR_JAX_HD inline bool Inside(const DeviceTree& tree, int32_t slot) {
  return slot >= 0 && slot < tree.partitions * tree.leaves;
}

// Write `first + number`.
GEAR_JAX_HD inline void Mark(const DeviceTree& tree, const DeviceWrites& writes, int64_t first, int64_t number) {
  const int32_t slot = writes.slot[first + number];
  if (!Inside(tree, slot)) return;
  float* leaf = tree.mass + slot;
#if defined(__CUDA_ARCH__)
  atomicMax(reinterpret_cast<uint32_t*>(leaf), MarkOf(number));
#else
  uint32_t bits;
  memcpy(&bits, leaf, sizeof(bits));
  bits = bits > MarkOf(number) ? bits : MarkOf(number);
  memcpy(leaf, &bits, sizeof(bits));
#endif
}

GEAR_JAX_HD inline void Write(const DeviceTree& tree, const DeviceWrites& writes, int64_t first, int64_t number) {
  const int32_t slot = writes.slot[first + number];
  if (!Inside(tree, slot)) return;
  const float* leaf = tree.mass + slot;
#if defined(__CUDA_ARCH__)
  const uint32_t bits = __ldcg(reinterpret_cast<const uint32_t*>(leaf));  // where the atomics were made
#else
  uint32_t bits;
  memcpy(&bits, leaf, sizeof(bits));
#endif
  if (bits != MarkOf(number)) return;
  tree.priority[slot] = writes.priority[first + number];
  tree.mass[slot] = writes.mass[first + number];
}

GEAR_JAX_HD inline void FormNode(const DeviceTree& tree, int64_t partition, int level, int64_t node) {
  const Children child = ChildrenOf(tree, partition, level, node);
  *tree.Node(partition, level, node) = Sum16(child.v);
}

// How a level is formed: every node of it, or where there are fewer writes than nodes, the node above each write.
// Several writes may then form the same node; they store the same sum.
GEAR_JAX_HD inline bool FormsEveryNode(const DeviceTree& tree, const DeviceWrites& writes, int level) {
  return writes.count >= tree.partitions * tree.nodes[level];
}

GEAR_JAX_HD inline int64_t FormSize(const DeviceTree& tree, const DeviceWrites& writes, int level) {
  return FormsEveryNode(tree, writes, level) ? tree.partitions * tree.nodes[level] : writes.count;
}

// Piece i of FormSize.
GEAR_JAX_HD inline void Form(const DeviceTree& tree, const DeviceWrites& writes, int level, int64_t i) {
  if (FormsEveryNode(tree, writes, level)) {
    const int64_t partition = i / tree.nodes[level];
    return FormNode(tree, partition, level, i - partition * tree.nodes[level]);
  }
  const int32_t slot = writes.slot[i];
  if (!Inside(tree, slot)) return;
  const int64_t partition = slot / tree.leaves, leaf = slot - partition * tree.leaves;
  FormNode(tree, partition, level, leaf >> (4 * (level + 1)));
}

// Up to so many writes are the work of one thread block: the latency of its phases is then less than that of launches.
inline constexpr int64_t kOneBlockWrites = 4096;

// The level from which on one thread block forms all that is left of a partition: a few microseconds for one
// multiprocessor, unless there are more partitions than those can work at together. `levels` where no level is that
// small.
inline int TopLevel(const DeviceTree& tree) {
  constexpr int64_t kNodes = 4096, kAllNodes = 1 << 19;
  int level = 0;
  while (level < tree.levels && (tree.nodes[level] > kNodes || tree.nodes[level] * tree.partitions > kAllNodes))
    ++level;
  return level;
}

}  // namespace gear_jax

#endif  // GEAR_JAX_CUDA_SUMTREE_DEVICE_H_
