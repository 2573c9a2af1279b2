// A gather by copies: which bytes go where, as a list for an engine that copies without a kernel (a GPU's copy
// engines). The core, without XLA.
#ifndef GEAR_JAX_FFI_GATHER_ENGINE_H_
#define GEAR_JAX_FFI_GATHER_ENGINE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "ffi/gather.h"

namespace gear_jax {

// Copies that do not overlap, one array for each of their three numbers: what a call of CUDA takes.
struct CopyList {
  std::vector<void*> to;
  std::vector<const void*> from;
  std::vector<size_t> bytes;

  // Adds a copy, or makes the last one longer where this one goes on where that ends.
  void Add(uint8_t* target, const uint8_t* source, int64_t size);
};

// Bytes of a result that show no step.
struct PadRange {
  uint8_t* out = nullptr;
  int64_t bytes = 0;
};

// Ranges that are filled with the same value.
struct Padding {
  std::array<uint8_t, 16> chunk{};  // GatherColumn::PadChunk
  std::vector<PadRange> ranges;
};

// A gather in three parts, which write disjoint bytes: in any order they are the whole.
struct EnginePlan {
  CopyList copies;               // the steps that the windows of the copied columns show
  std::vector<Padding> padding;  // of the same columns
  GatherCall rest;               // the other columns, and all masks
};

// `call`: with `slot`, `anchor` and `length` that are there and may be read now, on the host. `copied`: of each column
// (an address has no place yet, so that its column cannot be), whether it is copied. O(rows * columns).
EnginePlan PlanEngine(const GatherCall& call, const std::vector<bool>& copied);

}  // namespace gear_jax

#endif  // GEAR_JAX_FFI_GATHER_ENGINE_H_
