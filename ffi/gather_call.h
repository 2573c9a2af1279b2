// The operands, results and attributes of `gear_gather`, the same on every platform.
#ifndef GEAR_JAX_FFI_GATHER_CALL_H_
#define GEAR_JAX_FFI_GATHER_CALL_H_

#include <cstdint>
#include <string>
#include <utility>

#include "ffi/errors.h"
#include "ffi/gather.h"
#include "xla/ffi/api/ffi.h"

namespace gear_jax {

using Int64s = xla::ffi::Span<const int64_t>;

// What a handler makes of its frame.
struct GatherOperands {
  GatherCall call;
  const int32_t* ticket = nullptr;
  int32_t* ticket_out = nullptr;
  int32_t* order = nullptr;  // [rows + kOrderScratch], memory for an order of the rows; null: none is wanted
};

// The attributes that say what a gather reads.
struct GatherAttributes {
  int64_t slots, steps;
  Int64s offsets, lengths, anchored, pads, pad_values;
  int64_t lead;  // the dimensions of a column before a step's own
  bool masks;
  // Three numbers for each column: -1, or, where the operand is an address (uint32[4]) of the column, the bytes of its
  // steps; the bytes of its elements; and what the beginning of its memory is a multiple of. Empty: none is an address.
  Int64s addresses = {};
  // For each column: 0, or, where the operand is the pointers (uint32[n, 2]) of the table's shards, their number n; the
  // numbers above then say the rest. Empty: there are none.
  Int64s shards = {};
  // Two numbers for each column: the bytes of its steps and of its elements. Empty: there are operands for the columns;
  // else there are none, and where their tables are is known otherwise.
  Int64s layouts = {};
};

// What is read: the call without memory for its results. Operands: slot, anchor, length (or neither of these two,
// without `masks`), ticket, columns..., then buffers that are only waited for or written over.
xla::ffi::ErrorOr<GatherCall> ReadGatherTables(xla::ffi::Buffer<xla::ffi::S32> slot,
                                               xla::ffi::Buffer<xla::ffi::S32> anchor,
                                               xla::ffi::Buffer<xla::ffi::S32> length, xla::ffi::RemainingArgs args,
                                               const GatherAttributes& attributes);

// The same with its results: one for each column, a mask for each (if `masks`), the ticket, memory for the rows' order
// (if `ordered`).
xla::ffi::ErrorOr<GatherOperands> ReadGather(xla::ffi::Buffer<xla::ffi::S32> slot,
                                             xla::ffi::Buffer<xla::ffi::S32> anchor,
                                             xla::ffi::Buffer<xla::ffi::S32> length,
                                             xla::ffi::Buffer<xla::ffi::S32> ticket, xla::ffi::RemainingArgs args,
                                             xla::ffi::RemainingRets rets, const GatherAttributes& attributes,
                                             bool ordered);

// The error for a row outside the table, or success.
xla::ffi::Error CheckGather(const GatherCall& call);

// The error for an attribute of `gear_gather_engine` that says not of each column whether it is copied, or success.
xla::ffi::Error CheckCopied(const GatherCall& call, const Int64s& copied);

// Binds the operands, behind what a platform's handler takes first.
template <typename Binding>
auto BindGatherOperands(Binding&& binding) {
  namespace ffi = xla::ffi;
  return std::forward<Binding>(binding)
      .template Arg<ffi::Buffer<ffi::S32>>()
      .template Arg<ffi::Buffer<ffi::S32>>()
      .template Arg<ffi::Buffer<ffi::S32>>()
      .template Arg<ffi::Buffer<ffi::S32>>()
      .RemainingArgs();
}

// Binds the attributes that say what the table and its windows are, behind the results.
template <typename Binding>
auto BindWindowAttributes(Binding&& binding) {
  return std::forward<Binding>(binding)
      .template Attr<int64_t>("slots")
      .template Attr<int64_t>("steps")
      .template Attr<Int64s>("offsets")
      .template Attr<Int64s>("lengths")
      .template Attr<Int64s>("anchored")
      .template Attr<Int64s>("pads")
      .template Attr<Int64s>("pad_values")
      .template Attr<int64_t>("lead");
}

// Binds all attributes of a gather.
template <typename Binding>
auto BindGatherAttributes(Binding&& binding) {
  return BindWindowAttributes(std::forward<Binding>(binding))
      .template Attr<bool>("masks")
      .template Attr<bool>("ordered")
      .template Attr<int64_t>("blocks");
}

template <typename Binding>
auto BindGather(Binding&& binding) {
  return BindGatherAttributes(BindGatherOperands(std::forward<Binding>(binding)).RemainingRets())
      .template Attr<Int64s>("addresses")
      .template Attr<Int64s>("shards");
}

// `gear_gather_engine`: a gather whose operands slot, anchor and length lie in pinned_host memory, S(5) in the compiled
// program, and hold their numbers *before* the program is dispatched, because a GPU's handler reads them on the host
// while it enqueues: whoever calls it puts them there and waits for that (ops/_gather_engine.py). Columns are arrays,
// not addresses. `copied`: 0 or 1 for each column, whether the copy engines take it. A CPU reads all columns alike.
template <typename Binding>
auto BindGatherEngine(Binding&& binding) {
  return BindGatherAttributes(BindGatherOperands(std::forward<Binding>(binding)).RemainingRets())
      .template Attr<Int64s>("copied");
}

}  // namespace gear_jax

#endif  // GEAR_JAX_FFI_GATHER_CALL_H_
