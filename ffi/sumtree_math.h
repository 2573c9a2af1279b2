// The arithmetic of the sum tree, the same for the CPU and for a CUDA kernel, so that both draw the same slots
// (sumtree.h).
//
// XLA's CPU threads take denormals for zero. A device has no such mode but instructions of that kind, and these are
// what the functions here use there, each with one rounding, whatever nvcc's flags are. On the CPU the thread's mode
// decides.
#ifndef GEAR_JAX_FFI_SUMTREE_MATH_H_
#define GEAR_JAX_FFI_SUMTREE_MATH_H_

#include <cstdint>
#include <cstring>

#include "ffi/host_device.h"

#define GEAR_JAX_HD_INLINE GEAR_JAX_HD __attribute__((always_inline)) inline

namespace gear_jax {

inline constexpr int64_t kFanout = 16;

// The high counter word of draws: _random.py's domain, stream 0.
inline constexpr uint32_t kDrawStream = 0x67656172;

// A batch begins at the lowest level at which the whole table has no more nodes than this, or than the batch has draws.
inline constexpr int64_t kStarts = 8192;

// Of so many draws in a row the least probability is given: what a thread block of a device draws at a time.
inline constexpr int64_t kDrawGroup = 512;

GEAR_JAX_HD_INLINE float Add(float a, float b) {
#if defined(__CUDA_ARCH__)
  float sum;
  asm("add.rn.ftz.f32 %0, %1, %2;" : "=f"(sum) : "f"(a), "f"(b));
  return sum;
#else
  return a + b;
#endif
}

// What the other operands of a comparison went through on a device, for one that comes from memory.
GEAR_JAX_HD_INLINE float Flushed(float x) {
#if defined(__CUDA_ARCH__)
  return Add(x, 0.0f);
#else
  return x;
#endif
}

GEAR_JAX_HD_INLINE double Widen(float x) { return static_cast<double>(Flushed(x)); }

GEAR_JAX_HD_INLINE float Narrow(double x) {
#if defined(__CUDA_ARCH__)
  float nearest;
  asm("cvt.rn.ftz.f32.f64 %0, %1;" : "=f"(nearest) : "d"(x));
  return nearest;
#else
  return static_cast<float>(x);
#endif
}

GEAR_JAX_HD_INLINE float Divide(float a, float b) {
#if defined(__CUDA_ARCH__)
  float quotient;
  asm("div.rn.ftz.f32 %0, %1, %2;" : "=f"(quotient) : "f"(a), "f"(b));
  return quotient;
#else
  return a / b;
#endif
}

GEAR_JAX_HD_INLINE float Multiply(float a, float b) {
#if defined(__CUDA_ARCH__)
  float product;
  asm("mul.rn.ftz.f32 %0, %1, %2;" : "=f"(product) : "f"(a), "f"(b));
  return product;
#else
  return a * b;
#endif
}

// A product that is rounded before anything is added to it.
GEAR_JAX_HD_INLINE double Times(double a, double b) {
#if defined(__CUDA_ARCH__)
  return __dmul_rn(a, b);
#else
  return a * b;
#endif
}

// The sum of 16 children in the order that sumtree.h states.
GEAR_JAX_HD_INLINE float Sum16(const float* child) {
  float a[8];
  for (int i = 0; i < 8; ++i) a[i] = Add(child[i], child[i + 8]);
  for (int i = 0; i < 4; ++i) a[i] = Add(a[i], a[i + 4]);
  return Add(Add(a[0], a[2]), Add(a[1], a[3]));
}

// Of four values, the one in whose share of the sum `target` falls; takes what lies before it off `target`.
GEAR_JAX_HD_INLINE int Pick(float v0, float v1, float v2, double& target) {
  const float t = Narrow(target);
  const float one = Flushed(v0), two = Add(one, v1), three = Add(two, v2);
  const bool a = one <= t, b = two <= t, c = three <= t;
  // Products, not branches: where a draw falls cannot be predicted. The sum is one, two or three to the bit.
  // The float32 comparison may be ahead of the float64 target, which must not fall below zero for it.
  target -= Widen(Add(Add(static_cast<float>(a) * v0, static_cast<float>(b) * v1), static_cast<float>(c) * v2));
  target = target > 0 ? target : 0.0;
  return a + b + c;
}

// mass / total: by the reciprocal, as XLA divides by a scalar, where neither it nor the total is denormal.
GEAR_JAX_HD_INLINE float Probability(float mass, float total) {
  return total >= 0x1p-126f && total <= 0x1p126f ? Multiply(mass, Divide(1.0f, total)) : Divide(mass, total);
}

// The bits of a probability, which order as probabilities do; those of infinity where there is none.
GEAR_JAX_HD_INLINE uint32_t LeastBits(float probability) {
  uint32_t bits;
  memcpy(&bits, &probability, sizeof(bits));
  return probability > 0 ? bits : 0x7F800000u;
}

// Also true for a denormal where it is taken for zero.
GEAR_JAX_HD_INLINE bool HasMass(float mass) {
  int32_t bits;
  memcpy(&bits, &mass, sizeof(bits));
  return bits > 0;
}

// The level at which draws begin. It depends on the table and the batch alone, so that every device that holds a part
// of the table draws alike. `nodes`: of each level of a partition.
GEAR_JAX_HD inline int StartLevel(const int64_t* nodes, int levels, int64_t all_partitions, int64_t draws) {
  const int64_t most = kStarts < draws ? kStarts : draws;
  int level = levels - 1;
  while (level > 0 && all_partitions * nodes[level - 1] <= most) --level;
  return level;
}

// Threefry-2x32 with 20 rounds of n counters from `counter` on (Salmon et al., SC 2011); the same words as
// gear_jax/_random.py. The loop over counters is innermost, so that it becomes vector code.
template <int64_t n>
GEAR_JAX_HD_INLINE void Threefry(const uint32_t* key, uint32_t counter, uint32_t* x0, uint32_t* x1) {
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

// A number in [0, 1) of 53 random bits.
GEAR_JAX_HD_INLINE double Uniform(uint32_t high, uint32_t low) {
  const uint64_t word = (static_cast<uint64_t>(high) << 32) | low;
  return Times(static_cast<double>(word >> 11), 0x1p-53);
}

// Where in [0, total) draw i of some falls. `part`: total / draws.
GEAR_JAX_HD_INLINE double Target(bool stratified, int64_t i, double uniform, double total, double part) {
  return stratified ? Times(static_cast<double>(i) + uniform, part) : Times(uniform, total);
}

}  // namespace gear_jax

#endif  // GEAR_JAX_FFI_SUMTREE_MATH_H_
