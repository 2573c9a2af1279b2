// The table of ffi/tests/sumtree_tree.h as the arguments of kernels.
#ifndef GEAR_JAX_CUDA_TESTS_SUMTREE_CALL_H_
#define GEAR_JAX_CUDA_TESTS_SUMTREE_CALL_H_

#include <algorithm>
#include <functional>
#include <numeric>
#include <random>
#include <vector>

#include "cuda/sumtree_device.h"
#include "cuda/sumtree_draw.h"
#include "ffi/tests/sumtree_tree.h"

namespace gear_jax {

// Runs f(0) … f(n - 1) in any order, as the threads of a grid might.
inline void ForEachThread(int64_t n, std::mt19937& random, const std::function<void(int64_t)>& f) {
  std::vector<int64_t> order(n);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  for (const int64_t i : order) f(i);
}

inline DeviceTree DeviceOf(Tree& host) {
  DeviceTree tree(host.layout, host.partitions);
  tree.priority = host.priority.data(), tree.mass = host.mass.data(), tree.sums = host.sums.data();
  return tree;
}

inline DeviceWrites DeviceOf(const Writes& writes) {
  return {static_cast<int64_t>(writes.slot.size()), writes.slot.data(), writes.priority.data(), writes.mass.data()};
}

// A call of sumtree_sample without its pointers.
inline DeviceDraws DrawsOf(const Tree& table, const Batch& batch) {
  DeviceDraws draws;
  draws.tree = DeviceTree(table.layout, batch.Held(table));
  draws.all_partitions = table.partitions;
  draws.draws = batch.draws;
  draws.stratified = batch.stratified;
  draws.level = StartLevel(draws.tree.nodes, draws.tree.levels, draws.all_partitions, draws.draws);
  return draws;
}

}  // namespace gear_jax

#endif  // GEAR_JAX_CUDA_TESTS_SUMTREE_CALL_H_
