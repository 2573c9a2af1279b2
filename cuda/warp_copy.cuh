// Tiles of chunks, copied by a warp. Device code.
#ifndef GEAR_JAX_CUDA_WARP_COPY_CUH_
#define GEAR_JAX_CUDA_WARP_COPY_CUH_

#include <algorithm>
#include <cstdint>

#include "cuda/chunk.h"
#include "cuda/device_limits.h"

namespace gear_jax {

// Reads of host memory take about 2 us; 8 blocks of 512 threads with 4 loads of 16 bytes each keep 256 KiB in flight,
// twice what a PCIe 5 link needs to be full.
constexpr int kThreads = 512;
constexpr int kUnroll = 4;
constexpr int64_t kTileUnits = 32 * kUnroll;  // chunks of a warp at a time

// The number of blocks of `warps` for some tiles, of one warp each: `wanted`, or `per_multiprocessor` to each, and no
// more than there is work for.
inline int Blocks(int wanted, int64_t tiles, int warps, int per_multiprocessor) {
  if (wanted == 0) {
    DeviceLimits limits;  // where it cannot be had, the launch will say why
    wanted = CurrentDeviceLimits(&limits) == cudaSuccess ? per_multiprocessor * std::max(1, limits.multiprocessors) : 1;
  }
  return static_cast<int>(std::clamp<int64_t>((tiles + warps - 1) / warps, 1, wanted));
}

// Loads `value` from where `from` points; leaves it as it is where that is null. In assembler, because the compiler
// does not see that the address is a global one, and makes branches of conditional loads, each of which waits for its
// own. Each byte is read once, so that no cache need keep it.
__device__ inline void LoadIf(const uint8_t* from, Chunk16& value) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.u64 p, %4, 0;\n"
      "@p ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n"
      "}\n"
      : "+r"(value.word[0]), "+r"(value.word[1]), "+r"(value.word[2]), "+r"(value.word[3])
      : "l"(__cvta_generic_to_global(from)));
}

__device__ inline void Store(uint8_t* out, const Chunk16& value, int32_t begin, int32_t end) {
  if (begin == 0 && end == 16) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(out)), "r"(value.word[0]),
                 "r"(value.word[1]), "r"(value.word[2]), "r"(value.word[3])
                 : "memory");
  } else {
    StoreBytes(out, value, begin, end);
  }
}

__device__ inline Chunk16 Shuffle(const Chunk16& value, int lane) {
  Chunk16 out;
  for (int i = 0; i < 4; ++i) out.word[i] = __shfl_sync(~0u, value.word[i], lane);
  return out;
}

// Copies a tile of chunks: `plan(j)` gives the j-th of this lane, an empty one where there is none. All lanes of a warp
// take part. The loads are all under way before the first is used; `meanwhile()` runs while they are. A chunk that the
// next lane loads too is taken from it.
template <typename Plan, typename Meanwhile>
__device__ void CopyTile(const Plan& plan, const Meanwhile& meanwhile, const Chunk16& pad) {
  const int lane = threadIdx.x % 32;
  ChunkPlan chunk[kUnroll];
  Chunk16 low[kUnroll] = {};
#pragma unroll
  for (int j = 0; j < kUnroll; ++j) chunk[j] = plan(j);
#pragma unroll
  for (int j = 0; j < kUnroll; ++j) {
    LoadIf(chunk[j].needs_low() ? chunk[j].source : nullptr, low[j]);
  }
  bool shifted = false;
#pragma unroll
  for (int j = 0; j < kUnroll; ++j) shifted |= chunk[j].needs_high();
  Chunk16 high[kUnroll] = {};
  if (__any_sync(~0u, shifted)) {
    // Which loads the neighbour does not do for us; those are under way too before the first is used.
    bool neighbour[kUnroll];
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      const uint64_t mine = chunk[j].needs_low() ? reinterpret_cast<uint64_t>(chunk[j].source) : 0;
      const uint64_t next = j + 1 < kUnroll && chunk[j + 1 < kUnroll ? j + 1 : j].needs_low()
                                ? reinterpret_cast<uint64_t>(chunk[j + 1 < kUnroll ? j + 1 : j].source)
                                : 0;
      // Lane 31's neighbour is lane 0 of the next 32 chunks.
      const uint64_t beside = __shfl_sync(~0u, lane == 0 ? next : mine, (lane + 1) % 32);
      const uint64_t inside = __shfl_down_sync(~0u, mine, 1);
      const uint64_t theirs = lane == 31 ? beside : inside;
      neighbour[j] = theirs == reinterpret_cast<uint64_t>(chunk[j].source) + 16;
      LoadIf(chunk[j].needs_high() && !neighbour[j] ? chunk[j].source + 16 : nullptr, high[j]);
    }
    meanwhile();
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      Chunk16 give = low[j];
      if (lane == 0 && j + 1 < kUnroll) give = low[j + 1 < kUnroll ? j + 1 : j];
      const Chunk16 beside = Shuffle(give, (lane + 1) % 32);
      const Chunk16 inside = Shuffle(low[j], lane < 31 ? lane + 1 : 31);
      if (neighbour[j]) high[j] = lane == 31 ? beside : inside;
    }
  } else {
    meanwhile();
  }
#pragma unroll
  for (int j = 0; j < kUnroll; ++j) {
    if (chunk[j].empty()) continue;
    Chunk16 value = chunk[j].shift == 0 ? low[j] : Shifted(low[j], high[j], chunk[j].shift);
    if (chunk[j].data_begin > 0 || chunk[j].data_end < 16) {
      value = Blend(value, pad, chunk[j].data_begin, chunk[j].data_end);
    }
    Store(chunk[j].out, value, chunk[j].out_begin, chunk[j].out_end);
  }
}

}  // namespace gear_jax

#endif  // GEAR_JAX_CUDA_WARP_COPY_CUH_
