// The operands, results and attributes of `gear_scatter`, the same on every platform.
#ifndef GEAR_JAX_FFI_SCATTER_CALL_H_
#define GEAR_JAX_FFI_SCATTER_CALL_H_

#include <cstdint>
#include <utility>
#include <vector>

#include "ffi/errors.h"
#include "ffi/scatter.h"
#include "xla/ffi/api/ffi.h"

namespace gear_jax {

// What a handler makes of its frame.
struct ScatterOperands {
  ScatterCall call;
  std::vector<MovedArray> moved;  // columns whose result XLA did not put where the operand is
};

// Operands: slot, start (or none), length (or none), ticket, columns..., values..., the value row of each row (if
// `value_rows` is not -1), the stamp and its values (if `stamped`). Results: the columns, in place, and the stamp, in
// place.
xla::ffi::ErrorOr<ScatterOperands> ReadScatter(xla::ffi::Buffer<xla::ffi::S32> slot,
                                               xla::ffi::Buffer<xla::ffi::S32> start,
                                               xla::ffi::Buffer<xla::ffi::S32> length, xla::ffi::RemainingArgs args,
                                               xla::ffi::RemainingRets rets, int64_t slots, int64_t steps,
                                               int64_t value_rows, bool stamped);

// The error for a row outside the table, or success.
xla::ffi::Error CheckScatter(const ScatterCall& call);

// Binds them, behind what a platform's handler takes first. `in_flight`: whether a gather in flight may read the
// columns, so that a write has to wait for it. `value_rows`: R where rows of the values are picked, else -1.
template <typename Binding>
auto BindScatter(Binding binding) {
  namespace ffi = xla::ffi;
  return std::move(binding)
      .template Arg<ffi::Buffer<ffi::S32>>()
      .template Arg<ffi::Buffer<ffi::S32>>()
      .template Arg<ffi::Buffer<ffi::S32>>()
      .template Arg<ffi::Buffer<ffi::S32>>()
      .RemainingArgs()
      .RemainingRets()
      .template Attr<int64_t>("slots")
      .template Attr<int64_t>("steps")
      .template Attr<int64_t>("blocks")
      .template Attr<bool>("in_flight")
      .template Attr<int64_t>("value_rows")
      .template Attr<bool>("stamped");
}

}  // namespace gear_jax

#endif  // GEAR_JAX_FFI_SCATTER_CALL_H_
