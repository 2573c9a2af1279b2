// rdma_read and rdma_fetch on CUDA. All is enqueued; no thread waits for a peer.
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cuda/device_read.h"
#include "ffi/gather_cuda.h"
#include "ffi/gather_start_call.h"
#include "ffi/handlers.h"
#include "ffi/rdma_host.h"
#include "ffi/rdma_operands.h"
#include "ffi/staging_cuda.h"

namespace gear_jax {
namespace {

namespace ffi = xla::ffi;
using S32 = ffi::Buffer<ffi::S32>;

// The queue of fetches whose start and end are one call; users' queues count from 0.
constexpr int64_t kOneCall = -1;
constexpr int64_t kOneCallDepth = 2;

// What went wrong when the call that it concerns had been enqueued long since: the next call of the session says it.
class LateErrors {
 public:
  static LateErrors& Global() {
    static LateErrors* const errors = new LateErrors;  // CUDA's threads may outlive main
    return *errors;
  }

  void Add(int64_t session, const ffi::Error& error) {
    if (error.success()) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    errors_.emplace(session, error);  // the first
  }

  ffi::Error Take(int64_t session) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = errors_.find(session);
    if (found == errors_.end()) return ffi::Error::Success();
    ffi::Error error = std::move(found->second);
    errors_.erase(found);
    return error;
  }

 private:
  std::mutex mutex_;
  std::map<int64_t, ffi::Error> errors_;
};

ffi::Error RdmaReadCuda(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets, int64_t fields,
                        int64_t session, Int64s peers, Int64s regions, bool error_on_loss) {
  if (ffi::Error late = LateErrors::Global().Take(session); late.failure()) return late;
  auto read = ReadRdmaRead(args, rets, fields, {session, peers, regions, error_on_loss});
  if (!read) return read.error();
  const std::string sizes = std::to_string(fields) + " fields of " + std::to_string(peers.size()) + " shards";
  const cudaError_t error = cudaMemcpyAsync(read->ticket_out, read->ticket, sizeof(int32_t), cudaMemcpyDefault, stream);
  if (error != cudaSuccess) return CudaFailed("rdma_read, the ticket", sizes, error);
  const auto ended = [session, error_on_loss](const ReadRegions& ended) {
    LateErrors::Global().Add(session, CheckLoss("rdma_read", ended.lost_peers(), ended.closed(), error_on_loss));
  };
  const StagingFault fault = EnqueueRegionsRead(std::move(read->call), std::move(read->reader), ended, stream);
  return fault ? StagingFailed("rdma_read", fault, sizes, {}) : ffi::Error::Success();
}

// The rows' shards and slots on the host: for finding faults, not for speed.
ffi::Error CheckRowsOnHost(FetchCall call, cudaStream_t stream) {
  const int64_t rows = call.gather.rows;
  std::vector<int32_t> shard(rows), slot(rows);
  cudaError_t error = cudaMemcpyAsync(shard.data(), call.shard, 4 * rows, cudaMemcpyDefault, stream);
  if (error == cudaSuccess) {
    error = cudaMemcpyAsync(slot.data(), call.gather.slot, 4 * rows, cudaMemcpyDefault, stream);
  }
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
  if (error != cudaSuccess) return CudaFailed("rdma_fetch, checking rows", Sizes(call.gather), error);
  call.shard = shard.data();
  call.gather.slot = slot.data();
  return CheckRdmaRows(call);
}

// The shard whose tables are this device's operands; the number behind the last shard, if none is.
int32_t OwnShard(const RdmaFetchOperands& read) {
  const auto columns = static_cast<int32_t>(read.call.gather.columns.size());
  const auto shards = static_cast<int32_t>(read.call.shards.size());
  for (int32_t d = 0; d < shards; ++d) {
    const RdmaShard& shard = read.call.shards[d];
    if (shard.peer == read.reader->self() && read.reader->OwnRegion(shard.region + columns) == read.stamp) return d;
  }
  return shards;
}

// What both kinds of fetch begin with.
ffi::Error Start(const char* op, DeviceStaging* staging, RdmaFetchOperands& read, const RdmaAttributes& rdma,
                 bool checks, const StagingRequest& request, FetchScratch* scratch, cudaStream_t stream) {
  if (checks) {
    const ffi::Error error = CheckRowsOnHost(read.call, stream);
    if (error.failure()) return error;
  }
  read.call.gpu.shard = OwnShard(read);
  const std::string sizes = Sizes(read.call.gather);
  FetchRequest fetch;
  fetch.call = std::move(read.call);
  fetch.stamp = read.stamp;
  fetch.reader = std::move(read.reader);
  fetch.counters = &CurrentRdmaHost().counters(rdma.session);
  fetch.ended = [session = rdma.session, error_on_loss = rdma.error_on_loss](const Fetch& ended) {
    LateErrors::Global().Add(session, CheckLoss("rdma_fetch", ended.lost_peers(), ended.closed(), error_on_loss));
  };
  const StagingFault fault = staging->StartFetch(std::move(fetch), request, scratch, stream);
  return fault ? StagingFailed(op, fault, sizes, request) : ffi::Error::Success();
}

// The parts of a fetch's data as its end hands them out.
std::vector<StagedPart> Parts(const FetchCall& call) {
  std::vector<StagedPart> parts;
  for (const GatherColumn& c : call.gather.columns) parts.push_back({c.out, 0, c.pad_value, c.value_bytes});
  for (const GatherMask& m : call.gather.masks) parts.push_back({m.out});
  parts.push_back({reinterpret_cast<uint8_t*>(call.valid)});
  const std::vector<int64_t> bytes = RdmaPartBytes(call);
  for (size_t i = 0; i < parts.size(); ++i) parts[i].bytes = bytes[i];
  return parts;
}

ffi::Error RdmaFetchCuda(cudaStream_t stream, S32 slot, S32 anchor, S32 length, S32 ticket, ffi::RemainingArgs args,
                         ffi::RemainingRets rets, int64_t slots, int64_t steps, Int64s offsets, Int64s lengths,
                         Int64s anchored, Int64s pads, Int64s pad_values, int64_t lead, int64_t session, Int64s peers,
                         Int64s regions, bool error_on_loss, int64_t tries, bool any, bool checks) {
  if (ffi::Error late = LateErrors::Global().Take(session); late.failure()) return late;
  const GatherAttributes attributes{slots, steps, offsets, lengths, anchored, pads, pad_values, lead, true};
  const RdmaAttributes rdma{session, peers, regions, error_on_loss};
  auto read = ReadRdmaFetch(slot, anchor, length, args, attributes, rdma, tries, any);
  if (!read) return read.error();
  ffi::Error error = PlaceRdmaResults(read->call, rets);
  if (error.failure()) return error;
  auto ticket_out = rets.get<S32>(rets.size() - 1);
  if (!ticket_out) return ticket_out.error();
  cudaError_t none = cudaSuccess;
  DeviceStaging* const staging = DeviceStaging::Current(&none);
  const std::string sizes = Sizes(read->call.gather);
  if (staging == nullptr) return CudaFailed("rdma_fetch, finding the device", sizes, none);
  const std::vector<StagedPart> parts = Parts(read->call);
  StagingRequest request;
  request.queue = kOneCall;
  request.depth = kOneCallDepth;
  request.ticket = ticket.typed_data();
  request.ticket_out = (*ticket_out)->typed_data();
  FetchScratch scratch;
  error = Start("rdma_fetch", staging, *read, rdma, checks, request, &scratch, stream);
  if (error.failure()) return error;
  const StagingFault fault = staging->Done(scratch.handle, parts, scratch.ok, stream);
  return fault ? CudaFailed("rdma_fetch", sizes, fault.error) : ffi::Error::Success();
}

ffi::Error RdmaFetchStartCuda(cudaStream_t stream, S32 slot, S32 anchor, S32 length, S32 ticket,
                              ffi::RemainingArgs args, ffi::Result<S32> handle, ffi::Result<S32> ticket_out,
                              int64_t slots, int64_t steps, Int64s offsets, Int64s lengths, Int64s anchored,
                              Int64s pads, Int64s pad_values, int64_t lead, int64_t session, Int64s peers,
                              Int64s regions, bool error_on_loss, int64_t tries, bool any, bool checks, int64_t queue,
                              int64_t depth) {
  if (ffi::Error late = LateErrors::Global().Take(session); late.failure()) return late;
  const GatherAttributes attributes{slots, steps, offsets, lengths, anchored, pads, pad_values, lead, true};
  const RdmaAttributes rdma{session, peers, regions, error_on_loss};
  auto read = ReadRdmaFetch(slot, anchor, length, args, attributes, rdma, tries, any);
  if (!read) return read.error();
  const ffi::Error error = CheckDepth(depth);
  if (error.failure()) return error;
  cudaError_t none = cudaSuccess;
  DeviceStaging* const staging = DeviceStaging::Current(&none);
  if (staging == nullptr) return CudaFailed("rdma_fetch_start, finding the device", Sizes(read->call.gather), none);
  StagingRequest request;
  request.queue = queue;
  request.depth = depth;
  request.ticket = ticket.typed_data();
  request.ticket_out = ticket_out->typed_data();
  request.handle_out = handle->typed_data();
  return Start("rdma_fetch_start", staging, *read, rdma, checks, request, nullptr, stream);
}

ffi::Error RdmaFetchDoneCuda(cudaStream_t stream, S32 handle, ffi::RemainingArgs /*after*/, ffi::RemainingRets rets,
                             Int64s pad_values) {
  return EndOnDevice("rdma_fetch_done", ReadGatherDone(handle, rets, pad_values, "rdma_fetch_done", 1), stream);
}

}  // namespace

// Host functions are no part of a CUDA graph.
XLA_FFI_DEFINE_HANDLER_SYMBOL(gear_rdma_read_cuda, RdmaReadCuda, BindRdmaRead(ffi::Ffi::Bind().Ctx<CudaStream>()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(gear_rdma_fetch_cuda, RdmaFetchCuda, BindRdmaFetch(ffi::Ffi::Bind().Ctx<CudaStream>()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(gear_rdma_fetch_start_cuda, RdmaFetchStartCuda,
                              BindRdmaFetchStart(ffi::Ffi::Bind().Ctx<CudaStream>()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(gear_rdma_fetch_done_cuda, RdmaFetchDoneCuda,
                              BindGatherDone(ffi::Ffi::Bind().Ctx<CudaStream>()), {ffi::Traits::kCmdBufferCompatible});

}  // namespace gear_jax
