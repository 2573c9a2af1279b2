#include "ffi/handlers.h"
#include "ffi/pointers.h"
#include "ffi/pointers_call.h"

namespace gear_jax {
namespace {

namespace ffi = xla::ffi;

ffi::Error PointersCpu(ffi::Buffer<ffi::S32> ticket, ffi::RemainingArgs args, ffi::Result<ffi::Buffer<ffi::U32>> out,
                       ffi::Result<ffi::Buffer<ffi::S32>> ticket_out) {
  const auto pointers = ReadPointers(args, out->element_count());
  if (!pointers) return pointers.error();
  for (size_t k = 0; k < pointers->size(); ++k) WritePointer((*pointers)[k], out->typed_data() + 2 * k);
  ticket_out->typed_data()[0] = ticket.typed_data()[0];
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(gear_pointers_cpu, PointersCpu, BindPointers(ffi::Ffi::Bind()));

}  // namespace gear_jax
