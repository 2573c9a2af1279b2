// A gather in two halves on the CPU. Nothing runs between them: the start reads the rows into staging memory, the end
// copies them out. What it is for is the CUDA side; here it keeps the same promises.
#include <memory>
#include <utility>

#include "ffi/cpu.h"
#include "ffi/gather_start_call.h"
#include "ffi/handlers.h"

namespace gear_jax {
namespace {

namespace ffi = xla::ffi;
using S32 = ffi::Buffer<ffi::S32>;

template <bool kChecks>
ffi::Future GatherStartCpu(ffi::ThreadPool pool, int32_t device, S32 slot, S32 anchor, S32 length, S32 ticket,
                           ffi::RemainingArgs args, ffi::Result<S32> handle, ffi::Result<S32> ticket_out, int64_t slots,
                           int64_t steps, Int64s offsets, Int64s lengths, Int64s anchored, Int64s pads,
                           Int64s pad_values, int64_t lead, bool masks, bool /*ordered*/, int64_t /*blocks*/,
                           int64_t queue, int64_t depth) {
  const GatherAttributes attributes{slots, steps, offsets, lengths, anchored, pads, pad_values, lead, masks};
  auto call = ReadGatherTables(slot, anchor, length, args, attributes);
  if (!call) return Failed(call.error());
  ffi::Error error = CheckDepth("gather_start", depth);
  if (kChecks && error.success()) error = CheckGather(*call);
  if (error.failure()) return Failed(error);
  const StagingLayout layout(PartBytes(*call));
  auto started = HostStaging::Global().Start(queue, device, depth, layout.bytes);
  if (!started.lease) {
    return Failed(NoStagingMemory("gather_start", layout.bytes, "host memory", queue, depth, "the allocation failed",
                                  "Use a smaller batch, shorter windows or a smaller depth."));
  }
  started.handle.Write(handle->typed_data());
  ticket_out->typed_data()[0] = ticket.typed_data()[0];
  auto gather = std::make_shared<GatherIntoStaging>(std::move(*call), layout, std::move(started.lease));
  const int64_t bytes = gather->Prepare(pool.num_threads());
  return Spread(pool, std::move(gather), bytes);
}

ffi::Future GatherDoneCpu(ffi::ThreadPool pool, int32_t device, S32 handle, ffi::RemainingArgs /*after*/,
                          ffi::RemainingRets rets, Int64s pad_values) {
  auto read = ReadGatherDone(handle, rets, pad_values);
  if (!read) return Failed(read.error());
  const StagingLayout layout(PartBytes(read->parts));
  auto lease = HostStaging::Global().Finish(StagingHandle::Read(read->handle), device, layout.bytes);
  read->ok[0] = static_cast<bool>(lease);
  auto copy = std::make_shared<GatherFromStaging>(read->parts, layout, std::move(lease));
  const int64_t bytes = copy->Prepare(pool.num_threads());
  return Spread(pool, std::move(copy), bytes);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(gear_gather_start_cpu, GatherStartCpu<false>,
                              BindGatherStart(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Ctx<ffi::DeviceOrdinal>()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(gear_gather_start_checked_cpu, GatherStartCpu<true>,
                              BindGatherStart(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Ctx<ffi::DeviceOrdinal>()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(gear_gather_done_cpu, GatherDoneCpu,
                              BindGatherDone(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Ctx<ffi::DeviceOrdinal>()));

}  // namespace gear_jax
