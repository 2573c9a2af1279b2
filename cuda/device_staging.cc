#include "cuda/device_staging.h"

#include <algorithm>
#include <map>
#include <utility>

#include "cuda/gather_kernels.h"
#include "cuda/order_kernels.h"
#include "cuda/staging_kernels.h"

namespace gear_jax {
namespace {

struct Devices {
  std::mutex mutex;
  std::map<int, DeviceStaging*> staging;
};

Devices& AllDevices() {
  static Devices* const devices = new Devices;
  return *devices;
}

// Where the copies of the rows' numbers lie, behind the data: slot, anchor, length, and the order with its scratch.
StagingLayout IdsLayout(int64_t rows, bool ordered) {
  std::vector<int64_t> parts(3, 4 * rows);
  if (ordered) parts.push_back(4 * (rows + kOrderScratch));
  return StagingLayout(parts);
}

}  // namespace

DeviceStaging* DeviceStaging::Current(cudaError_t* error) {
  int device = 0;
  *error = cudaGetDevice(&device);
  if (*error != cudaSuccess) return nullptr;
  Devices& devices = AllDevices();
  const std::lock_guard<std::mutex> lock(devices.mutex);
  DeviceStaging*& staging = devices.staging[device];
  if (staging == nullptr) staging = new DeviceStaging(device);
  return staging;
}

// Its work comes before that of XLA's streams, which is beside it and may be long.
cudaError_t DeviceStaging::MakeStream(cudaStream_t* stream) {
  if (*stream != nullptr) return cudaSuccess;
  int least = 0, greatest = 0;
  const cudaError_t error = cudaDeviceGetStreamPriorityRange(&least, &greatest);
  if (error != cudaSuccess) return error;
  return cudaStreamCreateWithPriority(stream, cudaStreamNonBlocking, greatest);
}

cudaError_t DeviceStaging::MakeEvents(Entry& entry) {
  for (cudaEvent_t* event : {&entry.copied, &entry.gathered}) {
    if (*event != nullptr) continue;
    const cudaError_t error = cudaEventCreateWithFlags(event, cudaEventDisableTiming);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

// Sees that an entry has memory of at least `bytes`.
StagingFault DeviceStaging::Reserve(int32_t number, Entry& entry, int64_t bytes, cudaStream_t stream) {
  if (entry.capacity >= bytes) return {};
  if (entry.memory != nullptr) {
    // A handle to the old memory must not lead there any more, and who is on the way there must have left.
    cudaError_t error = LaunchStagingForget(number, stream);
    if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
    if (error == cudaSuccess) error = cudaStreamSynchronize(stream_);
    if (error == cudaSuccess && entry.stream != nullptr) error = cudaStreamSynchronize(entry.stream);
    if (error == cudaSuccess) error = cudaFree(entry.memory);
    if (error != cudaSuccess) return {error, "replacing staging memory"};
    entry.memory = nullptr;
    entry.capacity = 0;
  }
  void* memory = nullptr;
  cudaError_t error = cudaMalloc(&memory, bytes);
  if (error != cudaSuccess) {
    cudaGetLastError();  // else it would show up as another call's
    return {error, "allocating staging memory", bytes};
  }
  // Parts are read in whole chunks, and the last may have bytes to spare. On the caller's stream, which all that
  // follows is ordered behind.
  error = cudaMemsetAsync(memory, 0, bytes, stream);
  if (error != cudaSuccess) {
    cudaFree(memory);
    return {error, "clearing staging memory", bytes};
  }
  entry.memory = static_cast<uint8_t*>(memory);
  entry.capacity = bytes;
  return {};
}

// Takes the memory of entries that are given up, by their numbers.
struct DeviceStaging::Unused {
  std::vector<std::pair<int32_t, Entry>> entries;

  void operator()(int32_t number, Entry& entry) {
    if (entry.memory == nullptr) return;
    entries.emplace_back(number, entry);
    entry.memory = entry.host = nullptr;
    entry.capacity = entry.host_capacity = 0;
  }

  // After every handle went stale and all that was on its way there has run.
  cudaError_t Free() const {
    cudaError_t error = cudaSuccess;
    for (const auto& [number, entry] : entries) {
      if (error == cudaSuccess) error = cudaFree(entry.memory);
      if (error == cudaSuccess && entry.host != nullptr) error = cudaFreeHost(entry.host);
    }
    return error;
  }
};

// Frees what retired queues have here.
StagingFault DeviceStaging::FreeRetired(cudaStream_t stream) {
  Unused unused;
  queues_.Release([](int64_t queue, int32_t) { return RetiredQueues::Global().Contains(queue); }, unused);
  if (unused.entries.empty()) return {};
  cudaError_t error = cudaSuccess;
  for (const auto& [number, entry] : unused.entries) {
    if (error == cudaSuccess) error = LaunchStagingForget(number, stream);
  }
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream_);
  for (const auto& [number, entry] : unused.entries) {
    if (error == cudaSuccess && entry.stream != nullptr) error = cudaStreamSynchronize(entry.stream);
  }
  if (error == cudaSuccess) error = unused.Free();
  return {error, "freeing staging memory"};
}

StagingFault DeviceStaging::Release(int64_t queue) {
  std::vector<DeviceStaging*> all;
  {
    Devices& devices = AllDevices();
    const std::lock_guard<std::mutex> lock(devices.mutex);
    for (const auto& [device, staging] : devices.staging) all.push_back(staging);
  }
  // One device after another, and nothing of the others is held meanwhile: this one may be waiting for them.
  for (DeviceStaging* const staging : all) {
    if (StagingFault fault = staging->ReleaseHere(queue)) return fault;
  }
  return {};
}

StagingFault DeviceStaging::ReleaseHere(int64_t queue) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Unused unused;
  queues_.Release([&](int64_t q, int32_t) { return q == queue; }, unused);
  if (unused.entries.empty()) return {};
  int before = 0;
  cudaError_t error = cudaGetDevice(&before);
  if (error == cudaSuccess) error = cudaSetDevice(device_);
  // What is enqueued may still fill an entry; then its handles go stale; then who has just found one good must leave.
  if (error == cudaSuccess) error = cudaDeviceSynchronize();
  for (const auto& [number, entry] : unused.entries) {
    if (error == cudaSuccess) error = LaunchStagingForget(number, stream_);
  }
  // Stale first: the wait for the device does not cover kernels that come while it runs.
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream_);
  if (error == cudaSuccess) error = cudaDeviceSynchronize();
  if (error == cudaSuccess) error = unused.Free();
  const cudaError_t back = cudaSetDevice(before);
  return {error == cudaSuccess ? back : error, "freeing staging memory"};
}

// The entry that a start takes.
StagingFault DeviceStaging::Claim(const StagingRequest& request, cudaStream_t stream,
                                  StagingQueues<Entry>::Claim* claim) {
  const cudaError_t error = MakeStream(&stream_);
  if (error != cudaSuccess) return {error, "making a stream"};
  RetiredQueues::Global().Remove(request.queue);
  if (StagingFault fault = FreeRetired(stream)) return fault;
  *claim = queues_.Next(request.queue, device_, request.depth);
  if (claim->number < 0) return {cudaSuccess, "taking an entry", 0, true};
  return {MakeEvents(*claim->entry), "making events"};
}

StagingFault DeviceStaging::Start(GatherCall call, const StagingRequest& request, cudaStream_t stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  StagingQueues<Entry>::Claim claim;
  if (StagingFault fault = Claim(request, stream, &claim)) return fault;
  const int64_t bytes = StagingLayout(PartBytes(call)).bytes + IdsLayout(call.rows, request.ordered).bytes;
  const int64_t least = StagingLayout::kAlign;
  if (StagingFault fault = Reserve(claim.number, *claim.entry, std::max(bytes, least), stream)) return fault;
  return Enqueue(call, request, *claim.entry, {claim.number, claim.sequence, owner_}, stream);
}

StagingFault DeviceStaging::Enqueue(GatherCall& call, const StagingRequest& request, const Entry& entry,
                                    const StagingHandle& handle, cudaStream_t stream) {
  const StagingLayout data(PartBytes(call)), ids = IdsLayout(call.rows, request.ordered);
  const auto id = [&](size_t i) { return reinterpret_cast<int32_t*>(entry.memory + data.bytes + ids.offset[i]); };
  // The gather that is dropped may still be reading its rows' numbers.
  cudaError_t error = cudaStreamWaitEvent(stream, entry.gathered, 0);
  if (error != cudaSuccess) return {error, "waiting for the gather before"};
  const StagingStart start{handle,
                           {handle.sequence, 0, data.bytes, entry.memory},
                           call.rows,
                           {call.slot, call.anchor, call.length},
                           {id(0), id(1), id(2)},
                           request.ticket,
                           request.ticket_out,
                           request.handle_out};
  error = LaunchStagingStart(start, stream);
  if (error == cudaSuccess) error = cudaEventRecord(entry.copied, stream);
  if (error == cudaSuccess) error = cudaStreamWaitEvent(stream_, entry.copied, 0);
  if (error != cudaSuccess) return {error, "copying the rows' numbers"};

  const FlightSet tables = TablesOf(call);
  call.slot = id(0), call.anchor = id(1), call.length = id(2);
  PlaceParts(call, entry.memory, data);
  int32_t* const order = request.ordered ? id(3) : nullptr;
  if (order != nullptr) error = LaunchOrder(call.slot, call.rows, call.slots, order, stream_);
  if (error != cudaSuccess) return {error, "ordering rows"};
  error = LaunchGather(call, {request.blocks, order, nullptr, nullptr}, stream_);
  if (error == cudaSuccess) error = LaunchStagingFinish(handle, tables, stream_);
  if (error == cudaSuccess) error = cudaEventRecord(entry.gathered, stream_);
  if (error == cudaSuccess) error = LaunchFlightsStarted(tables, stream);
  return {error, "gathering"};
}

StagingFault DeviceStaging::Done(const int32_t* handle, const std::vector<StagedPart>& parts, bool* ok,
                                 cudaStream_t stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const StagingLayout layout(PartBytes(parts));
  return {LaunchStagingDone(handle, owner_, parts, layout, ok, stream), "copying the data"};
}

}  // namespace gear_jax
