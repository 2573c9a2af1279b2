// Remote fetches by a GPU. One entry's work, on the entry's own stream unless it says otherwise:
//
//   on XLA's stream   the rows' numbers go to the host, with the stamps of this GPU's own rows
//   host              sorts the rows and asks the reader for those that are not this GPU's
//   kernels           gather this GPU's rows, read their stamps again, and let writes of the tables go on
//   stream            waits until the reader has brought the others, into page-locked memory
//   host              judges all rows and pads what is not valid
//   kernels           copy the rows that came to the others, and say that the data is there
//
// The host's parts run on a thread of CUDA's: they call neither CUDA nor Python, and wait for nothing.
#include <memory>
#include <utility>

#include "cuda/device_staging.h"
#include "cuda/fetch_kernels.h"
#include "cuda/gather_kernels.h"
#include "cuda/host_wait.h"
#include "cuda/page_locked.h"
#include "cuda/pointers_kernels.h"
#include "cuda/scatter_kernels.h"
#include "cuda/staging_kernels.h"
#include "cuda/stamp_kernels.h"

namespace gear_jax {
namespace {

constexpr int kBlocks = 8;  // as a gather in flight: other work runs beside it
static_assert(kGpuShards <= kMostShards);

// Where things lie in an entry's two memories. The data is in both, and a part of it begins at a multiple of 256.
struct FetchLayout {
  explicit FetchLayout(const FetchCall& call)
      : FetchLayout(PartBytes(call), call.gather.rows, call.gpu.shards.size() * call.gather.columns.size()) {}
  FetchLayout(const std::vector<int64_t>& parts, int64_t rows, int64_t tables)
      : data(parts),
        device({4 * rows, 4 * rows, 4 * rows, rows, 16, 1, 8 * tables}),
        host({8, 4 * rows, 4 * rows, 4 * rows, 4 * rows, 4 * rows, 4 * rows, 4 * rows, rows}) {}

  int64_t device_bytes() const { return data.bytes + device.bytes; }
  int64_t host_bytes() const { return host.bytes + data.bytes; }

  const StagingLayout data;
  const StagingLayout device;  // behind the data: own slot, anchor, length, take, handle, ok, pointers to tables
  const StagingLayout host;  // in front of the data: word, slot, anchor, length, shard, generation, before, after, take
};

// A fetch on its way, from one of the host's parts to the next.
struct Travelling {
  std::shared_ptr<Fetch> fetch;
  std::function<void(const Fetch&)> ended;
  uint32_t* word;  // becomes `number` when all is there
  uint32_t number;
};

void CUDART_CB Begin(void* data) {
  auto& travelling = *static_cast<Travelling*>(data);
  Fetch& fetch = *travelling.fetch;
  fetch.Prepare(1);
  fetch.Start(
      [word = travelling.word, number = travelling.number] { __atomic_store_n(word, number, __ATOMIC_RELEASE); });
  fetch.Drain();
}

void CUDART_CB End(void* data) {
  const std::unique_ptr<Travelling> travelling(static_cast<Travelling*>(data));
  travelling->fetch->Finish();
  travelling->ended(*travelling->fetch);
}

// The tables of several shards as one, whose parts begin where `pointers` (uint32[columns, shards, 2], the device's)
// say.
cudaError_t JoinShards(const std::vector<GpuShard>& shards, uint32_t* pointers, GatherCall* call, cudaStream_t stream) {
  call->shards = static_cast<int64_t>(shards.size());
  call->slots *= call->shards;
  std::vector<const void*> tables;
  for (size_t k = 0; k < call->columns.size(); ++k) {
    call->columns[k].shards = pointers + 2 * tables.size();
    call->columns[k].address_alignment = kPointerAlignment;
    for (const GpuShard& shard : shards) tables.push_back(shard.tables[k]);
  }
  return LaunchPointers(tables, pointers, nullptr, nullptr, stream);
}

}  // namespace

// What is enqueued behind a fetch that waits must not have to load a kernel first.
cudaError_t DeviceStaging::LoadAll() {
  if (loaded_) return cudaSuccess;
  cudaError_t error = LoadStagingKernels();
  if (error == cudaSuccess) error = LoadGatherKernels();
  if (error == cudaSuccess) error = LoadPointersKernels();
  if (error == cudaSuccess) error = LoadFetchKernels();
  if (error == cudaSuccess) error = LoadScatterKernels();
  if (error == cudaSuccess) error = LoadStampKernels();
  loaded_ = error == cudaSuccess;
  return error;
}

// Sees that an entry has a stream, and page-locked memory of at least `bytes`.
StagingFault DeviceStaging::ReserveHost(Entry& entry, int64_t bytes) {
  const cudaError_t made = MakeStream(&entry.stream);
  if (made != cudaSuccess) return {made, "making a stream"};
  if (entry.host_capacity >= bytes) return {};
  if (entry.host != nullptr) {
    cudaError_t error = cudaStreamSynchronize(entry.stream);
    if (error == cudaSuccess) error = cudaFreeHost(entry.host);
    if (error != cudaSuccess) return {error, "replacing page-locked memory"};
    entry.host = nullptr;
    entry.host_capacity = 0;
  }
  if (StagingFault fault = AllocatePageLocked(bytes, &entry.host)) return fault;
  entry.host_capacity = bytes;
  *reinterpret_cast<uint32_t*>(entry.host) = entry.fetches;
  return {};
}

StagingFault DeviceStaging::StartFetch(FetchRequest fetch, const StagingRequest& request, cudaStream_t stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return StartFetchLocked(fetch, request, nullptr, stream);
}

StagingFault DeviceStaging::WholeFetch(FetchRequest fetch, StagingRequest request, const std::vector<StagedPart>& parts,
                                       cudaStream_t stream) {
  const std::lock_guard<std::mutex> lock(mutex_);  // until the end is enqueued, no other fetch may take the entry
  Scratch scratch;
  request.handle_out = nullptr;
  if (StagingFault fault = StartFetchLocked(fetch, request, &scratch, stream)) return fault;
  cudaError_t error = cudaStreamWaitEvent(stream, scratch.gathered, 0);
  if (error == cudaSuccess) {
    error = LaunchStagingDone(scratch.handle, owner_, parts, StagingLayout(PartBytes(parts)), scratch.ok, stream);
  }
  return {error, "copying the data"};
}

StagingFault DeviceStaging::StartFetchLocked(FetchRequest& fetch, StagingRequest request, Scratch* scratch,
                                             cudaStream_t stream) {
  const cudaError_t loaded = LoadAll();
  if (loaded != cudaSuccess) return {loaded, "loading kernels"};
  StagingQueues<Entry>::Claim claim;
  if (StagingFault fault = Claim(request, stream, &claim)) return fault;
  const FetchLayout layout(fetch.call);
  if (StagingFault fault = Reserve(claim.number, *claim.entry, layout.device_bytes(), stream)) return fault;
  if (StagingFault fault = ReserveHost(*claim.entry, layout.host_bytes())) return fault;
  if (scratch != nullptr) {
    uint8_t* const behind = claim.entry->memory + layout.data.bytes;
    scratch->handle = request.handle_out = reinterpret_cast<int32_t*>(behind + layout.device.offset[4]);
    scratch->ok = reinterpret_cast<bool*>(behind + layout.device.offset[5]);
    scratch->gathered = claim.entry->gathered;
  }
  return EnqueueFetch(fetch, request, *claim.entry, {claim.number, claim.sequence, owner_}, stream);
}

StagingFault DeviceStaging::EnqueueFetch(FetchRequest& request, const StagingRequest& staging, Entry& entry,
                                         const StagingHandle& handle, cudaStream_t stream) {
  const FetchLayout layout(request.call);
  const StagingLayout& data = layout.data;
  const int64_t rows = request.call.gather.rows;
  const uint32_t number = ++entry.fetches;
  const auto here = [&](size_t i) { return entry.memory + data.bytes + layout.device.offset[i]; };
  const auto there = [&](size_t i) { return entry.host + layout.host.offset[i]; };
  const auto ids = [](uint8_t* at) { return reinterpret_cast<int32_t*>(at); };
  const auto stamps = [](uint8_t* at) { return reinterpret_cast<uint32_t*>(at); };
  uint8_t* const brought = entry.host + layout.host.bytes;

  // The fetch that is dropped may still be on its way.
  cudaError_t error = cudaStreamWaitEvent(stream, entry.gathered, 0);
  if (error != cudaSuccess) return {error, "waiting for the fetch before"};
  GatherCall own = request.call.gather;  // by this GPU
  const StagingStart start{handle,
                           {handle.sequence, 0, data.bytes, entry.memory},
                           rows,
                           {own.slot, own.anchor, own.length},
                           {ids(here(0)), ids(here(1)), ids(here(2))},
                           staging.ticket,
                           staging.ticket_out,
                           staging.handle_out};
  const std::vector<GpuShard> shards = request.call.gpu.shards;
  FetchIds asked{rows,
                 own.slots,
                 static_cast<int32_t>(shards.size()),
                 {},
                 {},
                 {own.slot, own.anchor, own.length, request.call.shard},
                 request.call.generation,
                 ids(here(0)),
                 {ids(there(1)), ids(there(2)), ids(there(3)), ids(there(4))},
                 stamps(there(5)),
                 stamps(there(6)),
                 stamps(there(7))};
  for (size_t i = 0; i < shards.size(); ++i) asked.shard[i] = shards[i].shard, asked.stamp[i] = shards[i].stamp;
  error = LaunchStagingStart(start, stream);
  if (error == cudaSuccess) error = LaunchFetchIds(asked, stream);
  if (error == cudaSuccess) error = cudaEventRecord(entry.copied, stream);
  if (error == cudaSuccess) error = cudaStreamWaitEvent(entry.stream, entry.copied, 0);
  if (error != cudaSuccess) return {error, "copying the rows' numbers"};

  // What writes the shards of other GPUs runs there, and does not look at this one's flights. Without operands any of
  // them may be this one's.
  const bool known = own.columns[0].table != nullptr;
  FlightSet tables;
  for (size_t i = 0; i < shards.size() && (i == 0 || !known); ++i) {
    for (const uint8_t* const table : shards[i].tables) tables.Add(table);
  }
  FetchCall& call = request.call;  // by the host
  call.gather.slot = asked.id_out[0], call.gather.anchor = asked.id_out[1], call.gather.length = asked.id_out[2];
  call.shard = asked.id_out[3];
  if (call.generation != nullptr) call.generation = asked.generation_out;
  call.gpu.before = asked.before, call.gpu.after = asked.after, call.gpu.take = there(8);
  std::vector<uint8_t*> places;
  for (const int64_t offset : data.offset) places.push_back(brought + offset);
  PlaceParts(call, places);
  auto travelling = std::make_unique<Travelling>();
  travelling->fetch = std::make_shared<Fetch>(std::move(call), std::move(request.reader), request.counters);
  travelling->ended = std::move(request.ended);
  travelling->word = stamps(there(0));
  travelling->number = number;
  error = cudaLaunchHostFunc(entry.stream, Begin, travelling.get());
  if (error != cudaSuccess) return {error, "asking for the rows"};
  Travelling* const on_its_way = travelling.release();  // End deletes it
  const auto failed = [&entry](cudaError_t error, const char* step) {
    entry.host = nullptr;  // what was asked for comes all the same: nobody may use this memory any more
    entry.host_capacity = 0;
    return StagingFault{error, step};
  };

  own.slot = ids(here(0)), own.anchor = ids(here(1)), own.length = ids(here(2));
  PlaceParts(own, entry.memory, data);
  for (size_t k = 0; k < own.columns.size() && shards.size() == 1; ++k) own.columns[k].table = shards[0].tables[k];
  if (shards.size() > 1) error = JoinShards(shards, stamps(here(6)), &own, entry.stream);
  if (error == cudaSuccess) error = LaunchGather(own, {kBlocks, nullptr, nullptr, nullptr}, entry.stream);
  if (error == cudaSuccess) error = LaunchFetchStamps(asked, entry.stream);
  if (error == cudaSuccess) error = LaunchFlightsFinished(tables, entry.stream);
  if (error == cudaSuccess) error = LaunchFlightsStarted(tables, stream);
  if (error == cudaSuccess) error = EnqueueHostWait(stamps(there(0)), number, entry.stream);
  if (error == cudaSuccess) error = cudaLaunchHostFunc(entry.stream, End, on_its_way);
  if (error != cudaSuccess) return failed(error, "gathering own rows");

  std::vector<TakenPart> parts;
  const std::vector<int64_t> bytes = PartBytes(own);
  for (size_t i = 0; i < bytes.size() && rows > 0; ++i) {
    const int64_t at = data.offset[i];
    parts.push_back(MakeTakenPart(entry.memory + at, brought + at, bytes[i] / rows, rows));
  }
  const auto bring = [&](uint8_t* to, const uint8_t* from) {
    return rows == 0 ? cudaSuccess : cudaMemcpyAsync(to, from, rows, cudaMemcpyHostToDevice, entry.stream);
  };
  error = bring(here(3), there(8));
  if (error == cudaSuccess) error = bring(entry.memory + data.offset.back(), brought + data.offset.back());
  if (error == cudaSuccess) error = LaunchFetchRows(parts, here(3), rows, kBlocks, entry.stream);
  if (error == cudaSuccess) error = LaunchStagingFinish(handle, {}, entry.stream);
  if (error == cudaSuccess) error = cudaEventRecord(entry.gathered, entry.stream);
  if (error != cudaSuccess) return failed(error, "copying what came");
  return {};
}

}  // namespace gear_jax
