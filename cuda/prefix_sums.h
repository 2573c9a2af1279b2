// Prefix sums in float64 that a thread block forms in its shared memory, in the order that ffi/sumtree.h states. Plain
// code, so that the CPU's tests run it too.
#ifndef GEAR_JAX_CUDA_PREFIX_SUMS_H_
#define GEAR_JAX_CUDA_PREFIX_SUMS_H_

#include <cstdint>

#include "ffi/sumtree_math.h"

namespace gear_jax {

// Prefix sums of n values in a block's shared memory, formed in three steps. At i stands what the first i values add up
// to, counted from the last multiple of 16 before i; for a multiple of 16 from that of 256, for one of 256 from 0.
class PrefixSums {
 public:
  static constexpr int32_t kGroup = kFanout, kBlock = kFanout * kFanout;

  GEAR_JAX_HD PrefixSums(double* memory, int32_t n) : sum_(memory), n_(n) {}

  // Doubles that n values take. The gaps keep threads at every 16th or 256th place off each other's banks.
  GEAR_JAX_HD static int64_t Size(int64_t n) { return n + n / kGroup + n / kBlock + 1; }
  GEAR_JAX_HD static int64_t Groups(int64_t n) { return (n + kGroup - 1) / kGroup; }
  GEAR_JAX_HD static int64_t Blocks(int64_t n) { return (n + kBlock - 1) / kBlock; }

  // The steps: every group of 16 values, every block of 256, all blocks.
  GEAR_JAX_HD_INLINE void SumGroup(int32_t group, const float* value) const {
    double sum = 0;
    for (int32_t k = 0; k < kGroup; ++k) {
      sum += Widen(value[k]);
      if (kGroup * group + k < n_) At(kGroup * group + k + 1) = sum;
    }
  }
  GEAR_JAX_HD void SumBlock(int32_t block) const { SumEvery(kBlock * block, kGroup); }
  GEAR_JAX_HD void SumAll() const {
    double before = 0;
    for (int32_t i = 0; i < n_; i += kFanout * kBlock) before = SumEvery(i, kBlock, before);
  }

  // What the first i values add up to.
  GEAR_JAX_HD double Before(int32_t i) const {
    const double within = i % kGroup != 0 ? At(i) : 0;
    const double inner = i % kBlock >= kGroup ? At(i - i % kGroup) : 0;
    const double outer = i >= kBlock ? At(i - i % kBlock) : 0;
    return outer + (inner + within);
  }

  // The value in whose share of the sum `target` falls; n where that is beyond all, or not a number.
  GEAR_JAX_HD int32_t Find(double target) const {
    const int32_t block = kBlock * Count(n_ / kBlock, target, [&](int32_t i) { return At(kBlock * i); });
    const double outer = block > 0 ? At(block) : 0;
    const int32_t groups = Least(kGroup - 1, (n_ - block) / kGroup);
    const int32_t group =
        block + kGroup * Count(groups, target, [&](int32_t i) { return outer + At(block + kGroup * i); });
    const double inner = group > block ? At(group) : 0;
    const int32_t values = Least(kGroup - 1, n_ - group);
    return group + Count(values, target, [&](int32_t i) { return outer + (inner + At(group + i)); });
  }

 private:
  GEAR_JAX_HD static int32_t Least(int32_t a, int32_t b) { return a < b ? a : b; }
  GEAR_JAX_HD double& At(int32_t i) const { return sum_[i + i / kGroup + i / kBlock]; }

  // Makes running sums of the 16 places that follow `begin` at a distance of `step`; returns the last.
  GEAR_JAX_HD double SumEvery(int32_t begin, int32_t step, double sum = 0) const {
    double value[kFanout];  // all read before the first is written, so that the reads do not wait for each other
    for (int32_t k = 0; k < kFanout; ++k) {
      const int32_t i = begin + step * (k + 1);
      value[k] = i <= n_ ? At(i) : 0;
    }
    for (int32_t k = 0; k < kFanout; ++k) {
      const int32_t i = begin + step * (k + 1);
      sum += value[k];
      if (i <= n_) At(i) = sum;
    }
    return sum;
  }

  // Of `before(1)` … `before(n)`, which ascend, how many are not above the target.
  template <typename F>
  GEAR_JAX_HD static int32_t Count(int32_t n, double target, const F& before) {
    int32_t low = 0;
    while (low < n) {
      const int32_t middle = (low + n + 1) / 2;
      if (target < before(middle)) {
        n = middle - 1;
      } else {
        low = middle;
      }
    }
    return low;
  }

  double* sum_;
  int32_t n_;
};

}  // namespace gear_jax

#endif  // GEAR_JAX_CUDA_PREFIX_SUMS_H_
