#include "ffi/gather_engine.h"

#include <algorithm>

namespace gear_jax {
namespace {

// The padding of a value.
Padding& PaddingOf(std::vector<Padding>& all, const std::array<uint8_t, 16>& chunk) {
  const auto found = std::find_if(all.begin(), all.end(), [&](const Padding& p) { return p.chunk == chunk; });
  if (found != all.end()) return *found;
  all.push_back({chunk, {}});
  return all.back();
}

void AddRange(std::vector<PadRange>& ranges, uint8_t* out, int64_t bytes) {
  if (bytes == 0) return;
  if (!ranges.empty() && ranges.back().out + ranges.back().bytes == out) {
    ranges.back().bytes += bytes;
  } else {
    ranges.push_back({out, bytes});
  }
}

void PlanColumn(const GatherCall& call, const GatherColumn& column, EnginePlan& plan) {
  const int64_t step_bytes = column.step_bytes, row_bytes = column.window.length * step_bytes;
  if (row_bytes == 0) return;
  std::vector<PadRange>& padding = PaddingOf(plan.padding, column.PadChunk()).ranges;
  for (int64_t row = 0; row < call.rows; ++row) {
    const Visible seen = call.RowVisible(column.window, row);
    uint8_t* const out = column.out + row * row_bytes;
    const int64_t begin = seen.element * step_bytes, bytes = seen.count * step_bytes;
    AddRange(padding, out, begin);
    if (bytes > 0) {
      const int64_t step = static_cast<int64_t>(call.slot[row]) * call.steps + seen.step;
      plan.copies.Add(out + begin, column.table + step * step_bytes, bytes);
    }
    AddRange(padding, out + begin + bytes, row_bytes - begin - bytes);
  }
}

}  // namespace

void CopyList::Add(uint8_t* target, const uint8_t* source, int64_t size) {
  if (!to.empty() && static_cast<uint8_t*>(to.back()) + bytes.back() == target &&
      static_cast<const uint8_t*>(from.back()) + bytes.back() == source) {
    bytes.back() += size;
    return;
  }
  to.push_back(target);
  from.push_back(source);
  bytes.push_back(size);
}

EnginePlan PlanEngine(const GatherCall& call, const std::vector<bool>& copied) {
  EnginePlan plan;
  plan.rest = call;
  plan.rest.columns.clear();
  for (size_t k = 0; k < call.columns.size(); ++k) {
    if (copied[k]) {
      PlanColumn(call, call.columns[k], plan);
    } else {
      plan.rest.columns.push_back(call.columns[k]);
    }
  }
  return plan;
}

}  // namespace gear_jax
