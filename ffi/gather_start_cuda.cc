#include "ffi/gather_cuda.h"
#include "ffi/gather_start_call.h"
#include "ffi/handlers.h"
#include "ffi/staging_cuda.h"

namespace gear_jax {
namespace {

namespace ffi = xla::ffi;
using S32 = ffi::Buffer<ffi::S32>;

template <bool kChecks>
ffi::Error GatherStartCuda(cudaStream_t stream, S32 slot, S32 anchor, S32 length, S32 ticket, ffi::RemainingArgs args,
                           ffi::Result<S32> handle, ffi::Result<S32> ticket_out, int64_t slots, int64_t steps,
                           Int64s offsets, Int64s lengths, Int64s anchored, Int64s pads, Int64s pad_values,
                           int64_t lead, bool masks, bool ordered, int64_t blocks, int64_t queue, int64_t depth) {
  const GatherAttributes attributes{slots, steps, offsets, lengths, anchored, pads, pad_values, lead, masks};
  auto call = ReadGatherTables(slot, anchor, length, args, attributes);
  if (!call) return call.error();
  ffi::Error error = CheckDepth("gather_start", depth);
  if (kChecks && error.success()) error = CheckOnHost(*call, stream);
  if (error.failure()) return error;
  cudaError_t none = cudaSuccess;
  DeviceStaging* const staging = DeviceStaging::Current(&none);
  if (staging == nullptr) return CudaFailed("gather_start, finding the device", Sizes(*call), none);
  const StagingRequest request{queue,
                               depth,
                               ordered,
                               static_cast<int>(blocks),
                               ticket.typed_data(),
                               ticket_out->typed_data(),
                               handle->typed_data()};
  const StagingFault fault = staging->Start(*call, request, stream);
  return fault ? StagingFailed("gather_start", fault, Sizes(*call), queue, depth) : ffi::Error::Success();
}

ffi::Error GatherDoneCuda(cudaStream_t stream, S32 handle, ffi::RemainingArgs /*after*/, ffi::RemainingRets rets,
                          Int64s pad_values) {
  return EndOnDevice("gather_done", ReadGatherDone(handle, rets, pad_values), stream);
}

}  // namespace

// The start waits on events and may allocate, so it cannot be part of a CUDA graph. The end can.
XLA_FFI_DEFINE_HANDLER_SYMBOL(gear_gather_start_cuda, GatherStartCuda<false>,
                              BindGatherStart(ffi::Ffi::Bind().Ctx<CudaStream>()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(gear_gather_start_checked_cuda, GatherStartCuda<true>,
                              BindGatherStart(ffi::Ffi::Bind().Ctx<CudaStream>()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(gear_gather_done_cuda, GatherDoneCuda, BindGatherDone(ffi::Ffi::Bind().Ctx<CudaStream>()),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace gear_jax
