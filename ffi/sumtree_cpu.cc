#include <algorithm>
#include <memory>

#include "ffi/cpu.h"
#include "ffi/handlers.h"
#include "ffi/sumtree.h"

namespace gear_jax {
namespace {

namespace ffi = xla::ffi;
using S32 = ffi::Buffer<ffi::S32>;
using F32 = ffi::Buffer<ffi::F32>;
using U32 = ffi::Buffer<ffi::U32>;

constexpr char kInternal[] = "Call gear_jax.ops.sumtree_sample or sumtree_update, which prepare the operands.";

int64_t Last(const ffi::AnyBuffer::Dimensions& dims) { return dims.size() ? dims[dims.size() - 1] : 1; }

// Operands: roots [P of the table], first [1], mass [P, S], sums [P, M], bits [B, 2] or a key [2].
// Results: slot [B], drawn [B], total [1].
ffi::Future SumTreeSampleCpu(ffi::ThreadPool pool, F32 roots, S32 first, F32 mass, F32 sums, U32 bits,
                             ffi::Result<S32> slot, ffi::Result<F32> drawn, ffi::Result<F32> total, bool stratified) {
  auto work = std::make_shared<SumTreeSample>(Last(mass.dimensions()));
  if (Last(sums.dimensions()) != work->layout.width) {
    return Failed(InvalidArgument("gear_sumtree_sample: last dimension of sums", Last(sums.dimensions()),
                                  work->layout.width, kInternal));
  }
  work->all_partitions = roots.element_count();
  work->first = first.typed_data()[0];
  work->partitions = sums.element_count() / work->layout.width;
  work->roots = roots.typed_data();
  work->mass = mass.typed_data();
  work->sums = sums.typed_data();
  work->draws = slot->element_count();
  if (bits.dimensions().size() == 1) {
    std::copy_n(bits.typed_data(), 2, work->key);
  } else {
    work->bits = bits.typed_data();
  }
  work->stratified = stratified;
  work->slot = slot->typed_data();
  work->drawn = drawn->typed_data();
  total->typed_data()[0] = work->Prepare();
  // A draw costs about as much as copying a hundred bytes.
  const int64_t bytes = 128 * work->draws;
  return Spread(pool, std::move(work), bytes);
}

// Operands: priority [P, S], mass [P, S], sums [P, M], slot [K], new priority [K], new mass [K], ticket [1].
// Results: priority, mass, sums, in place.
ffi::Error SumTreeUpdateCpu(F32 priority, F32 mass, F32 sums, S32 slot, F32 new_priority, F32 new_mass, S32 /*ticket*/,
                            ffi::Result<F32> priority_out, ffi::Result<F32> mass_out, ffi::Result<F32> sums_out) {
  const SumTreeLayout layout(Last(mass.dimensions()));
  if (Last(sums.dimensions()) != layout.width) {
    return InvalidArgument("gear_sumtree_update: last dimension of sums", Last(sums.dimensions()), layout.width,
                           kInternal);
  }
  if (priority.untyped_data() != priority_out->untyped_data() || mass.untyped_data() != mass_out->untyped_data() ||
      sums.untyped_data() != sums_out->untyped_data()) {
    return InvalidArgument("gear_sumtree_update: results", "memory of their own", "the operands' own memory",
                           kInternal);
  }
  SumTreeUpdate update;
  update.partitions = static_cast<int64_t>(sums.element_count()) / layout.width;
  update.priority = priority_out->typed_data();
  update.mass = mass_out->typed_data();
  update.sums = sums_out->typed_data();
  update.Run(layout, slot.element_count(), slot.typed_data(), new_priority.typed_data(), new_mass.typed_data());
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(gear_sumtree_sample_cpu, SumTreeSampleCpu,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<F32>()
                                  .Arg<S32>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<U32>()
                                  .Ret<S32>()
                                  .Ret<F32>()
                                  .Ret<F32>()
                                  .Attr<bool>("stratified"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(gear_sumtree_update_cpu, SumTreeUpdateCpu,
                              ffi::Ffi::Bind()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<S32>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<S32>()
                                  .Ret<F32>()
                                  .Ret<F32>()
                                  .Ret<F32>());

}  // namespace gear_jax
