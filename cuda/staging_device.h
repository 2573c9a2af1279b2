// What the staging kernels do for one handle or one chunk. Plain code, so that the CPU's tests run it too.
#ifndef GEAR_JAX_CUDA_STAGING_DEVICE_H_
#define GEAR_JAX_CUDA_STAGING_DEVICE_H_

#include <cstdint>
#include <vector>

#include "cuda/chunk.h"
#include "ffi/staged_gather.h"

namespace gear_jax {

constexpr int32_t kStagingEntries = 1024;  // of a device

// What the device knows of an entry. All but `finished` is written and read in the order of XLA's stream.
struct StagingEntry {
  int64_t sequence;  // of the last start, until its data is handed out; 0: nothing is there
  int64_t finished;  // of the last start whose data is there; written on the stream of the gathers
  int64_t bytes;     // of the data
  uint8_t* memory;
};

// The entry that a handle names, or null if it is stale.
GEAR_JAX_HD inline StagingEntry* FindEntry(StagingEntry* entries, const StagingHandle& handle, int32_t owner,
                                           int64_t bytes) {
  if (handle.entry < 0 || handle.entry >= kStagingEntries || handle.sequence <= 0 || handle.owner != owner) {
    return nullptr;
  }
  StagingEntry* const entry = entries + handle.entry;
  return entry->sequence == handle.sequence && entry->bytes == bytes ? entry : nullptr;
}

// Gathers in flight are counted by the tables that they read: a write of a table waits for those of its own number
// alone. Tables may share a number; a write then waits for more than it must.
constexpr int kFlights = 256;

// A set of tables' numbers.
struct FlightSet {
  uint64_t word[kFlights / 64] = {};

  void Add(const void* table) {
    const uint64_t number = (reinterpret_cast<uintptr_t>(table) >> 8) * 0x9E3779B97F4A7C15u >> 56;
    word[number / 64] |= uint64_t{1} << (number % 64);
  }
  GEAR_JAX_HD bool Contains(int number) const { return word[number / 64] >> (number % 64) & 1; }
};
inline FlightSet TablesOf(const GatherCall& call) {
  FlightSet tables;
  for (const GatherColumn& column : call.columns) tables.Add(column.table);
  return tables;
}
static_assert(kFlights == 1 << 8, "numbers are the upper 8 bits of a product");

// How many gathers of tables with a number were started and have finished, mod 2^32.
struct Flight {
  uint32_t started;
  uint32_t finished;
};

// A gather may have finished before it is counted as started.
GEAR_JAX_HD inline bool Landed(uint32_t started, uint32_t finished) {
  return static_cast<int32_t>(finished - started) >= 0;
}

// A part of the data that is copied out.
struct CopyEntry {
  uint8_t* out;
  int64_t offset;  // in the entry's memory
  int64_t bytes;
  Chunk16 pad;
};

inline CopyEntry MakeEntry(const StagedPart& part, int64_t offset) {
  CopyEntry entry{part.out, offset, part.bytes, {}};
  uint8_t pad[16];
  for (int64_t i = 0; i < 16; ++i) pad[i] = part.pad_value[i % part.value_bytes];
  __builtin_memcpy(&entry.pad, pad, 16);
  return entry;
}

// Chunks of 16 bytes to be written for a part.
inline int64_t Units(const CopyEntry& entry) {
  if (entry.bytes == 0) return 0;
  return (static_cast<int64_t>(reinterpret_cast<uintptr_t>(entry.out) & 15) + entry.bytes + 15) / 16;
}

// Chunk k of a part; all padding without memory.
GEAR_JAX_HD inline ChunkPlan PlanCopy(const CopyEntry& entry, const uint8_t* memory, int64_t k) {
  const uint8_t* const from = memory == nullptr ? nullptr : memory + entry.offset;
  return PlanChunk(entry.out, entry.bytes, from, 0, memory == nullptr ? 0 : entry.bytes, k);
}

}  // namespace gear_jax

#endif  // GEAR_JAX_CUDA_STAGING_DEVICE_H_
