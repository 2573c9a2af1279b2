// What the CUDA handlers share that go through staging memory.
#ifndef GEAR_JAX_FFI_STAGING_CUDA_H_
#define GEAR_JAX_FFI_STAGING_CUDA_H_

#include <cstdint>
#include <string>

#include "cuda/device_staging.h"
#include "ffi/cuda.h"
#include "ffi/gather_start_call.h"

namespace gear_jax {

// The error of a start that has failed. `queue`: -1 where it is of no queue.
inline xla::ffi::Error StagingFailed(const char* op, const StagingFault& fault, const std::string& sizes,
                                     int64_t queue = -1, int64_t depth = 0) {
  if (fault.full) {
    return InvalidArgument(std::string(op) + ": gathers in flight on this device",
                           std::to_string(kStagingEntries) + " and one",
                           "at most " + std::to_string(kStagingEntries) + " over all queues",
                           "Free queues that are done with by gear_jax.ops.release_queue.");
  }
  if (fault.bytes == 0) return CudaFailed((std::string(op) + ", " + fault.step).c_str(), sizes, fault.error);
  size_t free = 0, total = 0;
  std::string why = std::string(fault.step) + ": " + cudaGetErrorString(fault.error);
  if (cudaMemGetInfo(&free, &total) == cudaSuccess) {
    why += "; " + std::to_string(free) + " of " + std::to_string(total) + " bytes of the GPU are free";
  }
  return NoStagingMemory(
      op, fault.bytes, fault.host ? "page-locked host memory" : "GPU memory", queue, depth, why.c_str(),
      fault.host ? "Use a smaller batch, shorter windows or a smaller depth."
                 : "XLA keeps most of the GPU's memory to itself: set XLA_PYTHON_CLIENT_MEM_FRACTION below "
                   "0.75 before jax is imported, or use a smaller batch, shorter windows or a smaller depth.");
}

// Enqueues the end of a gather or fetch, whose operands were read, on the current device.
inline xla::ffi::Error EndOnDevice(const char* op, const xla::ffi::ErrorOr<GatherDoneOperands>& read,
                                   cudaStream_t stream) {
  if (!read) return read.error();
  cudaError_t none = cudaSuccess;
  DeviceStaging* const staging = DeviceStaging::Current(&none);
  const std::string sizes = std::to_string(StagingLayout(PartBytes(read->parts)).bytes) + " bytes in " +
                            std::to_string(read->parts.size()) + " parts";
  if (staging == nullptr) return CudaFailed((std::string(op) + ", finding the device").c_str(), sizes, none);
  const StagingFault fault = staging->Done(read->handle, read->parts, read->ok, stream);
  return fault ? CudaFailed(op, sizes, fault.error) : xla::ffi::Error::Success();
}

}  // namespace gear_jax

#endif  // GEAR_JAX_FFI_STAGING_CUDA_H_
