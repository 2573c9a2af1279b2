// Staging in the memory of a GPU, and the gathers that go through it. Neither XLA nor Python.
#ifndef GEAR_JAX_CUDA_DEVICE_STAGING_H_
#define GEAR_JAX_CUDA_DEVICE_STAGING_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda/staging_device.h"
#include "ffi/rdma_fetch.h"
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

// A remote fetch by a GPU: what it asks for, as the device has it, and who answers.
struct FetchRequest {
  FetchCall call;  // `gpu.shards` are set, kGpuShards at most; where results go is not
  std::shared_ptr<transport::Reader> reader;
  RdmaCounters* counters = nullptr;
  std::function<void(const Fetch&)> ended;  // on a thread of CUDA's, when all rows are there or lost
};

// What went wrong, or nothing.
struct StagingFault {
  cudaError_t error = cudaSuccess;
  const char* step = "";  // what was being done
  int64_t bytes = 0;      // memory that was wanted and is not there
  bool full = false;      // all entries of the device are taken
  bool host = false;      // the memory is the host's
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

  // Enqueues a remote fetch on a stream of its own, as Start does. Rows of this device's shard are gathered by kernels,
  // and until that is done writes of the tables wait; all others come from the reader, meanwhile, by way of page-locked
  // memory. Waits only if an entry's memory must be replaced by more.
  StagingFault StartFetch(FetchRequest fetch, const StagingRequest& request, cudaStream_t stream);

  // The same with its end in one: the stream waits for the rows. The request has no memory for a handle.
  StagingFault WholeFetch(FetchRequest fetch, StagingRequest request, const std::vector<StagedPart>& parts,
                          cudaStream_t stream);

  // Enqueues the end of a gather (LaunchStagingDone). Neither allocates nor waits.
  StagingFault Done(const int32_t* handle, const std::vector<StagedPart>& parts, bool* ok, cudaStream_t stream);

 private:
  struct Entry {
    uint8_t* memory = nullptr;
    int64_t capacity = 0;
    cudaEvent_t copied = nullptr;    // on XLA's stream: the rows to gather are in the entry's memory
    cudaEvent_t gathered = nullptr;  // on our stream: the last gather has ended
    // Of remote fetches. Each has a stream of its own, because it may wait long.
    cudaStream_t stream = nullptr;
    uint8_t* host = nullptr;  // page-locked: a word in front (FetchLayout), then what travels
    int64_t host_capacity = 0;
    uint32_t fetches = 0;  // so far, mod 2^32
  };

  struct Unused;

  // Of a fetch whose start and end are one call: in the entry's memory.
  struct Scratch {
    int32_t* handle = nullptr;  // [4]
    bool* ok = nullptr;         // [1]
    cudaEvent_t gathered = nullptr;
  };

  explicit DeviceStaging(int device) : device_(device), owner_(NewStagingOwner()) {}

  static cudaError_t MakeStream(cudaStream_t* stream);
  cudaError_t MakeEvents(Entry& entry);
  StagingFault Claim(const StagingRequest& request, cudaStream_t stream, StagingQueues<Entry>::Claim* claim);
  StagingFault Reserve(int32_t number, Entry& entry, int64_t bytes, cudaStream_t stream);
  StagingFault StartFetchLocked(FetchRequest& fetch, StagingRequest request, Scratch* scratch, cudaStream_t stream);
  StagingFault ReserveHost(Entry& entry, int64_t bytes);
  cudaError_t LoadAll();
  StagingFault ReleaseHere(int64_t queue);
  StagingFault FreeRetired(cudaStream_t stream);
  StagingFault Enqueue(GatherCall& call, const StagingRequest& request, const Entry& entry, const StagingHandle& handle,
                       cudaStream_t stream);

  StagingFault EnqueueFetch(FetchRequest& fetch, const StagingRequest& request, Entry& entry,
                            const StagingHandle& handle, cudaStream_t stream);

  std::mutex mutex_;  // held while enqueueing, so that the steps of a start or of an end follow each other
  const int device_;
  const int32_t owner_;
  cudaStream_t stream_ = nullptr;
  bool loaded_ = false;  // the kernels that fetches use
  StagingQueues<Entry> queues_{kStagingEntries};
};

}  // namespace gear_jax

#endif  // GEAR_JAX_CUDA_DEVICE_STAGING_H_
