// The kernels of a gather in two halves, around the gather itself. They enqueue; they neither allocate nor wait.
//
// On XLA's stream, start: LaunchStagingStart; then, when the gather is enqueued, LaunchFlightsStarted. On the stream of
// the gathers: the gather, LaunchStagingFinish. On XLA's stream, end: LaunchStagingDone. A write: LaunchFlightsWait.
//
// Whatever a kernel waits for was enqueued before it: other work may lie in between, kernels may be loaded or run one
// by one, and nothing blocks for good. That is why a gather is counted as started last: until then nobody waits for it.
// And what waits is a kernel of one block, which never keeps out the gather that it waits for.
#ifndef GEAR_JAX_CUDA_STAGING_KERNELS_H_
#define GEAR_JAX_CUDA_STAGING_KERNELS_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "cuda/staging_device.h"

namespace gear_jax {

// What a start takes over from XLA's arrays, and what it gives.
struct StagingStart {
  StagingHandle handle;
  StagingEntry entry;  // as it is from now on, but for `finished`
  int64_t rows = 0;
  const int32_t* ids[3] = {};  // slot, anchor, length, [rows] each
  int32_t* ids_out[3] = {};    // memory of the entry
  const int32_t* ticket = nullptr;
  int32_t* ticket_out = nullptr;  // [1]
  int32_t* handle_out = nullptr;  // [4]
};

cudaError_t LaunchStagingStart(const StagingStart& start, cudaStream_t stream);

// Counts a gather of these tables as started: writes that come later on the stream wait for it.
cudaError_t LaunchFlightsStarted(const FlightSet& tables, cudaStream_t stream);

// Counts a gather of these tables as finished whose data is not all there yet.
cudaError_t LaunchFlightsFinished(const FlightSet& tables, cudaStream_t stream);

// Marks an entry's data as there, and counts the gather as finished.
cudaError_t LaunchStagingFinish(const StagingHandle& handle, const FlightSet& tables, cudaStream_t stream);

// Waits for the gathers in flight of these tables.
cudaError_t LaunchFlightsWait(const FlightSet& tables, cudaStream_t stream);

// Makes every handle of an entry stale.
cudaError_t LaunchStagingForget(int32_t entry, cudaStream_t stream);

// Waits for the data that a handle (int32[4], the device's) names, copies the parts to their results, or fills them
// with padding where it is stale, and says which in `ok`. `layout`: of the parts.
cudaError_t LaunchStagingDone(const int32_t* handle, int32_t owner, const std::vector<StagedPart>& parts,
                              const StagingLayout& layout, bool* ok, cudaStream_t stream);

// Loads these kernels on the current device, for launches behind a stream that waits (load_kernels.h).
cudaError_t LoadStagingKernels();

}  // namespace gear_jax

#endif  // GEAR_JAX_CUDA_STAGING_KERNELS_H_
