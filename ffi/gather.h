// gather: windows of rows out of column tables, with padding and masks. The core, without XLA.
#ifndef GEAR_JAX_FFI_GATHER_H_
#define GEAR_JAX_FFI_GATHER_H_

#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "ffi/host_device.h"
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
GEAR_JAX_HD inline Visible See(const Window& window, int64_t anchor, int64_t length, int64_t steps) {
  const auto clip = [](int64_t x, int64_t high) { return x < 0 ? 0 : x < high ? x : high; };
  length = clip(length, steps);
  const int64_t first = window.offset + (window.anchored ? anchor : 0);  // step of element 0
  const int64_t begin = clip(first, length);
  const int64_t end = clip(first + window.length, length);
  Visible seen;
  seen.count = end - begin;
  seen.step = begin;
  if (seen.count > 0) {
    if (window.pad == Pad::kAround) seen.element = begin - first;
    if (window.pad == Pad::kHead) seen.element = window.length - seen.count;
  }
  return seen;
}

// Ranges of slots that a GPU's order of the rows tells apart, and the numbers of scratch that an order takes beyond one
// for each row (3 to begin at a multiple of 16 bytes). Part of the Python side (ops/_gather.py).
inline constexpr int64_t kOrderRanges = 1 << 14;
inline constexpr int64_t kOrderScratch = kOrderRanges + 3;

struct GatherColumn {
  const uint8_t* table = nullptr;  // [slots, steps, step_bytes]
  uint8_t* out = nullptr;          // [rows, window.length, step_bytes]
  int64_t step_bytes = 0;
  Window window;
  std::array<uint8_t, 16> pad_value{};  // one element, `value_bytes` wide
  int64_t value_bytes = 1;
  const uint32_t* address = nullptr;  // [4], names the table (ffi/address.h), whose place is not known yet
  int64_t address_alignment = 1;      // the table that it names, or each shard, begins at a multiple of so many bytes
  const uint32_t* shards = nullptr;   // [GatherCall::shards, 2], where the parts of the table begin (ffi/pointers.h)

  // What 16 bytes of padding are that begin at a multiple of 16; the output begins at one of `value_bytes`.
  std::array<uint8_t, 16> PadChunk() const {
    std::array<uint8_t, 16> chunk;
    for (int64_t i = 0; i < 16; ++i) chunk[i] = pad_value[i % value_bytes];
    return chunk;
  }
};

// Writes a column's padding over [begin, begin + bytes): whole elements.
void FillPad(const GatherColumn& column, uint8_t* begin, int64_t bytes);

struct GatherMask {
  uint8_t* out = nullptr;  // bool [rows, window.length]
  Window window;
  // As its column's: where the address leads nowhere, nothing is visible.
  const uint32_t* address = nullptr;
  int64_t address_alignment = 1;
  int64_t step_bytes = 0;
};

// Rows with a slot outside [0, slots) come out as padding throughout. Every byte of every output is written.
struct GatherCall {
  int64_t rows = 0;                 // B
  int64_t slots = 0;                // C
  int64_t steps = 0;                // T
  const int32_t* slot = nullptr;    // [rows]
  const int32_t* anchor = nullptr;  // [rows]; null: 0
  const int32_t* length = nullptr;  // [rows]; null: all steps
  std::vector<GatherColumn> columns;
  std::vector<GatherMask> masks;
  int64_t shards = 1;  // parts, of as many slots each, that the tables given by `GatherColumn::shards` are in

  // The first row with a slot outside [0, slots), or -1.
  int64_t FirstBadRow() const;

  int64_t Anchor(int64_t row) const { return anchor == nullptr ? 0 : anchor[row]; }
  int64_t Length(int64_t row) const { return length == nullptr ? steps : length[row]; }

  // What a window shows of a row.
  Visible RowVisible(const Window& window, int64_t row) const {
    return slot[row] < 0 || slot[row] >= slots ? Visible{} : See(window, Anchor(row), Length(row), steps);
  }
};

// A call on the CPU.
class Gather : public Work, public GatherCall {
 public:
  explicit Gather(GatherCall call = {}) : GatherCall(std::move(call)) {}

  // Fixes the split into tasks; call once, after the fields are set. Returns the bytes that will be written.
  int64_t Prepare(int64_t threads);

  int64_t size() const override { return static_cast<int64_t>(pieces_.size()); }
  void Run(int64_t task) override;

 private:
  struct Piece {
    int64_t column, begin, end;  // bytes of the column's output; from columns.size() on, rows of a mask
  };
  const uint8_t* SlotBegin(const GatherColumn& column, int64_t row) const;
  void FillRow(const GatherColumn& column, int64_t row, int64_t begin, int64_t end) const;
  bool CopyWords(const GatherColumn& column, int64_t begin, int64_t end) const;
  template <typename Word>
  bool Words(const GatherColumn& column, int64_t begin, int64_t end) const;
  void FillMask(const GatherMask& mask, int64_t begin, int64_t end) const;

  std::vector<Piece> pieces_;
  bool past_caches_ = false;
};

}  // namespace gear_jax

#endif  // GEAR_JAX_FFI_GATHER_H_
