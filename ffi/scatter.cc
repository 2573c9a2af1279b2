#include "ffi/scatter.h"

#include <algorithm>

#include "ffi/copy_past_caches.h"
#include "ffi/seqlock.h"

namespace gear_jax {
namespace {

constexpr int64_t kPieceBytes = 1 << 20;  // a long row is copied by several threads

}  // namespace

int64_t ScatterCall::FirstBadRow() const {
  if (columns.empty()) return -1;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t begin = Start(row), count = Length(row, columns[0]);
    if (slot[row] == -1 || count == 0) continue;
    const bool inside =
        slot[row] >= 0 && slot[row] < slots && begin >= 0 && count >= 0 && begin + count <= steps && ValueRow(row) >= 0;
    if (!inside) return row;
  }
  return -1;
}

int64_t Scatter::Prepare(int64_t threads) {
  copies_.clear();
  int64_t total = 0;
  for (const ScatterColumn& column : columns) {
    const bool past_caches = slots * steps * column.step_bytes >= kPastCachesBytes;
    for (int64_t row = 0; row < rows; ++row) {
      if (Skipped(row)) continue;
      const int64_t wanted = std::min(Length(row, column), column.value_steps), first = Start(row);
      const int64_t begin = std::clamp<int64_t>(first, 0, steps);
      const int64_t end = std::clamp(first + wanted, begin, steps);
      const int64_t bytes = (end - begin) * column.step_bytes;
      if (bytes == 0) continue;
      uint8_t* to = column.table + (slot[row] * steps + begin) * column.step_bytes;
      const uint8_t* from = column.values + (ValueRow(row) * column.value_steps + begin - first) * column.step_bytes;
      for (int64_t at = 0; at < bytes; at += kPieceBytes) {
        const int64_t piece = std::min(kPieceBytes, bytes - at);
        copies_.push_back({to + at, from + at, piece, past_caches});
      }
      total += bytes;
    }
  }
  const int64_t task_bytes = TaskBytes(total, threads);
  pieces_.clear();
  int64_t first = 0, bytes = 0;
  for (size_t i = 0; i < copies_.size(); ++i) {
    bytes += copies_[i].bytes;
    if (bytes >= task_bytes || i + 1 == copies_.size()) {
      pieces_.emplace_back(first, static_cast<int64_t>(i) + 1);
      first = static_cast<int64_t>(i) + 1;
      bytes = 0;
    }
  }
  if (stamp != nullptr) {
    left_.store(size(), std::memory_order_relaxed);
    StampAll(true);
    FenceAfterOpening();
    if (size() == 0) StampAll(false);
  }
  return total;
}

void Scatter::StampAll(bool open) {
  for (int64_t row = 0; row < rows; ++row) {
    if (Skipped(row)) continue;
    StoreStamp(stamp + slot[row], StampOf(stamp_value[row], open));
  }
}

void Scatter::Run(int64_t task) {
  for (int64_t i = pieces_[task].first; i < pieces_[task].second; ++i) {
    const auto& [to, from, bytes, past_caches] = copies_[i];
    CopyBytes(to, from, bytes, past_caches);
  }
  FencePastCaches();
  // Whoever ends the last task has seen all others end.
  if (stamp != nullptr && left_.fetch_sub(1, std::memory_order_acq_rel) == 1) StampAll(false);
}

}  // namespace gear_jax
