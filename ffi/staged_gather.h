// The two halves of a gather that goes through staging memory. The core, without XLA.
#ifndef GEAR_JAX_FFI_STAGED_GATHER_H_
#define GEAR_JAX_FFI_STAGED_GATHER_H_

#include <array>
#include <cstdint>
#include <vector>

#include "ffi/gather.h"
#include "ffi/staging.h"

namespace gear_jax {

// Bytes of each part of a gather's data: the columns' results, then the masks.
std::vector<int64_t> PartBytes(const GatherCall& call);

// Points a gather's results to memory of this layout.
void PlaceParts(GatherCall& call, uint8_t* memory, const StagingLayout& layout);

// A start on the CPU: reads rows into memory that it holds on to.
class GatherIntoStaging : public Gather {
 public:
  GatherIntoStaging(GatherCall call, const StagingLayout& layout, HostStaging::Lease lease);

 private:
  HostStaging::Lease lease_;
};

// A part of the data as the end of a gather hands it out.
struct StagedPart {
  uint8_t* out = nullptr;
  int64_t bytes = 0;
  std::array<uint8_t, 16> pad_value{};  // one element, `value_bytes` wide
  int64_t value_bytes = 1;
};

std::vector<int64_t> PartBytes(const std::vector<StagedPart>& parts);

// The end on the CPU: copies the parts out of memory that it holds on to. With an empty lease they are all padding.
class GatherFromStaging : public Gather {
 public:
  GatherFromStaging(const std::vector<StagedPart>& parts, const StagingLayout& layout, HostStaging::Lease lease);

 private:
  HostStaging::Lease lease_;
  const int32_t slot_ = 0, anchor_ = 0, length_ = 1;
};

}  // namespace gear_jax

#endif  // GEAR_JAX_FFI_STAGED_GATHER_H_
