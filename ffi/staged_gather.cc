#include "ffi/staged_gather.h"

#include <utility>

namespace gear_jax {

std::vector<int64_t> PartBytes(const GatherCall& call) {
  std::vector<int64_t> bytes;
  for (const GatherColumn& c : call.columns) bytes.push_back(call.rows * c.window.length * c.step_bytes);
  for (const GatherMask& m : call.masks) bytes.push_back(call.rows * m.window.length);
  return bytes;
}

std::vector<int64_t> PartBytes(const std::vector<StagedPart>& parts) {
  std::vector<int64_t> bytes;
  for (const StagedPart& part : parts) bytes.push_back(part.bytes);
  return bytes;
}

void PlaceParts(GatherCall& call, uint8_t* memory, const StagingLayout& layout) {
  size_t i = 0;
  for (GatherColumn& c : call.columns) c.out = memory + layout.offset[i++];
  for (GatherMask& m : call.masks) m.out = memory + layout.offset[i++];
}

GatherIntoStaging::GatherIntoStaging(GatherCall call, const StagingLayout& layout, HostStaging::Lease lease)
    : Gather(std::move(call)), lease_(std::move(lease)) {
  PlaceParts(*this, lease_.data(), layout);
}

// The memory is a table of one slot, which holds a single step as large as the part; a stale handle's has no slot.
GatherFromStaging::GatherFromStaging(const std::vector<StagedPart>& parts, const StagingLayout& layout,
                                     HostStaging::Lease lease)
    : lease_(std::move(lease)) {
  rows = steps = 1;
  slots = lease_ ? 1 : 0;
  slot = &slot_;
  anchor = &anchor_;
  length = &length_;
  for (size_t i = 0; i < parts.size(); ++i) {
    GatherColumn column;
    column.table = lease_ ? lease_.data() + layout.offset[i] : nullptr;
    column.out = parts[i].out;
    column.step_bytes = parts[i].bytes;
    column.window = {0, 1, false, Pad::kAround};
    column.pad_value = parts[i].pad_value;
    column.value_bytes = parts[i].value_bytes;
    columns.push_back(column);
  }
}

}  // namespace gear_jax
