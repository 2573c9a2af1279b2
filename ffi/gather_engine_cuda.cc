#include <string>
#include <vector>

#include "cuda/device_engine.h"
#include "cuda/order_kernels.h"
#include "ffi/cuda.h"
#include "ffi/gather_call.h"
#include "ffi/gather_cuda.h"
#include "ffi/handlers.h"

namespace gear_jax {
namespace {

namespace ffi = xla::ffi;
using S32 = ffi::Buffer<ffi::S32>;

template <bool kChecks>
ffi::Error GatherEngineCuda(cudaStream_t stream, S32 slot, S32 anchor, S32 length, S32 ticket, ffi::RemainingArgs args,
                            ffi::RemainingRets rets, int64_t slots, int64_t steps, Int64s offsets, Int64s lengths,
                            Int64s anchored, Int64s pads, Int64s pad_values, int64_t lead, bool masks, bool ordered,
                            int64_t blocks, Int64s copied) {
  const GatherAttributes attributes{slots, steps, offsets, lengths, anchored, pads, pad_values, lead, masks};
  auto read = ReadGather(slot, anchor, length, ticket, args, rets, attributes, ordered);
  if (!read) return read.error();
  const GatherCall& call = read->call;
  ffi::Error error = CheckCopied(call, copied);
  if (kChecks && error.success()) error = CheckOnHost(call, stream);
  if (error.failure()) return error;
  if (read->order != nullptr) {
    const cudaError_t order = LaunchOrder(call.slot, call.rows, call.slots, read->order, stream);
    if (order != cudaSuccess) return CudaFailed("gather by copy engine, ordering rows", Sizes(call), order);
  }
  const GatherLaunch launch{static_cast<int>(blocks), read->order, read->ticket, read->ticket_out};
  const std::vector<bool> by_engine(copied.begin(), copied.end());
  const EngineFault fault = LaunchEngineGather(call, by_engine, launch, stream);
  if (!fault) return ffi::Error::Success();
  return CudaFailed((std::string("gather by copy engine, ") + fault.step).c_str(), Sizes(call), fault.error);
}

}  // namespace

// The copies depend on the rows' numbers, so that no CUDA graph may hold them.
XLA_FFI_DEFINE_HANDLER_SYMBOL(gear_gather_engine_cuda, GatherEngineCuda<false>,
                              BindGatherEngine(ffi::Ffi::Bind().Ctx<CudaStream>()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(gear_gather_engine_checked_cuda, GatherEngineCuda<true>,
                              BindGatherEngine(ffi::Ffi::Bind().Ctx<CudaStream>()));

}  // namespace gear_jax
