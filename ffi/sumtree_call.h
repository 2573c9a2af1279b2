// The operands, results and attributes of `gear_sumtree_sample` and `gear_sumtree_update`, the same on every platform.
#ifndef GEAR_JAX_FFI_SUMTREE_CALL_H_
#define GEAR_JAX_FFI_SUMTREE_CALL_H_

#include <cstdint>
#include <string>
#include <utility>

#include "ffi/errors.h"
#include "ffi/sumtree.h"
#include "xla/ffi/api/ffi.h"

namespace gear_jax {

using FfiF32 = xla::ffi::Buffer<xla::ffi::F32>;
using FfiS32 = xla::ffi::Buffer<xla::ffi::S32>;
using FfiU32 = xla::ffi::Buffer<xla::ffi::U32>;

inline int64_t LastDimension(const xla::ffi::AnyBuffer::Dimensions& dims) {
  return dims.size() ? dims[dims.size() - 1] : 1;
}

inline constexpr char kSumTreeFix[] = "Call gear_jax.ops.sumtree_sample or sumtree_update, which prepare the operands.";

// The error for sums [P, M] that do not fit the layout of the masses, or success.
inline xla::ffi::Error CheckSums(const std::string& target, FfiF32 sums, const SumTreeLayout& layout) {
  const int64_t width = LastDimension(sums.dimensions());
  if (width == layout.width) return xla::ffi::Error::Success();
  return InvalidArgument(target + ": last dimension of sums", width, layout.width, kSumTreeFix);
}

// The error for a result of gear_sumtree_update that is not its operand's memory, or success.
inline xla::ffi::Error CheckInPlace(FfiF32 operand, xla::ffi::Result<FfiF32> result) {
  if (operand.untyped_data() == result->untyped_data()) return xla::ffi::Error::Success();
  return InvalidArgument("gear_sumtree_update: results", "memory of their own", "the operands' own memory",
                         kSumTreeFix);
}

// Operands: roots [P of the table], first [1], mass [P, S], sums [P, M], bits [B, 2] or a key [2].
// Results: slot [B], drawn [B], total [1]. Behind what a platform's handler takes first.
template <typename Binding>
auto BindSumTreeSample(Binding binding) {
  return std::move(binding)
      .template Arg<FfiF32>()
      .template Arg<FfiS32>()
      .template Arg<FfiF32>()
      .template Arg<FfiF32>()
      .template Arg<FfiU32>()
      .template Ret<FfiS32>()
      .template Ret<FfiF32>()
      .template Ret<FfiF32>()
      .template Attr<bool>("stratified");
}

// Operands: priority [P, S], mass [P, S], sums [P, M], slot [K], new priority [K], new mass [K], ticket [1].
// Results: priority, mass, sums, in place. Behind what a platform's handler takes first.
template <typename Binding>
auto BindSumTreeUpdate(Binding binding) {
  return std::move(binding)
      .template Arg<FfiF32>()
      .template Arg<FfiF32>()
      .template Arg<FfiF32>()
      .template Arg<FfiS32>()
      .template Arg<FfiF32>()
      .template Arg<FfiF32>()
      .template Arg<FfiS32>()
      .template Ret<FfiF32>()
      .template Ret<FfiF32>()
      .template Ret<FfiF32>();
}

}  // namespace gear_jax

#endif  // GEAR_JAX_FFI_SUMTREE_CALL_H_
