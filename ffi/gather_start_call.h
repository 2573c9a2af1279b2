// The operands, results and attributes of `gear_gather_start` and `gear_gather_done`, the same on every platform.
#ifndef GEAR_JAX_FFI_GATHER_START_CALL_H_
#define GEAR_JAX_FFI_GATHER_START_CALL_H_

#include <cstdint>
#include <utility>
#include <vector>

#include "ffi/gather_call.h"
#include "ffi/staged_gather.h"
#include "xla/ffi/api/ffi.h"

namespace gear_jax {

// Binds a start, behind what a platform's handler takes first: the operands and attributes of `gear_gather`, but as
// results the handle, int32[4], and the ticket; then the queue and its depth.
template <typename Binding>
auto BindGatherStart(Binding&& binding) {
  namespace ffi = xla::ffi;
  return BindGatherAttributes(BindGatherOperands(std::forward<Binding>(binding))
                                  .template Ret<ffi::Buffer<ffi::S32>>()
                                  .template Ret<ffi::Buffer<ffi::S32>>())
      .template Attr<int64_t>("queue")
      .template Attr<int64_t>("depth");
}

// Binds the end. Operands: the handle, then buffers that are only waited for. Results: the columns' data, a mask for
// each, what else the start has had, and whether the handle was good, bool[1].
template <typename Binding>
auto BindGatherDone(Binding&& binding) {
  namespace ffi = xla::ffi;
  return std::forward<Binding>(binding)
      .template Arg<ffi::Buffer<ffi::S32>>()
      .RemainingArgs()
      .RemainingRets()
      .template Attr<Int64s>("pad_values");
}

struct GatherDoneOperands {
  const int32_t* handle = nullptr;
  std::vector<StagedPart> parts;
  bool* ok = nullptr;
};

// `more`: parts behind the columns' data and masks; `op`: whose end it is.
xla::ffi::ErrorOr<GatherDoneOperands> ReadGatherDone(xla::ffi::Buffer<xla::ffi::S32> handle,
                                                     xla::ffi::RemainingRets rets, Int64s pad_values,
                                                     const char* op = "gather_done", size_t more = 0);

// The error for a depth that is none, or success.
xla::ffi::Error CheckDepth(const char* op, int64_t depth);

// The error for staging memory that is not to be had. `why`: the system's words. `queue`: -1 where it is of no queue.
xla::ffi::Error NoStagingMemory(const char* op, int64_t bytes, const char* where, int64_t queue, int64_t depth,
                                const char* why, const char* fix);

}  // namespace gear_jax

#endif  // GEAR_JAX_FFI_GATHER_START_CALL_H_
