// One step of a draw's way down the sum tree on a CPU: of 16 children the one in which it falls.
//
// The operations of sumtree_math.h's Pick and their order, with tables in the place of products: what lies before each
// of four values, of which the first is 0. Values and targets are taken not to be negative.
#ifndef GEAR_JAX_FFI_SUMTREE_DESCEND_H_
#define GEAR_JAX_FFI_SUMTREE_DESCEND_H_

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include <algorithm>
#include <cstdint>

#include "ffi/sumtree_math.h"

// So that what a clone calls is compiled as the clone is.
#define GEAR_JAX_INLINE __attribute__((always_inline)) inline

namespace gear_jax {

// The last child with mass takes a draw that rounding left beyond all of them: the sum above was a little larger.
inline int64_t LastWithMass(const float* child, double& target) {
  int64_t last = kFanout - 1;
  while (last > 0 && !HasMass(child[last])) --last;
  target = child[last];
  return last;
}

#ifdef __SSE2__
// Sums of four children each.
GEAR_JAX_INLINE void SumFours(const float* child, float* four) {
  const __m128 v0 = _mm_loadu_ps(child), v1 = _mm_loadu_ps(child + 4);
  const __m128 v2 = _mm_loadu_ps(child + 8), v3 = _mm_loadu_ps(child + 12);
  const __m128 low = _mm_add_ps(_mm_shuffle_ps(v0, v1, 0x88), _mm_shuffle_ps(v0, v1, 0xDD));
  const __m128 high = _mm_add_ps(_mm_shuffle_ps(v2, v3, 0x88), _mm_shuffle_ps(v2, v3, 0xDD));
  _mm_store_ps(four, _mm_add_ps(_mm_shuffle_ps(low, high, 0x88), _mm_shuffle_ps(low, high, 0xDD)));
}

GEAR_JAX_INLINE void SumBefore(const float* value, float* before) {
  const __m128 v = _mm_loadu_ps(value);
  const auto from = [](__m128 x, int a, int b, int c) {
    return _mm_and_ps(x, _mm_castsi128_ps(_mm_setr_epi32(0, a, b, c)));
  };
  const __m128 one = from(_mm_shuffle_ps(v, v, 0x00), -1, -1, -1), two = from(_mm_shuffle_ps(v, v, 0x55), 0, -1, -1);
  const __m128 three = from(_mm_shuffle_ps(v, v, 0xAA), 0, 0, -1);
  _mm_store_ps(before, _mm_add_ps(_mm_add_ps(one, two), three));
}

GEAR_JAX_INLINE int64_t PickOf(const float* before, double& target) {
  const __m128d t = _mm_set_sd(target);
  const __m128 narrow = _mm_cvtsd_ss(_mm_setzero_ps(), t);
  const __m128 reached = _mm_cmple_ps(_mm_load_ps(before), _mm_shuffle_ps(narrow, narrow, 0));
  const int64_t chosen = __builtin_popcount(_mm_movemask_ps(reached) & 14);
  const __m128d left = _mm_sub_sd(t, _mm_cvtss_sd(_mm_setzero_pd(), _mm_load_ss(before + chosen)));
  target = _mm_cvtsd_f64(_mm_max_sd(left, _mm_setzero_pd()));  // zero where it is not a number
  return chosen;
}
#else
GEAR_JAX_INLINE void SumFours(const float* child, float* four) {
  for (int j = 0; j < 4; ++j) four[j] = (child[4 * j] + child[4 * j + 1]) + (child[4 * j + 2] + child[4 * j + 3]);
}

GEAR_JAX_INLINE void SumBefore(const float* value, float* before) {
  before[0] = 0, before[1] = value[0], before[2] = value[0] + value[1], before[3] = before[2] + value[2];
}

GEAR_JAX_INLINE int64_t PickOf(const float* before, double& target) {
  const float t = Narrow(target);
  const int64_t chosen = (before[1] <= t) + (before[2] <= t) + (before[3] <= t);
  target -= static_cast<double>(before[chosen]);
  target = target > 0 ? target : 0.0;
  return chosen;
}
#endif

// A draw takes the last of four whatever the target, so only one beyond the end can be at a child without mass or reach
// that child's own mass.
GEAR_JAX_INLINE int64_t WithMass(const float* child, int64_t chosen, double& target) {
  return __builtin_expect(target < child[chosen], 1) ? chosen : LastWithMass(child, target);
}

// Of 16 children, the first of the four in which `target` falls; takes the mass before them off `target`.
GEAR_JAX_INLINE int64_t FindFour(const float* child, double& target) {
  alignas(16) float four[4], before[4];
  SumFours(child, four);
  SumBefore(four, before);
  return 4 * PickOf(before, target);
}

// Of these four, the child in which `target` falls; takes the mass before it off `target`.
GEAR_JAX_INLINE int64_t FindInFour(const float* child, int64_t first, double& target) {
  alignas(16) float before[4];
  SumBefore(child + first, before);
  return WithMass(child, first + PickOf(before, target), target);
}

// Both for several draws that come to one node.
class Fan {
 public:
  GEAR_JAX_INLINE bool IsOf(const float* node) const { return node == node_; }
  GEAR_JAX_INLINE void Take(const float* node, const float* child) {
    alignas(16) float four[4];
    node_ = node;
    std::copy_n(child, kFanout, child_);
    SumFours(child_, four);
    SumBefore(four, before_);
    for (int j = 0; j < 4; ++j) SumBefore(child_ + 4 * j, before_ + 4 * (j + 1));
  }
  GEAR_JAX_INLINE int64_t Descend(double& target) const {
    const int64_t j = 4 * PickOf(before_, target);
    return WithMass(child_, j + PickOf(before_ + 4 + j, target), target);
  }

 private:
  const float* node_ = nullptr;  // whose children these are: where they lie
  alignas(16) float child_[kFanout];
  alignas(16) float before_[4 * 5];  // of the sums of four children, of the children of each
};

}  // namespace gear_jax

#endif  // GEAR_JAX_FFI_SUMTREE_DESCEND_H_
