// gather: windows of rows out of column tables, with padding and masks. The core, without XLA.
#ifndef GEAR_JAX_FFI_GATHER_H_
#define GEAR_JAX_FFI_GATHER_H_

#include <array>
#include <cstdint>
#include <vector>

#include "ffi/parallel.h"

namespace gear_jax {

// Where the padding of a window goes. The numbers are part of the Python side (ops/_gather.py).
enum class Pad : int64_t { kAround = 0, kHead = 1, kTail = 2 };

// The steps that a window shows of a row, relative to the row's anchor.
struct Window {
  int64_t offset = 0;
  int64_t length = 0;    // W
  bool anchored = true;  // false: element w is step w whatever the anchor
  Pad pad = Pad::kAround;
};

// The part of a window that holds steps: elements [element, element + count) show steps [step, step + count).
struct Visible {
  int64_t element = 0;
  int64_t step = 0;
  int64_t count = 0;
};

// The visible part for an anchor and a length (clipped to [0, steps]).
Visible See(const Window& window, int64_t anchor, int64_t length, int64_t steps);

struct GatherColumn {
  const uint8_t* table = nullptr;  // [slots, steps, step_bytes]
  uint8_t* out = nullptr;          // [rows, window.length, step_bytes]
  int64_t step_bytes = 0;
  Window window;
  std::array<uint8_t, 16> pad_value{};  // one element, `value_bytes` wide
  int64_t value_bytes = 1;
};

struct GatherMask {
  uint8_t* out = nullptr;  // bool [rows, window.length]
  Window window;
};

// Rows with a slot outside [0, slots) come out as padding throughout. Every byte of every output is written.
class Gather : public Work {
 public:
  int64_t rows = 0;                 // B
  int64_t slots = 0;                // C
  int64_t steps = 0;                // T
  const int32_t* slot = nullptr;    // [rows]
  const int32_t* anchor = nullptr;  // [rows]
  const int32_t* length = nullptr;  // [rows]
  std::vector<GatherColumn> columns;
  std::vector<GatherMask> masks;

  // Fixes the split into tasks; call once, after the fields are set. Returns the bytes that will be written.
  int64_t Prepare(int64_t threads);

  // The first row with a slot outside [0, slots), or -1.
  int64_t FirstBadRow() const;

  int64_t size() const override { return static_cast<int64_t>(pieces_.size()); }
  void Run(int64_t task) override;

 private:
  struct Piece {
    int64_t column, begin, end;  // bytes of the column's output; from columns.size() on, rows of a mask
  };
  Visible RowVisible(const Window& window, int64_t row) const;
  void FillRow(const GatherColumn& column, int64_t row, int64_t begin, int64_t end) const;
  bool CopyWords(const GatherColumn& column, int64_t begin, int64_t end) const;
  template <typename Word>
  bool Words(const GatherColumn& column, int64_t begin, int64_t end) const;
  void FillMask(const GatherMask& mask, int64_t begin, int64_t end) const;

  std::vector<Piece> pieces_;
};

}  // namespace gear_jax

#endif  // GEAR_JAX_FFI_GATHER_H_
