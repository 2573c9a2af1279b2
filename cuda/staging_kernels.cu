#include <algorithm>

#include "cuda/load_kernels.h"
#include "cuda/staging_kernels.h"
#include "cuda/warp_copy.cuh"

namespace gear_jax {
namespace {

// Of each device; zero at first.
__device__ StagingEntry entries[kStagingEntries];
__device__ Flight flights[kFlights];

__device__ int64_t LoadAcquire(const int64_t* from) {
  int64_t value;
  asm volatile("ld.acquire.gpu.global.s64 %0, [%1];" : "=l"(value) : "l"(__cvta_generic_to_global(from)) : "memory");
  return value;
}

__device__ uint32_t LoadAcquire(const uint32_t* from) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(__cvta_generic_to_global(from)) : "memory");
  return value;
}

__device__ void StoreRelease(int64_t* to, int64_t value) {
  asm volatile("st.release.gpu.global.s64 [%0], %1;" ::"l"(__cvta_generic_to_global(to)), "l"(value) : "memory");
}

constexpr unsigned kSleep = 250;  // nanoseconds between two looks

__global__ void StartKernel(const __grid_constant__ StagingStart start) {
  const int64_t first = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (first == 0) {
    StagingEntry& entry = entries[start.handle.entry];
    entry.sequence = start.entry.sequence;
    entry.bytes = start.entry.bytes;
    entry.memory = start.entry.memory;
    start.handle.Write(start.handle_out);
    start.ticket_out[0] = start.ticket[0];
  }
  for (int64_t row = first; row < start.rows; row += gridDim.x * static_cast<int64_t>(blockDim.x)) {
#pragma unroll
    for (int i = 0; i < 3; ++i) start.ids_out[i][row] = start.ids[i][row];
  }
}

__global__ void StartedKernel(const __grid_constant__ FlightSet tables) {
  if (tables.Contains(threadIdx.x)) atomicAdd(&flights[threadIdx.x].started, 1u);
}

__global__ void FinishedKernel(const __grid_constant__ FlightSet tables) {
  __threadfence();
  if (tables.Contains(threadIdx.x)) atomicAdd(&flights[threadIdx.x].finished, 1u);
}

// The gather before it on the stream has ended, and with it all its writes and reads.
__global__ void FinishKernel(const __grid_constant__ StagingHandle handle, const __grid_constant__ FlightSet tables) {
  __threadfence();
  if (threadIdx.x == 0) StoreRelease(&entries[handle.entry].finished, handle.sequence);
  if (tables.Contains(threadIdx.x)) atomicAdd(&flights[threadIdx.x].finished, 1u);
}

__global__ void WaitKernel(const __grid_constant__ FlightSet tables) {
  if (!tables.Contains(threadIdx.x)) return;
  const Flight& flight = flights[threadIdx.x];
  // Fixed while this kernel runs: it is raised on the same stream.
  const uint32_t started = LoadAcquire(&flight.started);
  while (!Landed(started, LoadAcquire(&flight.finished))) __nanosleep(kSleep);
}

__global__ void ForgetKernel(int32_t entry) { entries[entry].sequence = 0; }

__global__ void DoneKernel(const int32_t* handle, int32_t owner, int64_t bytes, bool* ok) {
  const StagingHandle given = StagingHandle::Read(handle);
  StagingEntry* const entry = FindEntry(entries, given, owner, bytes);
  if (entry != nullptr) {
    while (LoadAcquire(&entry->finished) < given.sequence) __nanosleep(kSleep);
    entry->sequence = 0;  // handed out
  }
  *ok = entry != nullptr;
}

constexpr int kCopies = 32;  // of a launch

struct CopyParams {
  const int32_t* handle;
  const bool* ok;
  int32_t count;
  int64_t first_tile[kCopies + 1];
  CopyEntry entry[kCopies];
};
static_assert(sizeof(CopyParams) <= 4096, "kernel parameters of CUDA 12.0");

__global__ void __launch_bounds__(kThreads) CopyKernel(const __grid_constant__ CopyParams params) {
  const uint8_t* const memory = *params.ok ? entries[params.handle[0]].memory : nullptr;
  const int64_t warps = static_cast<int64_t>(gridDim.x) * (kThreads / 32);
  int e = 0;
  for (int64_t tile = (blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x) / 32;
       tile < params.first_tile[params.count]; tile += warps) {
    while (tile >= params.first_tile[e + 1]) ++e;
    const CopyEntry& entry = params.entry[e];
    const int64_t first_unit = (tile - params.first_tile[e]) * kTileUnits + threadIdx.x % 32;
    const auto plan = [&](int j) { return PlanCopy(entry, memory, first_unit + j * 32); };
    CopyTile(plan, [] {}, entry.pad);
  }
}

}  // namespace

cudaError_t LaunchStagingStart(const StagingStart& start, cudaStream_t stream) {
  constexpr int kStartThreads = 256;
  const int64_t blocks = (start.rows + kStartThreads - 1) / kStartThreads;
  StartKernel<<<static_cast<int>(std::clamp<int64_t>(blocks, 1, 256)), kStartThreads, 0, stream>>>(start);
  return cudaGetLastError();
}

cudaError_t LaunchFlightsStarted(const FlightSet& tables, cudaStream_t stream) {
  StartedKernel<<<1, kFlights, 0, stream>>>(tables);
  return cudaGetLastError();
}

cudaError_t LaunchFlightsFinished(const FlightSet& tables, cudaStream_t stream) {
  FinishedKernel<<<1, kFlights, 0, stream>>>(tables);
  return cudaGetLastError();
}

cudaError_t LaunchStagingFinish(const StagingHandle& handle, const FlightSet& tables, cudaStream_t stream) {
  FinishKernel<<<1, kFlights, 0, stream>>>(handle, tables);
  return cudaGetLastError();
}

cudaError_t LaunchFlightsWait(const FlightSet& tables, cudaStream_t stream) {
  WaitKernel<<<1, kFlights, 0, stream>>>(tables);
  return cudaGetLastError();
}

cudaError_t LaunchStagingForget(int32_t entry, cudaStream_t stream) {
  ForgetKernel<<<1, 1, 0, stream>>>(entry);
  return cudaGetLastError();
}

cudaError_t LaunchStagingDone(const int32_t* handle, int32_t owner, const std::vector<StagedPart>& parts,
                              const StagingLayout& layout, bool* ok, cudaStream_t stream) {
  DoneKernel<<<1, 1, 0, stream>>>(handle, owner, layout.bytes, ok);
  cudaError_t error = cudaGetLastError();
  for (size_t first = 0; first < parts.size() && error == cudaSuccess; first += kCopies) {
    CopyParams params{};
    params.handle = handle;
    params.ok = ok;
    for (size_t i = first; i < std::min(parts.size(), first + kCopies); ++i) {
      const CopyEntry entry = MakeEntry(parts[i], layout.offset[i]);
      const int64_t tiles = (Units(entry) + kTileUnits - 1) / kTileUnits;
      params.entry[params.count] = entry;
      params.first_tile[params.count + 1] = params.first_tile[params.count] + tiles;
      ++params.count;
    }
    const int64_t tiles = params.first_tile[params.count];
    if (tiles == 0) continue;
    CopyKernel<<<Blocks(0, tiles, kThreads / 32, 2), kThreads, 0, stream>>>(params);
    error = cudaGetLastError();
  }
  return error;
}

cudaError_t LoadStagingKernels() {
  return LoadKernels({reinterpret_cast<const void*>(StartedKernel), reinterpret_cast<const void*>(FinishedKernel),
                      reinterpret_cast<const void*>(FinishKernel), reinterpret_cast<const void*>(WaitKernel),
                      reinterpret_cast<const void*>(ForgetKernel), reinterpret_cast<const void*>(DoneKernel),
                      reinterpret_cast<const void*>(CopyKernel)});
}

}  // namespace gear_jax
