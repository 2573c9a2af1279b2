#include <string>
#include <vector>

#include "cuda/scatter_kernels.h"
#include "cuda/staging_kernels.h"
#include "cuda/stamp_kernels.h"
#include "ffi/cuda.h"
#include "ffi/handlers.h"
#include "ffi/scatter_call.h"

namespace gear_jax {
namespace {

namespace ffi = xla::ffi;
using S32 = ffi::Buffer<ffi::S32>;

std::string Sizes(const ScatterCall& call) {
  return std::to_string(call.rows) + " rows into " + std::to_string(call.slots) + " slots of " +
         std::to_string(call.steps) + " steps, " + std::to_string(call.columns.size()) + " columns";
}

// Looks at the rows on the host: for finding faults, not for speed.
ffi::Error CheckOnHost(ScatterCall call, cudaStream_t stream) {
  std::vector<int32_t> slot(call.rows), start(call.rows), length(call.rows), from(call.from ? call.rows : 0);
  const auto fetch = [&](std::vector<int32_t>& to, const int32_t*& from) {
    const cudaError_t error = cudaMemcpyAsync(to.data(), from, 4 * call.rows, cudaMemcpyDefault, stream);
    from = to.data();
    return error;
  };
  cudaError_t error = fetch(slot, call.slot);
  if (error == cudaSuccess && call.start != nullptr) error = fetch(start, call.start);
  if (error == cudaSuccess && call.length != nullptr) error = fetch(length, call.length);
  if (error == cudaSuccess && call.from != nullptr) error = fetch(from, call.from);
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
  if (error != cudaSuccess) return CudaFailed("scatter, checking rows", Sizes(call), error);
  return CheckScatter(call);
}

template <bool kChecks>
ffi::Error ScatterCuda(cudaStream_t stream, S32 slot, S32 start, S32 length, S32 /*ticket*/, ffi::RemainingArgs args,
                       ffi::RemainingRets rets, int64_t slots, int64_t steps, int64_t blocks, bool in_flight,
                       int64_t value_rows, bool stamped) {
  auto read = ReadScatter(slot, start, length, args, rets, slots, steps, value_rows, stamped);
  if (!read) return read.error();
  const ScatterCall& call = read->call;
  if (kChecks) {
    ffi::Error error = CheckOnHost(call, stream);
    if (error.failure()) return error;
  }
  cudaError_t error = cudaSuccess;
  if (in_flight && (call.rows > 0 || !read->moved.empty())) {
    FlightSet tables;
    for (const ScatterColumn& column : call.columns) tables.Add(column.table);
    error = LaunchFlightsWait(tables, stream);
  }
  if (error == cudaSuccess) error = CopyMoved(read->moved, stream);
  if (error == cudaSuccess) error = LaunchStamps(call, true, stream);
  if (error == cudaSuccess) error = LaunchScatter(call, static_cast<int>(blocks), stream);
  if (error == cudaSuccess) error = LaunchStamps(call, false, stream);
  return error == cudaSuccess ? ffi::Error::Success() : CudaFailed("scatter", Sizes(call), error);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(gear_scatter_cuda, ScatterCuda<false>, BindScatter(ffi::Ffi::Bind().Ctx<CudaStream>()),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(gear_scatter_checked_cuda, ScatterCuda<true>,
                              BindScatter(ffi::Ffi::Bind().Ctx<CudaStream>()));

}  // namespace gear_jax
