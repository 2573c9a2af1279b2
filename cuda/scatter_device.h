// What a scatter kernel does for one chunk. Plain code, so that the CPU's tests run it too.
#ifndef GEAR_JAX_CUDA_SCATTER_DEVICE_H_
#define GEAR_JAX_CUDA_SCATTER_DEVICE_H_

#include <cstdint>

#include "cuda/chunk.h"
#include "ffi/scatter.h"

namespace gear_jax {

// A column of a launch.
struct ScatterEntry {
  uint8_t* table;
  const uint8_t* values;
  int64_t step_bytes;
  int64_t value_steps;
  Divisor units;  // chunks that a row spans at most
};

struct ScatterRows {
  int64_t rows, slots, steps;
  const int32_t *slot, *start, *length;  // start and length may be null, as in ScatterCall
  const int32_t* from;                   // the row of the values that each takes; null: the same
  int64_t value_rows;
};

inline ScatterRows RowsOf(const ScatterCall& call) {
  return {call.rows, call.slots, call.steps, call.slot, call.start, call.length, call.from, call.value_rows};
}

// Whether a row writes nothing, and leaves its slot's stamp.
GEAR_JAX_HD inline bool Skipped(const ScatterRows& rows, int64_t row) {
  const int64_t slot = rows.slot[row];
  if (slot < 0 || slot >= rows.slots) return true;
  return rows.from != nullptr && (rows.from[row] < 0 || rows.from[row] >= rows.value_rows);
}

inline ScatterEntry MakeEntry(const ScatterCall& call, const ScatterColumn& column) {
  const auto base = reinterpret_cast<uintptr_t>(column.table);
  const int64_t units = ChunksSpanned(column.value_steps * column.step_bytes, column.step_bytes, base % 16 == 0,
                                      base % 128 == 0 ? column.step_bytes : 1);
  return {column.table, column.values, column.step_bytes, column.value_steps,
          Divisor(static_cast<uint32_t>(units), static_cast<uint64_t>(units) * call.rows + 4096)};
}

inline int64_t Units(const ScatterCall& call, const ScatterEntry& entry) {
  return entry.value_steps * entry.step_bytes > 0 ? call.rows * entry.units.d : 0;
}

// Chunk k of what a row writes.
GEAR_JAX_HD inline ChunkPlan PlanScatter(const ScatterRows& rows, const ScatterEntry& entry, int64_t row, int64_t k) {
  const auto clip = [](int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; };
  const int64_t slot = rows.slot[row], start = rows.start == nullptr ? 0 : rows.start[row];
  const int64_t from = rows.from == nullptr ? row : rows.from[row];
  if (Skipped(rows, row)) return ChunkPlan{};
  const int64_t wanted = rows.length == nullptr ? entry.value_steps : clip(rows.length[row], 0, entry.value_steps);
  const int64_t begin = clip(start, 0, rows.steps);
  const int64_t end = clip(start + wanted, begin, rows.steps);
  const int64_t bytes = (end - begin) * entry.step_bytes;
  if (bytes == 0) return ChunkPlan{};
  uint8_t* const to = entry.table + (slot * rows.steps + begin) * entry.step_bytes;
  return PlanChunk(to, bytes, entry.values + (from * entry.value_steps + begin - start) * entry.step_bytes, 0, bytes,
                   k - LeadingChunks(to, bytes));
}

}  // namespace gear_jax

#endif  // GEAR_JAX_CUDA_SCATTER_DEVICE_H_
