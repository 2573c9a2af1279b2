// What the kernels of a remote fetch do for one row or chunk. Plain code, so that the CPU's tests run it too.
#ifndef GEAR_JAX_CUDA_FETCH_DEVICE_H_
#define GEAR_JAX_CUDA_FETCH_DEVICE_H_

#include <cstdint>

#include "cuda/chunk.h"
#include "ffi/host_device.h"

namespace gear_jax {

// Of how many shards a GPU gathers the rows itself.
inline constexpr int kGpuShards = 64;

// What a fetch asks for, as a kernel hands it to the host.
struct FetchIds {
  int64_t rows = 0;
  int64_t slots = 0;  // of a shard
  // The shards that this GPU gathers rows of, as one table of shards * slots, and their stamps, [slots] each.
  int32_t shards = 0;
  int32_t shard[kGpuShards] = {};
  const uint32_t* stamp[kGpuShards] = {};
  // The device's: slot, anchor, length, shard, and null or the generations, [rows] each.
  const int32_t* id[4] = {};
  const uint32_t* generation = nullptr;
  int32_t* own_slot = nullptr;  // [rows], the device's: the slot of a row in that table, else -1
  // The host's, [rows] each.
  int32_t* id_out[4] = {};
  uint32_t* generation_out = nullptr;
  uint32_t* before = nullptr;  // stamps of the rows that this GPU gathers, from before
  uint32_t* after = nullptr;   // and from after their bytes were read
};

// The slot that this GPU gathers for a row, or -1.
GEAR_JAX_HD inline int32_t OwnSlot(const FetchIds& ids, int64_t row) {
  const int32_t slot = ids.id[0][row], shard = ids.id[3][row];
  if (slot < 0 || slot >= ids.slots) return -1;
  for (int32_t i = 0; i < ids.shards; ++i) {
    if (ids.shard[i] == shard) return static_cast<int32_t>(i * ids.slots) + slot;
  }
  return -1;
}

// Where the stamp of such a slot is.
GEAR_JAX_HD inline const uint32_t* OwnStamp(const FetchIds& ids, int32_t own_slot) {
  const auto slots = static_cast<int32_t>(ids.slots);
  return ids.stamp[own_slot / slots] + own_slot % slots;
}

// A part of the data, of which some rows come from host memory. Both begin at multiples of 256.
struct TakenPart {
  uint8_t* out;         // [rows, row_bytes]
  const uint8_t* from;  // [rows, row_bytes]
  int64_t row_bytes;
  Divisor units;  // chunks that a row spans at most
};

inline TakenPart MakeTakenPart(uint8_t* out, const uint8_t* from, int64_t row_bytes, int64_t rows) {
  const int64_t units = ChunksSpanned(row_bytes, row_bytes, true, row_bytes);
  return {out, from, row_bytes, Divisor(static_cast<uint32_t>(units), static_cast<uint64_t>(units) * rows + 4096)};
}

// Chunk k of a row that is taken.
GEAR_JAX_HD inline ChunkPlan PlanTaken(const TakenPart& part, int64_t row, int64_t k) {
  uint8_t* const to = part.out + row * part.row_bytes;
  return PlanChunk(to, part.row_bytes, part.from + row * part.row_bytes, 0, part.row_bytes,
                   k - LeadingChunks(to, part.row_bytes));
}

}  // namespace gear_jax

#endif  // GEAR_JAX_CUDA_FETCH_DEVICE_H_
