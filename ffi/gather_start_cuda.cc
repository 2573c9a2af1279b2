#include <string>

#include "cuda/device_staging.h"
#include "ffi/cuda.h"
#include "ffi/gather_cuda.h"
#include "ffi/gather_start_call.h"
#include "ffi/handlers.h"

namespace gear_jax {
namespace {

namespace ffi = xla::ffi;
using S32 = ffi::Buffer<ffi::S32>;

ffi::Error NoMemory(const StagingFault& fault, const StagingRequest& request) {
  size_t free = 0, total = 0;
  std::string why = cudaGetErrorString(fault.error);
  if (cudaMemGetInfo(&free, &total) == cudaSuccess) {
    why += "; " + std::to_string(free) + " of " + std::to_string(total) + " bytes are free";
  }
  return NoStagingMemory(fault.bytes, "GPU memory", request.queue, request.depth, why.c_str(),
                         "XLA keeps most of the GPU's memory to itself: set XLA_PYTHON_CLIENT_MEM_FRACTION below 0.75 "
                         "before jax is imported, or use a smaller batch, shorter windows or a smaller depth.");
}

template <bool kChecks>
ffi::Error GatherStartCuda(cudaStream_t stream, S32 slot, S32 anchor, S32 length, S32 ticket, ffi::RemainingArgs args,
                           ffi::Result<S32> handle, ffi::Result<S32> ticket_out, int64_t slots, int64_t steps,
                           Int64s offsets, Int64s lengths, Int64s anchored, Int64s pads, Int64s pad_values,
                           int64_t lead, bool masks, bool ordered, int64_t blocks, int64_t queue, int64_t depth) {
  const GatherAttributes attributes{slots, steps, offsets, lengths, anchored, pads, pad_values, lead, masks};
  auto call = ReadGatherTables(slot, anchor, length, args, attributes);
  if (!call) return call.error();
  ffi::Error error = CheckDepth(depth);
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
  if (!fault) return ffi::Error::Success();
  if (fault.full) {
    return InvalidArgument("gather_start: gathers in flight on this device",
                           std::to_string(kStagingEntries) + " and one",
                           "at most " + std::to_string(kStagingEntries) + " over all queues",
                           "Free queues that are done with by gear_jax.ops.release_queue.");
  }
  if (fault.bytes > 0) return NoMemory(fault, request);
  return CudaFailed((std::string("gather_start, ") + fault.step).c_str(), Sizes(*call), fault.error);
}

ffi::Error GatherDoneCuda(cudaStream_t stream, S32 handle, ffi::RemainingArgs /*after*/, ffi::RemainingRets rets,
                          Int64s pad_values) {
  auto read = ReadGatherDone(handle, rets, pad_values);
  if (!read) return read.error();
  cudaError_t none = cudaSuccess;
  DeviceStaging* const staging = DeviceStaging::Current(&none);
  const std::string sizes = std::to_string(StagingLayout(PartBytes(read->parts)).bytes) + " bytes in " +
                            std::to_string(read->parts.size()) + " parts";
  if (staging == nullptr) return CudaFailed("gather_done, finding the device", sizes, none);
  const StagingFault fault = staging->Done(read->handle, read->parts, read->ok, stream);
  return fault ? CudaFailed("gather_done", sizes, fault.error) : ffi::Error::Success();
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
