// Staging in the memory of a GPU, and the gathers that go through it. Neither XLA nor Python.
#ifndef GEAR_JAX_CUDA_DEVICE_STAGING_H_
#define GEAR_JAX_CUDA_DEVICE_STAGING_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <mutex>
#include <vector>

#include "cuda/staging_device.h"
#include "ffi/staged_gather.h"

namespace gear_jax {

// What a start asks for, and where its results go.
struct StagingRequest {
  int64_t queue = 0;
  int64_t depth = 1;
  bool ordered = false;  // as in LaunchOrder
  int blocks = 0;        // as in LaunchGather
  const int32_t* ticket = nullptr;
  int32_t* ticket_out = nullptr;  // [1]
  int32_t* handle_out = nullptr;  // [4]
};

// What went wrong, or nothing.
struct StagingFault {
  cudaError_t error = cudaSuccess;
  const char* step = "";  // what was being done
  int64_t bytes = 0;      // memory that was wanted and is not there
  bool full = false;      // all entries of the device are taken
  explicit operator bool() const { return error != cudaSuccess || full; }
};

// The staging of one device. Thread-safe; never destroyed, because the process may end with gathers in flight.
class DeviceStaging {
 public:
  // That of the current device, or null with the error.
  static DeviceStaging* Current(cudaError_t* error);

  // Frees what a queue has on every device, when all that is enqueued there has run.
  static StagingFault Release(int64_t queue);

  // Enqueues a gather on the device's own stream, after what is on `stream` so far; its results have no memory yet.
  // Waits only if an entry's memory must be replaced by more.
  StagingFault Start(GatherCall call, const StagingRequest& request, cudaStream_t stream);

  // Enqueues the end of a gather (LaunchStagingDone). Neither allocates nor waits.
  StagingFault Done(const int32_t* handle, const std::vector<StagedPart>& parts, bool* ok, cudaStream_t stream);

 private:
  struct Entry {
    uint8_t* memory = nullptr;
    int64_t capacity = 0;
    cudaEvent_t copied = nullptr;    // on XLA's stream: the rows to gather are in the entry's memory
    cudaEvent_t gathered = nullptr;  // on our stream: the last gather has ended
  };

  explicit DeviceStaging(int device) : device_(device), owner_(NewStagingOwner()) {}

  cudaError_t MakeStream();
  cudaError_t MakeEvents(Entry& entry);
  StagingFault Reserve(int32_t number, Entry& entry, int64_t bytes, cudaStream_t stream);
  StagingFault ReleaseHere(int64_t queue);
  StagingFault FreeRetired(cudaStream_t stream);
  StagingFault Enqueue(GatherCall& call, const StagingRequest& request, const Entry& entry, const StagingHandle& handle,
                       cudaStream_t stream);

  std::mutex mutex_;  // held while enqueueing, so that the steps of a start or of an end follow each other
  const int device_;
  const int32_t owner_;
  cudaStream_t stream_ = nullptr;
  StagingQueues<Entry> queues_{kStagingEntries};
};

}  // namespace gear_jax

#endif  // GEAR_JAX_CUDA_DEVICE_STAGING_H_
