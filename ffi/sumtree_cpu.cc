#include <algorithm>
#include <memory>

#include "ffi/cpu.h"
#include "ffi/handlers.h"
#include "ffi/sumtree_call.h"

namespace gear_jax {
namespace {

namespace ffi = xla::ffi;

ffi::Future SumTreeSampleCpu(ffi::ThreadPool pool, FfiF32 roots, FfiS32 first, FfiF32 mass, FfiF32 sums, FfiS32 length,
                             FfiU32 generation, FfiU32 bits, FfiS32 ticket, ffi::Result<FfiS32> slot,
                             ffi::Result<FfiS32> partition, ffi::Result<FfiF32> probability,
                             ffi::Result<FfiS32> drawn_length, ffi::Result<FfiU32> drawn_generation,
                             ffi::Result<FfiF32> least, ffi::Result<FfiF32> total, ffi::Result<FfiS32> ticket_out,
                             bool stratified) {
  auto work = std::make_shared<SumTreeSample>(LastDimension(mass.dimensions()));
  work->draws = slot->element_count();
  const ffi::Error error = CheckSample(work->layout, roots, mass, sums, length, generation, *least, work->draws);
  if (error.failure()) return Failed(error);
  work->all_partitions = PartitionsOf(roots);
  work->first = first.typed_data()[0];
  work->partitions = sums.element_count() / work->layout.width;
  work->roots = RootsOf(roots, work->layout);
  work->mass = mass.typed_data();
  work->sums = sums.typed_data();
  work->length = length.typed_data();
  work->generation = generation.typed_data();
  if (bits.dimensions().size() == 1) {
    std::copy_n(bits.typed_data(), 2, work->key);
  } else {
    work->bits = bits.typed_data();
  }
  work->stratified = stratified;
  work->rows = RowsOf(slot, partition, probability, drawn_length, drawn_generation, least);
  total->typed_data()[0] = work->Prepare();
  ticket_out->typed_data()[0] = ticket.typed_data()[0];
  // A draw costs about as much as copying a few hundred bytes.
  const int64_t bytes = 256 * work->draws;
  return Spread(pool, std::move(work), bytes);
}

ffi::Error SumTreeUpdateCpu(FfiF32 priority, FfiF32 mass, FfiF32 sums, FfiS32 slot, FfiF32 new_priority,
                            FfiF32 new_mass, FfiS32 /*ticket*/, ffi::Result<FfiF32> priority_out,
                            ffi::Result<FfiF32> mass_out, ffi::Result<FfiF32> sums_out) {
  const SumTreeLayout layout(LastDimension(mass.dimensions()));
  ffi::Error error = CheckSums("gear_sumtree_update", sums, layout);
  if (error.success()) error = CheckInPlace(priority, priority_out);
  if (error.success()) error = CheckInPlace(mass, mass_out);
  if (error.success()) error = CheckInPlace(sums, sums_out);
  if (error.failure()) return error;
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
                              BindSumTreeSample(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()));

XLA_FFI_DEFINE_HANDLER_SYMBOL(gear_sumtree_update_cpu, SumTreeUpdateCpu, BindSumTreeUpdate(ffi::Ffi::Bind()));

}  // namespace gear_jax
