// sumtree: a tree of sums over the masses of slots, for drawing in proportion to mass. The core, without XLA.
//
// Layout. A partition has S leaves (its masses). Level 1 has a node for every 16 leaves, level k + 1 one for every 16
// nodes of level k, up to a level of one node, the root. All levels of a partition lie in one row of M floats, level 1
// first, each level padded with zeros to a multiple of 16.
//
// Rounding. A node is the float32 sum of its 16 children in one fixed order (halves added elementwise: 8, 4, 2, 1). It
// is always formed anew from its children, never by adding a difference: there is no drift, and equal leaves give equal
// sums whatever the history, the thread count or the device count. A draw is a float64 of 53 random bits. It
// begins at the lowest level that has not many more nodes than the batch has draws, by prefix sums in float64; below
// that, children are compared in float32 and their mass is taken off in float64. Where rounding leaves a draw beyond
// the last child, the last child with mass takes it. A leaf without mass is never drawn. A device needs the roots and
// its own partitions, and draws as any other number of devices would.
//
// CPU and CUDA draw the same slots: both begin at the same level, and every operation and its order are the same
// (sumtree_math.h). Prefix sums run over 16 values, over 16 such groups, then over the blocks of 256, and are added as
// outer + (inner + within), which a thread block can do as well as one thread. To begin at the root would save a device
// those prefix sums, but float32 sums are off by up to 2^-24 of themselves, which moves a draw to a neighbouring slot
// as often as that is a part of a slot's mass: up to about S / 2^24 of the draws (2.5 % of them at S = 10^6, as tried).
// Denormals are zero on both: XLA sets its CPU threads so. What remains are masses whose sum is infinite, from which
// each draws some slot with mass, and targets that a float32 rounds to the smallest normal number or to zero.
#ifndef GEAR_JAX_FFI_SUMTREE_H_
#define GEAR_JAX_FFI_SUMTREE_H_

#include <cstdint>
#include <vector>

#include "ffi/parallel.h"
#include "ffi/sumtree_math.h"

namespace gear_jax {

struct SumTreeLayout {
  explicit SumTreeLayout(int64_t leaves);

  int64_t leaves;               // S
  int64_t width = 0;            // M
  std::vector<int64_t> nodes;   // of each level, level 1 first
  std::vector<int64_t> offset;  // of each level in the row
  int64_t root() const { return offset.back(); }
};

// Sets leaves in order (of several writes to a leaf the last stays) and forms the sums above them anew. O(K log S).
struct SumTreeUpdate {
  int64_t partitions = 0;     // P
  float* priority = nullptr;  // [P, S]
  float* mass = nullptr;      // [P, S]
  float* sums = nullptr;      // [P, M]

  // A slot outside [0, P * S) is skipped.
  void Run(const SumTreeLayout& layout, int64_t count, const int32_t* slot, const float* new_priority,
           const float* new_mass) const;
};

// The mass of each partition of a table, out of an array of its own or out of the sums [P, M].
struct RootArray {
  GEAR_JAX_HD float operator[](int64_t partition) const { return data[partition * stride]; }

  const float* data = nullptr;  // the first
  int64_t stride = 1;
};

// What is known of B draws. Where nothing has mass, slot and partition are -1.
struct DrawnRows {
  GEAR_JAX_HD static int64_t Groups(int64_t draws) { return (draws + kDrawGroup - 1) / kDrawGroup; }

  int32_t* slot = nullptr;         // [B], of the whole table; -1 where it is not held here either
  int32_t* partition = nullptr;    // [B], of the whole table, held here or not
  float* probability = nullptr;    // [B], mass / total; 0 where slot is -1, as are the next two
  int32_t* length = nullptr;       // [B]
  uint32_t* generation = nullptr;  // [B]
  float* least = nullptr;          // [Groups(B)], the least positive probability of each 512 draws; inf: none
};

// Draws slots, each with probability mass / total, and reads what is known of them. Work over chunks of draws.
class SumTreeSample : public Work {
 public:
  SumTreeSample(int64_t leaves) : layout(leaves) {}

  SumTreeLayout layout;
  int64_t all_partitions = 0;            // of the table
  int64_t first = 0;                     // the first partition that is held here
  int64_t partitions = 0;                // P, held here
  RootArray roots;                       // [all_partitions]
  const float* mass = nullptr;           // [P, S]
  const float* sums = nullptr;           // [P, M]
  const int32_t* length = nullptr;       // [P, S]
  const uint32_t* generation = nullptr;  // [P, S]
  int64_t draws = 0;                     // B
  const uint32_t* bits = nullptr;        // [B, 2]; or null, and they are drawn from `key`
  uint32_t key[2] = {0, 0};
  bool stratified = false;  // draw i falls in the i-th of B even parts of the mass, so that slots come in order
  DrawnRows rows;

  // Fixes the prefix sums of the roots; call once, after the fields are set. Returns the total mass.
  float Prepare();

  int64_t size() const override { return (draws + kChunk - 1) / kChunk; }
  void Run(int64_t task) override;

 private:
  static constexpr int64_t kChunk = 1024;
  static_assert(kChunk % kDrawGroup == 0, "one task gives a least probability");
  // The nodes of one level of a partition as prefix sums, with a guide that says where in them to begin: a draw starts
  // at that level and not at the root. A large batch starts low, where a table has up to kStarts nodes.
  struct Start {
    std::vector<double>
        prefix;  // [nodes + 1]; behind the last node with mass stands a NaN, below which all targets are
    std::vector<int32_t> guide;  // for each even part of the mass, the node in which it begins
    double scale = 0;            // parts by mass
  };
  class Walk;

  void MakeStart(const float* node, int64_t nodes, Start& start) const;
  void StoreNone(int64_t begin, int64_t end) const;
  void DrawOne(int64_t begin, int64_t end) const;   // where the table has one partition
  void DrawMany(int64_t begin, int64_t end) const;  // and more
  void Divide(int64_t begin, int64_t end) const;
  // What lies below the nodes of a level: the nodes of the level under it, or the leaves.
  const float* Below(int64_t partition, size_t level) const {
    if (level == 0) return mass + partition * layout.leaves;
    return sums + partition * layout.width + layout.offset[level - 1];
  }

  std::vector<double> prefix_;  // [all_partitions + 1]
  float total_ = 0;
  int64_t last_ = -1;          // the last partition with mass
  size_t level_ = 0;           // of the starts
  std::vector<Start> starts_;  // of the partitions held here
};

}  // namespace gear_jax

#endif  // GEAR_JAX_FFI_SUMTREE_H_
