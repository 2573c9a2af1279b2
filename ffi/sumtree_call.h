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

// The error for the operands and results of gear_sumtree_sample that its handlers trust, or success.
inline xla::ffi::Error CheckSample(const SumTreeLayout& layout, FfiF32 roots, FfiF32 mass, FfiF32 sums, FfiS32 length,
                                   FfiU32 generation, FfiF32 least, int64_t draws) {
  const xla::ffi::Error error = CheckSums("gear_sumtree_sample", sums, layout);
  if (error.failure()) return error;
  const int64_t slots = static_cast<int64_t>(mass.element_count());
  for (const size_t count : {length.element_count(), generation.element_count()}) {
    if (static_cast<int64_t>(count) == slots) continue;
    return InvalidArgument("gear_sumtree_sample: slots of length or generation", count, slots, kSumTreeFix);
  }
  if (roots.dimensions().size() > 1) {
    const xla::ffi::Error of_roots = CheckSums("gear_sumtree_sample", roots, layout);
    if (of_roots.failure()) return of_roots;
  }
  const int64_t groups = static_cast<int64_t>(least.element_count());
  if (groups == DrawnRows::Groups(draws)) return error;
  return InvalidArgument("gear_sumtree_sample: least probabilities", groups, DrawnRows::Groups(draws), kSumTreeFix);
}

// What a handler of gear_sumtree_sample stores of the draws themselves.
inline DrawnRows RowsOf(xla::ffi::Result<FfiS32> slot, xla::ffi::Result<FfiS32> partition,
                        xla::ffi::Result<FfiF32> probability, xla::ffi::Result<FfiS32> length,
                        xla::ffi::Result<FfiU32> generation, xla::ffi::Result<FfiF32> least) {
  return {slot->typed_data(),   partition->typed_data(),  probability->typed_data(),
          length->typed_data(), generation->typed_data(), least->typed_data()};
}

// The operand `roots`: [P of the table], or the sums [P, M] where all of the table is held.
inline RootArray RootsOf(FfiF32 roots, const SumTreeLayout& layout) {
  if (roots.dimensions().size() == 1) return {roots.typed_data(), 1};
  return {roots.typed_data() + layout.root(), layout.width};
}
inline int64_t PartitionsOf(FfiF32 roots) {
  return roots.dimensions().size() == 0 ? 1 : static_cast<int64_t>(roots.dimensions()[0]);
}

// Operands: roots [P of the table] or [P, M], first [1], mass [P, S], sums [P, M], length [P, S], generation [P, S],
// bits [B, 2] or a key [2], ticket [1]. Results: slot [B], partition [B], probability [B], length [B], generation [B],
// least [ceil(B / 512)], total [1], ticket [1]. Behind what a platform's handler takes first.
template <typename Binding>
auto BindSumTreeSample(Binding binding) {
  return std::move(binding)
      .template Arg<FfiF32>()
      .template Arg<FfiS32>()
      .template Arg<FfiF32>()
      .template Arg<FfiF32>()
      .template Arg<FfiS32>()
      .template Arg<FfiU32>()
      .template Arg<FfiU32>()
      .template Arg<FfiS32>()
      .template Ret<FfiS32>()
      .template Ret<FfiS32>()
      .template Ret<FfiF32>()
      .template Ret<FfiS32>()
      .template Ret<FfiU32>()
      .template Ret<FfiF32>()
      .template Ret<FfiF32>()
      .template Ret<FfiS32>()
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
