// Copies between byte ranges of any alignment in chunks of 16 bytes: each chunk is aligned where it is written, and
// read as the one or two aligned chunks that cover its source, shifted in registers. Shared by gather and scatter;
// plain integer code, so that the CPU's tests run it too.
#ifndef GEAR_JAX_CUDA_CHUNK_H_
#define GEAR_JAX_CUDA_CHUNK_H_

#include <cstdint>

#include "ffi/host_device.h"

namespace gear_jax {

struct alignas(16) Chunk16 {
  uint32_t word[4];
};

// n / d for 32-bit d and 64-bit n, by a multiplication where that is exact.
struct Divisor {
  uint64_t magic = 0;  // 0: divide
  uint32_t d = 1;

  Divisor() = default;
  // `n_max`: the largest n. The quotient is exact where n * d < 2^64 (Lemire et al., "Faster remainder by direct
  // computation", 2019, theorem 1, with F = 64).
  GEAR_JAX_HD Divisor(uint32_t divisor, uint64_t n_max) : d(divisor) {
    if (d > 1 && n_max <= ~uint64_t{0} / d) magic = ~uint64_t{0} / d + 1;
  }
  GEAR_JAX_HD uint64_t Quotient(uint64_t n) const {
    if (magic == 0) return d == 1 ? n : n / d;
    return MultiplyHigh(n);
  }
  // The same without a branch, where `n_max` was below 2^32: the multiplication is exact then, for any d.
  GEAR_JAX_HD uint32_t QuotientOfInt(uint32_t n) const {
    return magic == 0 ? n : static_cast<uint32_t>(MultiplyHigh(n));
  }

 private:
  GEAR_JAX_HD uint64_t MultiplyHigh(uint64_t n) const {
#if defined(__CUDA_ARCH__)
    return __umul64hi(magic, n);
#else
    return static_cast<uint64_t>((static_cast<unsigned __int128>(magic) * n) >> 64);
#endif
  }
};

// One aligned chunk of a destination. Bytes [out_begin, out_end) of it are written: those of [data_begin, data_end)
// come from the source, the others are padding.
struct ChunkPlan {
  uint8_t* out = nullptr;           // aligned to 16
  const uint8_t* source = nullptr;  // aligned to 16; byte 0 of the chunk comes from source[shift]
  int32_t shift = 0;
  int32_t out_begin = 0, out_end = 0;
  int32_t data_begin = 0, data_end = 0;

  GEAR_JAX_HD bool empty() const { return out_end <= out_begin; }
  GEAR_JAX_HD bool needs_low() const { return data_begin < data_end && data_begin < 16 - shift; }
  GEAR_JAX_HD bool needs_high() const { return data_begin < data_end && data_end > 16 - shift; }
};

// A transfer over PCIe is cheapest in whole lines. So that a warp's chunks cover whole ones, the chunks of a long range
// are counted from the beginning of a line of host memory: up to kLineChunks - 1 empty chunks lead.
constexpr int64_t kLineChunks = 8;  // 128 bytes
constexpr int64_t kLongRow = 1024;  // bytes

// The chunks to count for each of many ranges of up to `bytes`, which begin at multiples of `unit` from a base aligned
// to 16 bytes (if `aligned`). `line_unit`: the same of what lines are counted by, from a base aligned to lines.
inline int64_t ChunksSpanned(int64_t bytes, int64_t unit, bool aligned, int64_t line_unit) {
  if (bytes == 0) return 0;
  int64_t g = unit & -unit;  // the largest power of two that divides every beginning
  if (g > 16) g = 16;
  if (!aligned) g = 1;
  const int64_t chunks = (16 - g + bytes + 15) / 16;
  if (bytes < kLongRow) return chunks;
  const int64_t leading = line_unit % (16 * kLineChunks) == 0 ? 0 : kLineChunks - 1;
  return (chunks + leading + kLineChunks - 1) / kLineChunks * kLineChunks;  // so that the next range begins a line too
}

// The chunks of a long range that lead where its first one is at `address`.
GEAR_JAX_HD inline int64_t LeadingChunks(const uint8_t* address, int64_t bytes) {
  return bytes < kLongRow ? 0 : static_cast<int64_t>(reinterpret_cast<uintptr_t>(address) / 16 % kLineChunks);
}

// Chunk k of the destination [to, to + bytes), whose bytes [data_begin, data_end) come from `from` on. Empty for k < 0.
GEAR_JAX_HD inline ChunkPlan PlanChunk(uint8_t* to, int64_t bytes, const uint8_t* from, int64_t data_begin,
                                       int64_t data_end, int64_t k) {
  const auto clip = [](int64_t x) { return static_cast<int32_t>(x < 0 ? 0 : x > 16 ? 16 : x); };
  const int64_t misaligned = static_cast<int64_t>(reinterpret_cast<uintptr_t>(to) & 15);
  const int64_t begin = 16 * k - misaligned;  // of the chunk, counted from `to`
  ChunkPlan plan;
  if (k < 0) return plan;
  plan.out = to + begin;
  plan.out_begin = clip(-begin);
  plan.out_end = clip(bytes - begin);
  plan.data_begin = clip(data_begin - begin);
  plan.data_end = clip(data_end - begin);
  if (plan.data_begin < plan.out_begin) plan.data_begin = plan.out_begin;
  if (plan.data_end > plan.out_end) plan.data_end = plan.out_end;
  const uintptr_t source = reinterpret_cast<uintptr_t>(from) + static_cast<uintptr_t>(begin - data_begin);
  plan.source = reinterpret_cast<const uint8_t*>(source & ~uintptr_t{15});
  plan.shift = static_cast<int32_t>(source & 15);
  return plan;
}

GEAR_JAX_HD inline uint32_t FunnelRight(uint32_t low, uint32_t high, int32_t bits) {
#if defined(__CUDA_ARCH__)
  return __funnelshift_r(low, high, bits);
#else
  return static_cast<uint32_t>(((static_cast<uint64_t>(high) << 32) | low) >> bits);
#endif
}

// Bytes [shift, shift + 16) of two chunks in a row. No array is indexed by `shift`, so that all stays in registers.
GEAR_JAX_HD inline Chunk16 Shifted(const Chunk16& low, const Chunk16& high, int32_t shift) {
  uint32_t w[6] = {low.word[0], low.word[1], low.word[2], low.word[3], high.word[0], high.word[1]};
  if (shift & 8) {
    w[0] = w[2], w[1] = w[3], w[2] = w[4], w[3] = w[5];
    w[4] = high.word[2], w[5] = high.word[3];
  }
  if (shift & 4) w[0] = w[1], w[1] = w[2], w[2] = w[3], w[3] = w[4], w[4] = w[5];
  const int32_t bits = 8 * (shift & 3);
  Chunk16 out;
  for (int i = 0; i < 4; ++i) out.word[i] = FunnelRight(w[i], w[i + 1], bits);
  return out;
}

// Bytes [begin, end) of `data`, the others of `pad`.
GEAR_JAX_HD inline Chunk16 Blend(const Chunk16& data, const Chunk16& pad, int32_t begin, int32_t end) {
  const auto below = [](int32_t bytes) {  // a mask of the first `bytes` bytes of a word
    return bytes <= 0 ? 0u : bytes >= 4 ? ~0u : (1u << (8 * bytes)) - 1;
  };
  Chunk16 out;
  for (int i = 0; i < 4; ++i) {
    const uint32_t mask = below(end - 4 * i) & ~below(begin - 4 * i);
    out.word[i] = (data.word[i] & mask) | (pad.word[i] & ~mask);
  }
  return out;
}

// Stores bytes [begin, end) of a chunk in the widest aligned pieces.
GEAR_JAX_HD inline void StoreBytes(uint8_t* out, const Chunk16& value, int32_t begin, int32_t end) {
  for (int32_t i = 0; i < 4; ++i) {
    const int32_t first = begin > 4 * i ? begin - 4 * i : 0;
    const int32_t last = end < 4 * i + 4 ? end - 4 * i : 4;
    if (last <= first) continue;
    const uint32_t w = value.word[i];
    uint8_t* to = out + 4 * i;
    if (first == 0 && last == 4) {
      *reinterpret_cast<uint32_t*>(to) = w;
      continue;
    }
    if (first == 0 && last >= 2) *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(w);
    if (first <= 2 && last == 4) *reinterpret_cast<uint16_t*>(to + 2) = static_cast<uint16_t>(w >> 16);
    if (first == 0 && last == 1) to[0] = static_cast<uint8_t>(w);
    if (first <= 1 && last >= 2 && first != 0) to[1] = static_cast<uint8_t>(w >> 8);
    if (first <= 2 && last == 3) to[2] = static_cast<uint8_t>(w >> 16);
    if (first == 3) to[3] = static_cast<uint8_t>(w >> 24);
  }
}

}  // namespace gear_jax

#endif  // GEAR_JAX_CUDA_CHUNK_H_
