#include "ffi/gather.h"

#include <algorithm>
#include <cstring>

#include "ffi/copy_past_caches.h"
#include "ffi/pointers.h"

namespace gear_jax {
namespace {

// Whether a window shows all of a row of one step.
bool IsWhole(const Window& window) { return !window.anchored && window.offset == 0 && window.length == 1; }

}  // namespace

void FillPad(const GatherColumn& column, uint8_t* begin, int64_t bytes) {
  const auto& value = column.pad_value;
  const int64_t width = column.value_bytes;
  const bool uniform = std::all_of(value.begin(), value.begin() + width, [&](uint8_t b) { return b == value[0]; });
  if (uniform) {
    std::memset(begin, value[0], bytes);
    return;
  }
  for (int64_t i = 0; i < bytes; i += width) std::memcpy(begin + i, value.data(), width);
}

int64_t GatherCall::FirstBadRow() const {
  for (int64_t row = 0; row < rows; ++row) {
    if (slot[row] < 0 || slot[row] >= slots) return row;
  }
  return -1;
}

int64_t Gather::Prepare(int64_t threads) {
  int64_t total = 0;
  for (const GatherColumn& c : columns) total += rows * c.window.length * c.step_bytes;
  for (const GatherMask& m : masks) total += rows * m.window.length;
  const int64_t task_bytes = TaskBytes(total, threads);
  past_caches_ = total >= kPastCachesBytes;
  pieces_.clear();
  for (size_t i = 0; i < columns.size(); ++i) {
    const int64_t bytes = rows * columns[i].window.length * columns[i].step_bytes;
    if (bytes >= (4 << 20)) AdviseHugePages(columns[i].out, bytes);
    for (int64_t begin = 0; begin < bytes; begin += task_bytes) {
      pieces_.push_back({static_cast<int64_t>(i), begin, std::min(bytes, begin + task_bytes)});
    }
  }
  for (size_t i = 0; i < masks.size(); ++i) {
    const int64_t step = std::max<int64_t>(1, task_bytes / std::max<int64_t>(1, masks[i].window.length));
    for (int64_t begin = 0; begin < rows; begin += step) {
      pieces_.push_back({static_cast<int64_t>(columns.size() + i), begin, std::min(rows, begin + step)});
    }
  }
  return total;
}

void Gather::Run(int64_t task) {
  const Piece& piece = pieces_[task];
  if (piece.column >= static_cast<int64_t>(columns.size())) {
    FillMask(masks[piece.column - columns.size()], piece.begin, piece.end);
    return;
  }
  const GatherColumn& column = columns[piece.column];
  const int64_t row_bytes = column.window.length * column.step_bytes;
  if (steps == 1 && slots > 0 && column.shards == nullptr && IsWhole(column.window)) {
    if (CopyWords(column, piece.begin / row_bytes, piece.end / row_bytes)) return;
  }
  for (int64_t at = piece.begin; at < piece.end;) {
    const int64_t row = at / row_bytes;
    const int64_t end = std::min(piece.end, (row + 1) * row_bytes);
    FillRow(column, row, at - row * row_bytes, end - row * row_bytes);
    at = end;
  }
  if (past_caches_) FencePastCaches();
}

// Whole rows of a single step of one machine word: a fixed-size move each, so that cache misses overlap. False if the
// step has another size.
bool Gather::CopyWords(const GatherColumn& column, int64_t begin, int64_t end) const {
  switch (column.step_bytes) {
    case 1:
      return Words<uint8_t>(column, begin, end);
    case 2:
      return Words<uint16_t>(column, begin, end);
    case 4:
      return Words<uint32_t>(column, begin, end);
    case 8:
      return Words<uint64_t>(column, begin, end);
    default:
      return false;
  }
}

template <typename Word>
bool Gather::Words(const GatherColumn& column, int64_t begin, int64_t end) const {
  // A step may hold several elements: the word of padding is as many copies of the value.
  Word pad;
  FillPad(column, reinterpret_cast<uint8_t*>(&pad), sizeof(Word));
  for (int64_t row = begin; row < end; ++row) {
    const bool visible = slot[row] >= 0 && slot[row] < slots && Length(row) > 0;
    Word value;
    std::memcpy(&value, column.table + (visible ? slot[row] : 0) * static_cast<int64_t>(sizeof(Word)), sizeof(Word));
    value = visible ? value : pad;
    std::memcpy(column.out + row * static_cast<int64_t>(sizeof(Word)), &value, sizeof(Word));
  }
  return true;
}

// Where the slot of a row, one in [0, slots), begins in a column.
const uint8_t* Gather::SlotBegin(const GatherColumn& column, int64_t row) const {
  const int64_t slot_bytes = steps * column.step_bytes;
  if (column.shards == nullptr) return column.table + slot[row] * slot_bytes;
  const auto in_shard = static_cast<uint32_t>(slots / shards), at = static_cast<uint32_t>(slot[row]);
  return ReadPointer(column.shards + 2 * (at / in_shard)) + at % in_shard * slot_bytes;
}

// Writes bytes [begin, end) of one row of a column's output.
void Gather::FillRow(const GatherColumn& column, int64_t row, int64_t begin, int64_t end) const {
  const int64_t step_bytes = column.step_bytes;
  const Visible seen = RowVisible(column.window, row);
  uint8_t* out = column.out + row * column.window.length * step_bytes;
  const int64_t data_begin = std::clamp(seen.element * step_bytes, begin, end);
  const int64_t data_end = std::clamp((seen.element + seen.count) * step_bytes, data_begin, end);
  if (data_begin > begin) FillPad(column, out + begin, data_begin - begin);
  if (data_end > data_begin) {
    const uint8_t* from = SlotBegin(column, row) + seen.step * step_bytes;
    const int64_t bytes = data_end - data_begin;
    from += data_begin - seen.element * step_bytes;
    CopyBytes(out + data_begin, from, bytes, past_caches_);
  }
  if (end > data_end) FillPad(column, out + data_end, end - data_end);
}

void Gather::FillMask(const GatherMask& mask, int64_t begin, int64_t end) const {
  const int64_t width = mask.window.length;
  if (IsWhole(mask.window)) {
    for (int64_t row = begin; row < end; ++row) {
      mask.out[row] = (slot[row] >= 0) & (slot[row] < slots) & (Length(row) > 0) & (steps > 0);
    }
    return;
  }
  if (width == 0) return;  // there is no array, and memset takes no null
  for (int64_t row = begin; row < end; ++row) {
    const Visible seen = RowVisible(mask.window, row);
    uint8_t* out = mask.out + row * width;
    std::memset(out, 0, seen.element);
    std::memset(out + seen.element, 1, seen.count);
    std::memset(out + seen.element + seen.count, 0, width - seen.element - seen.count);
  }
}

}  // namespace gear_jax
