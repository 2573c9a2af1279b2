// scatter: steps written into rows of column tables, in place. The core, without XLA.
#ifndef GEAR_JAX_FFI_SCATTER_H_
#define GEAR_JAX_FFI_SCATTER_H_

#include <atomic>
#include <cstdint>
#include <utility>
#include <vector>

#include "ffi/host_device.h"
#include "ffi/parallel.h"

namespace gear_jax {

struct ScatterColumn {
  uint8_t* table = nullptr;         // [slots, steps, step_bytes]
  const uint8_t* values = nullptr;  // [value rows, value_steps, step_bytes]
  int64_t step_bytes = 0;
  int64_t value_steps = 0;  // T'
};

// Row a writes its first length[a] steps to steps [start[a], start[a] + length[a]) of slot[a]. Rows with a slot outside
// [0, slots) are skipped; what would fall outside [0, steps) or beyond value_steps is cut off. Rows must not overlap:
// which of two overlapping rows is seen is not defined.
//
// A stamp is a seqlock over a slot for readers that ask nobody (other processes): it is odd before the first byte of
// the slot changes, and has its value after the last one has. Rows of one slot share a value. It also changes for rows
// of no steps; an odd value leaves the slot open.
struct ScatterCall {
  int64_t rows = 0;                 // A
  int64_t slots = 0;                // C
  int64_t steps = 0;                // T
  const int32_t* slot = nullptr;    // [rows]
  const int32_t* start = nullptr;   // [rows]; null: 0
  const int32_t* length = nullptr;  // [rows]; null: all of a column's value_steps
  std::vector<ScatterColumn> columns;
  const int32_t* from = nullptr;          // [rows], the row of the values that each takes; null: row a takes row a
  int64_t value_rows = 0;                 // R, where `from` is given; a row that takes one outside [0, R) is skipped
  uint32_t* stamp = nullptr;              // [slots]; null: none
  const uint32_t* stamp_value = nullptr;  // [rows]

  // The row of the values that a row takes, or -1.
  int64_t ValueRow(int64_t row) const {
    if (from == nullptr) return row;
    return from[row] >= 0 && from[row] < value_rows ? from[row] : -1;
  }

  int64_t Start(int64_t row) const { return start == nullptr ? 0 : start[row]; }
  int64_t Length(int64_t row, const ScatterColumn& column) const {
    return length == nullptr ? column.value_steps : length[row];
  }

  bool Skipped(int64_t row) const { return slot[row] < 0 || slot[row] >= slots || ValueRow(row) < 0; }

  // The first row that would write outside the table, or take what is none of the values (a slot of -1 means "skip"
  // and is none of these), or -1.
  int64_t FirstBadRow() const;
};

// The stamp of a slot that gets `value`: while its bytes change (`open`) it is odd, and none that a whole slot has.
GEAR_JAX_HD inline uint32_t StampOf(uint32_t value, bool open) { return open ? (value - 1) | 1 : value; }

// A call on the CPU.
class Scatter : public Work, public ScatterCall {
 public:
  explicit Scatter(ScatterCall call = {}) : ScatterCall(std::move(call)) {}

  // Fixes the split into tasks; call once, after the fields are set. Returns the bytes that will be written. With
  // stamps it begins the write: they are odd from here on, until the last task has run.
  int64_t Prepare(int64_t threads);

  int64_t size() const override { return static_cast<int64_t>(pieces_.size()); }
  void Run(int64_t task) override;

 private:
  struct Piece {
    uint8_t* to;
    const uint8_t* from;
    int64_t bytes;
    bool past_caches;
  };
  void StampAll(bool open);

  std::atomic<int64_t> left_{0};  // tasks, where there are stamps
  std::vector<Piece> copies_;
  std::vector<std::pair<int64_t, int64_t>> pieces_;  // ranges of copies_
};

}  // namespace gear_jax

#endif  // GEAR_JAX_FFI_SCATTER_H_
