#include "ffi/gather_cuda.h"

#include <string>
#include <vector>

#include "cuda/device_registry.h"
#include "cuda/gather_kernels.h"
#include "cuda/order_kernels.h"
#include "ffi/addressed_gather.h"
#include "ffi/cuda.h"
#include "ffi/gather_call.h"
#include "ffi/handlers.h"

namespace gear_jax {

namespace ffi = xla::ffi;

std::string Sizes(const GatherCall& call) {
  return std::to_string(call.rows) + " rows of " + std::to_string(call.slots) + " slots of " +
         std::to_string(call.steps) + " steps, " + std::to_string(call.columns.size()) + " columns";
}

ffi::Error CheckOnHost(GatherCall call, cudaStream_t stream) {
  std::vector<int32_t> slot(call.rows);
  cudaError_t error = cudaMemcpyAsync(slot.data(), call.slot, 4 * call.rows, cudaMemcpyDefault, stream);
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
  if (error != cudaSuccess) return CudaFailed("gather, checking slots", Sizes(call), error);
  call.slot = slot.data();
  return CheckGather(call);
}

namespace {

using S32 = ffi::Buffer<ffi::S32>;

// What a kernel found wrong with an address and could not report itself.
ffi::Error CheckAddresses(const char* what) {
  const std::string fault = DeviceRegistry::Global().TakeFault(what);
  return fault.empty() ? ffi::Error::Success() : ffi::Error(ffi::ErrorCode::kInvalidArgument, fault);
}

template <bool kChecks>
ffi::Error GatherCuda(cudaStream_t stream, S32 slot, S32 anchor, S32 length, S32 ticket, ffi::RemainingArgs args,
                      ffi::RemainingRets rets, int64_t slots, int64_t steps, Int64s offsets, Int64s lengths,
                      Int64s anchored, Int64s pads, Int64s pad_values, int64_t lead, bool masks, bool ordered,
                      int64_t blocks, Int64s addresses, Int64s shards) {
  const GatherAttributes attributes{slots,      steps, offsets, lengths,   anchored, pads,
                                    pad_values, lead,  masks,   addresses, shards};
  auto read = ReadGather(slot, anchor, length, ticket, args, rets, attributes, ordered);
  if (!read) return read.error();
  const GatherCall& call = read->call;
  if (call.shards > kMostShards) {
    return InvalidArgument("gather: columns: shards", call.shards,
                           "at most " + std::to_string(kMostShards) + " on a GPU", "Read the table in fewer shards.");
  }
  if (kChecks) {
    ffi::Error error = CheckOnHost(call, stream);
    if (error.failure()) return error;
  }
  if (read->order != nullptr) {
    const cudaError_t error = LaunchOrder(call.slot, call.rows, call.slots, read->order, stream);
    if (error != cudaSuccess) return CudaFailed("gather, ordering rows", Sizes(call), error);
  }
  GatherLaunch launch{static_cast<int>(blocks), read->order, read->ticket, read->ticket_out};
  const bool addressed = IsAddressed(call);
  if (addressed) {
    ffi::Error error = CheckAddresses("an earlier gather");
    if (error.failure()) return error;
    if (!DeviceRegistry::Global().View(&launch.registry)) {
      const std::string fault = AddressFaultText("gather: columns", AddressFault::kForeign, -1, -1);
      return ffi::Error(ffi::ErrorCode::kInvalidArgument, fault);
    }
  }
  cudaError_t error = LaunchGather(call, launch, stream);
  if (kChecks && addressed && error == cudaSuccess) {
    error = cudaStreamSynchronize(stream);
    if (error == cudaSuccess) return CheckAddresses("gather");
  }
  return error == cudaSuccess ? ffi::Error::Success() : CudaFailed("gather", Sizes(call), error);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(gear_gather_cuda, GatherCuda<false>, BindGather(ffi::Ffi::Bind().Ctx<CudaStream>()),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(gear_gather_checked_cuda, GatherCuda<true>,
                              BindGather(ffi::Ffi::Bind().Ctx<CudaStream>()));

}  // namespace gear_jax
