#include <memory>

#include "ffi/cpu.h"
#include "ffi/handlers.h"
#include "ffi/zeros.h"

namespace gear_jax {
namespace {

namespace ffi = xla::ffi;

ffi::Future ZerosCpu(ffi::ThreadPool pool, ffi::Result<ffi::AnyBuffer> out) {
  const int64_t bytes = out->size_bytes();
  return Spread(pool, std::make_shared<Zeros>(out->untyped_data(), bytes), bytes);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(gear_zeros_cpu, ZerosCpu, ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Ret<ffi::AnyBuffer>());

}  // namespace gear_jax
