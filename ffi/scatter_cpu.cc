#include <memory>
#include <utility>

#include "ffi/cpu.h"
#include "ffi/handlers.h"
#include "ffi/scatter_call.h"

namespace gear_jax {
namespace {

namespace ffi = xla::ffi;
using S32 = ffi::Buffer<ffi::S32>;

template <bool kChecks>
ffi::Future ScatterCpu(ffi::ThreadPool pool, S32 slot, S32 start, S32 length, S32 /*ticket*/, ffi::RemainingArgs args,
                       ffi::RemainingRets rets, int64_t slots, int64_t steps, int64_t /*blocks*/, bool /*in_flight*/,
                       int64_t value_rows, bool stamped) {
  auto read = ReadScatter(slot, start, length, args, rets, slots, steps, value_rows, stamped);
  if (!read) return Failed(read.error());
  if (!read->moved.empty()) {
    return Failed(InvalidArgument("gear_scatter: results", "memory of their own", "the columns' own memory",
                                  "Call gear_jax.ops.scatter, which aliases them."));
  }
  if (kChecks) {
    ffi::Error error = CheckScatter(read->call);
    if (error.failure()) return Failed(error);
  }
  auto scatter = std::make_shared<Scatter>(std::move(read->call));
  const int64_t bytes = scatter->Prepare(pool.num_threads());
  return Spread(pool, std::move(scatter), bytes);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(gear_scatter_cpu, ScatterCpu<false>,
                              BindScatter(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(gear_scatter_checked_cpu, ScatterCpu<true>,
                              BindScatter(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()));

}  // namespace gear_jax
