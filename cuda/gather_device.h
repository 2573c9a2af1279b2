// What a gather kernel does for one chunk. Plain code, so that the CPU's tests run it too.
#ifndef GEAR_JAX_CUDA_GATHER_DEVICE_H_
#define GEAR_JAX_CUDA_GATHER_DEVICE_H_

#include <cstdint>

#include "cuda/address_device.h"
#include "cuda/chunk.h"
#include "ffi/gather.h"
#include "ffi/pointers.h"

namespace gear_jax {

// What is known of a table before `Resolve`: itself, its address (uint32[4]) or its shards' pointers (uint32[n, 2]).
enum class Given : uint8_t { kTable, kAddress, kShards };

// A column or a mask of a launch.
struct GatherEntry {
  bool is_mask;
  Given given;        // what `table` is
  uint8_t alignment;  // of the table, as far as it matters: 1, 16 or 128 bytes
  uint8_t shards;     // of every column of the call
  int32_t column;     // its number, or that of the mask
  const uint8_t* table;
  uint8_t* out;
  int64_t step_bytes;
  int64_t row_bytes;  // of the output
  Window window;
  Divisor units;  // of a row of a column, in chunks; of a mask, the elements of a row
  Chunk16 pad;
};

// What a call says of one of its rows; row < 0: there is none.
struct RowRead {
  int32_t row = -1, slot = 0, anchor = 0, length = 0;
};

// The rows of a launch.
struct GatherRows {
  int64_t rows, slots, steps;
  const int32_t *slot, *anchor, *length;  // anchor and length may be null, as in GatherCall

  GEAR_JAX_HD RowRead Read(int32_t row) const {
    const int32_t all = static_cast<int32_t>(steps);
    return {row, slot[row], anchor == nullptr ? 0 : anchor[row], length == nullptr ? all : length[row]};
  }

  GEAR_JAX_HD Visible See(const Window& window, const RowRead& read) const {
    if (read.slot < 0 || read.slot >= slots) return Visible{};
    return gear_jax::See(window, read.anchor, read.length, steps);
  }
};

// Points an entry that is given by address to its table. Where the address leads nowhere, none of its rows shows a
// step.
GEAR_JAX_HD inline AddressFault Resolve(const RegistryView& registry, const GatherRows& rows, GatherEntry* entry) {
  AddressFault fault = AddressFault::kNone;
  if (entry->given != Given::kAddress) return fault;
  const int64_t bytes = rows.slots * rows.steps * entry->step_bytes;
  const auto* const address = reinterpret_cast<const uint32_t*>(entry->table);
  entry->table = FindTable(registry, address, bytes, entry->alignment, &fault);
  if (fault != AddressFault::kNone) entry->window.length = 0;
  return fault;
}

// Where shard s of a column begins. A table of one piece is shards that follow each other.
GEAR_JAX_HD inline const uint8_t* ShardBegin(const GatherRows& rows, const GatherEntry& entry, int32_t s) {
  if (entry.given == Given::kShards) return ReadPointer(reinterpret_cast<const uint32_t*>(entry.table) + 2 * s);
  return entry.table + s * (rows.slots / entry.shards) * rows.steps * entry.step_bytes;
}

// How a launch finds the steps of a slot that a window shows: in tables of one piece,
struct WholeTables {
  // The table's own beginning where the window shows none.
  GEAR_JAX_HD const uint8_t* Find(const GatherRows& rows, const GatherEntry& entry, int32_t slot,
                                  const Visible& seen) const {
    if (seen.count == 0) return entry.table;
    return entry.table + (static_cast<int64_t>(slot) * rows.steps + seen.step) * entry.step_bytes;
  }
};

// or in shards. `table` of an entry is then a list of where they begin (`ShardBegin`). Without a branch, so that the
// loads of a tile do not wait for each other.
struct ShardedTables {
  Divisor slots;  // of a shard

  GEAR_JAX_HD ShardedTables(const GatherRows& rows, int32_t shards)
      : slots(static_cast<uint32_t>(rows.slots / shards), UINT32_MAX) {}

  GEAR_JAX_HD const uint8_t* Find(const GatherRows& rows, const GatherEntry& entry, int32_t slot,
                                  const Visible& seen) const {
    const uint32_t at = seen.count == 0 ? 0 : static_cast<uint32_t>(slot);
    const uint32_t shard = slots.QuotientOfInt(at);
    const uint8_t* const begin = reinterpret_cast<const uint8_t* const*>(entry.table)[shard];
    return begin + (static_cast<int64_t>(at - shard * slots.d) * rows.steps + seen.step) * entry.step_bytes;
  }
};

inline uint8_t Alignment(uint64_t multiple) {
  return multiple % (16 * kLineChunks) == 0 ? 16 * kLineChunks : multiple % 16 == 0 ? 16 : 1;
}

inline GatherEntry MakeEntry(const GatherCall& call, const GatherColumn& column) {
  GatherEntry entry{};
  const uint32_t* const words = column.shards != nullptr ? column.shards : column.address;
  entry.given = column.shards != nullptr ? Given::kShards : words != nullptr ? Given::kAddress : Given::kTable;
  entry.shards = static_cast<uint8_t>(call.shards);
  entry.table = words != nullptr ? reinterpret_cast<const uint8_t*>(words) : column.table;
  entry.alignment = Alignment(words != nullptr ? column.address_alignment : reinterpret_cast<uintptr_t>(column.table));
  entry.out = column.out;
  entry.step_bytes = column.step_bytes;
  entry.row_bytes = column.window.length * column.step_bytes;
  entry.window = column.window;
  const bool aligned = reinterpret_cast<uintptr_t>(column.out) % 16 == 0;
  // Chunks are counted from a row's output, and read from where they begin in the table.
  const bool lines = entry.alignment == 16 * kLineChunks && aligned && entry.row_bytes % 16 == 0;
  const int64_t units = ChunksSpanned(entry.row_bytes, entry.row_bytes, aligned, lines ? column.step_bytes : 1);
  entry.units = Divisor(static_cast<uint32_t>(units), static_cast<uint64_t>(units) * call.rows + 4096);
  __builtin_memcpy(&entry.pad, column.PadChunk().data(), 16);
  return entry;
}

inline GatherEntry MakeEntry(const GatherCall& call, const GatherMask& mask) {
  GatherEntry entry{};
  entry.is_mask = true;
  entry.given = mask.address != nullptr ? Given::kAddress : Given::kTable;
  entry.table = reinterpret_cast<const uint8_t*>(mask.address);
  entry.alignment = Alignment(mask.address_alignment);
  entry.step_bytes = mask.step_bytes;
  entry.out = mask.out;
  entry.row_bytes = mask.window.length;
  entry.window = mask.window;
  entry.units = Divisor(static_cast<uint32_t>(mask.window.length), call.rows * mask.window.length + 4096);
  return entry;
}

// Chunks of 16 bytes to be written for an entry.
inline int64_t Units(const GatherCall& call, const GatherEntry& entry) {
  return entry.is_mask ? (call.rows * entry.row_bytes + 15) / 16 : call.rows * entry.units.d;
}

// Chunk k of a row of a column.
template <typename Tables = WholeTables>
GEAR_JAX_HD inline ChunkPlan PlanGather(const GatherRows& rows, const GatherEntry& entry, const RowRead& read,
                                        int64_t k, const Tables& tables = {}) {
  const Visible seen = rows.See(entry.window, read);
  const int64_t begin = seen.element * entry.step_bytes;
  uint8_t* const to = entry.out + read.row * entry.row_bytes;
  const uint8_t* const from = tables.Find(rows, entry, read.slot, seen);
  const int64_t leading = LeadingChunks(from - begin - reinterpret_cast<uintptr_t>(to) % 16, entry.row_bytes);
  return PlanChunk(to, entry.row_bytes, from, begin, begin + seen.count * entry.step_bytes, k - leading);
}

// Whether every chunk of a column is one aligned chunk of the table, or padding throughout.
inline bool IsAligned(const GatherEntry& entry) {
  const bool aligned_out = reinterpret_cast<uintptr_t>(entry.out) % 16 == 0;
  return entry.is_mask || (entry.alignment >= 16 && aligned_out && entry.step_bytes % 16 == 0);
}

// Chunk k of a row of such a column: where it is in the table (null for padding), and its offset in the row's output
// (negative: there is none).
template <typename Tables = WholeTables>
GEAR_JAX_HD inline const uint8_t* AlignedSource(const GatherRows& rows, const GatherEntry& entry, const RowRead& read,
                                                int64_t k, int64_t* offset, const Tables& tables = {}) {
  const Visible seen = rows.See(entry.window, read);
  const int64_t begin = seen.element * entry.step_bytes;
  const uint8_t* const zero = tables.Find(rows, entry, read.slot, seen) - begin;
  *offset = 16 * (k - LeadingChunks(zero, entry.row_bytes));
  if (*offset >= entry.row_bytes) *offset = -1;
  return *offset < begin || *offset >= begin + seen.count * entry.step_bytes ? nullptr : zero + *offset;
}

// Elements [16 * unit, 16 * unit + 16) of a mask.
GEAR_JAX_HD inline Chunk16 MaskChunk(const GatherRows& rows, const GatherEntry& entry, int64_t unit, int32_t* count) {
  const int64_t total = rows.rows * entry.row_bytes;
  const int64_t at = 16 * unit;
  *count = static_cast<int32_t>(total - at < 16 ? total - at : 16);
  Chunk16 out{};
  if (*count <= 0) return out;
  auto row = static_cast<int32_t>(entry.units.Quotient(at));
  int64_t element = at - row * entry.row_bytes;
  Visible seen = rows.See(entry.window, rows.Read(row));
  for (int32_t w = 0; w < 4; ++w) {
    for (int32_t b = 0; b < 4; ++b) {  // two loops of constant length, so that `out` stays in registers
      if (4 * w + b >= *count) continue;
      if (element == entry.row_bytes) {
        element = 0;
        seen = rows.See(entry.window, rows.Read(++row));
      }
      const bool shown = element >= seen.element && element < seen.element + seen.count;
      out.word[w] |= static_cast<uint32_t>(shown) << (8 * b);
      ++element;
    }
  }
  return out;
}

}  // namespace gear_jax

#endif  // GEAR_JAX_CUDA_GATHER_DEVICE_H_
