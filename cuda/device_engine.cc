#include "cuda/device_engine.h"

#include "cuda/padding_kernels.h"
#include "ffi/gather_engine.h"

namespace gear_jax {
namespace {

// Whether the host can read what XLA, or anyone, says are the rows' numbers.
cudaError_t CheckReadable(const GatherCall& call) {
  if (call.rows == 0) return cudaSuccess;
  for (const int32_t* numbers : {call.slot, call.anchor, call.length}) {
    cudaPointerAttributes attributes{};
    const cudaError_t error = cudaPointerGetAttributes(&attributes, numbers);
    if (error != cudaSuccess) return error;
    if (attributes.type != cudaMemoryTypeHost) return cudaErrorInvalidValue;
  }
  return cudaSuccess;
}

cudaError_t CopyBatch(CopyList copies, cudaStream_t stream) {
  if (copies.bytes.empty()) return cudaSuccess;
#if CUDART_VERSION >= 12080
  cudaMemcpyAttributes how{};
  how.srcAccessOrder = cudaMemcpySrcAccessOrderStream;  // an earlier write of the table may be under way
  how.flags = cudaMemcpyFlagPreferOverlapWithCompute;
  size_t first = 0;  // copy that the attributes are for
  const size_t count = copies.bytes.size();
#if CUDART_VERSION >= 13000
  return cudaMemcpyBatchAsync(copies.to.data(), copies.from.data(), copies.bytes.data(), count, &how, &first, 1,
                              stream);
#else
  size_t failed = 0;
  return cudaMemcpyBatchAsync(copies.to.data(), const_cast<void**>(copies.from.data()), copies.bytes.data(), count,
                              &how, &first, 1, &failed, stream);
#endif
#else
  return cudaErrorNotSupported;
#endif
}

}  // namespace

EngineFault LaunchEngineGather(const GatherCall& call, const std::vector<bool>& copied, const GatherLaunch& launch,
                               cudaStream_t stream) {
  cudaError_t error = CheckReadable(call);
  if (error != cudaSuccess) return {error, "reading the rows on the host"};
  const EnginePlan plan = PlanEngine(call, copied);
  error = LaunchGather(plan.rest, launch, stream);
  if (error != cudaSuccess) return {error, "masks and other columns"};
  for (const Padding& padding : plan.padding) {
    error = LaunchPadding(padding, launch.blocks, stream);
    if (error != cudaSuccess) return {error, "padding"};
  }
  return {CopyBatch(plan.copies, stream), "cudaMemcpyBatchAsync"};
}

}  // namespace gear_jax
