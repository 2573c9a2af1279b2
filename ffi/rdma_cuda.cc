// rdma_read and rdma_fetch on CUDA. All is enqueued; no thread waits for a peer.
#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cuda/device_read.h"
#include "cuda/fetch_device.h"
#include "cuda/pointers_kernels.h"
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

// Losses that were met when the calls that they concern had been enqueued long since. The session's next call that is
// to fail for losses says it.
class LateLosses {
 public:
  static LateLosses& Global() {
    static LateLosses* const losses = new LateLosses;  // CUDA's threads may outlive main
    return *losses;
  }

  void Add(int64_t session, const std::weak_ptr<transport::Reader>& reader, const std::vector<int32_t>& lost) {
    const std::lock_guard<std::mutex> lock(mutex_);
    losses_[session] = {reader, lost};
  }

  // Those of this reader: a number may be a later session's by now.
  std::vector<int32_t> Take(int64_t session, const std::shared_ptr<transport::Reader>& reader) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = losses_.find(session);
    if (found == losses_.end()) return {};
    std::vector<int32_t> lost =
        found->second.reader.lock() == reader ? std::move(found->second.lost) : std::vector<int32_t>{};
    losses_.erase(found);
    return lost;
  }

 private:
  struct Losses {
    std::weak_ptr<transport::Reader> reader;
    std::vector<int32_t> lost;
  };

  std::mutex mutex_;
  std::map<int64_t, Losses> losses_;
};

// The error for what is lost as the call is enqueued, or was late in an earlier one; success where losses are none.
ffi::Error CheckKnownLosses(const char* op, int64_t session, const std::shared_ptr<transport::Reader>& reader,
                            const std::vector<RdmaShard>& shards, bool error_on_loss) {
  if (!error_on_loss) return ffi::Error::Success();
  std::vector<int32_t> lost = LateLosses::Global().Take(session, reader);
  for (const RdmaShard& shard : shards) {
    const bool known = std::find(lost.begin(), lost.end(), shard.peer) != lost.end();
    if (!known && shard.peer != reader->self() && !reader->Alive(shard.peer)) lost.push_back(shard.peer);
  }
  return CheckLoss(op, lost, false, true);
}

// What a call does with the losses that it meets. One that the end of the session has cut short has met none.
template <typename Ended>
std::function<void(const Ended&)> NoteLosses(int64_t session, const std::shared_ptr<transport::Reader>& reader,
                                             bool error_on_loss) {
  return [=, reader = std::weak_ptr<transport::Reader>(reader)](const Ended& ended) {
    if (!error_on_loss || ended.closed() || ended.lost_peers().empty()) return;
    LateLosses::Global().Add(session, reader, ended.lost_peers());
  };
}

ffi::Error RdmaReadCuda(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets, int64_t fields,
                        bool exposed, int64_t session, Int64s peers, Int64s regions, bool error_on_loss) {
  auto read = ReadRdmaRead(args, rets, fields, exposed, {session, peers, regions, error_on_loss});
  if (!read) return read.error();
  ffi::Error loss = CheckKnownLosses("rdma_read", session, read->reader, read->call.shards, error_on_loss);
  if (loss.failure()) return loss;
  const std::string sizes = std::to_string(fields) + " fields of " + std::to_string(peers.size()) + " shards";
  const cudaError_t error = cudaMemcpyAsync(read->ticket_out, read->ticket, sizeof(int32_t), cudaMemcpyDefault, stream);
  if (error != cudaSuccess) return CudaFailed("rdma_read, the ticket", sizes, error);
  auto ended = NoteLosses<ReadRegions>(session, read->reader, error_on_loss);
  const StagingFault fault =
      EnqueueRegionsRead(std::move(read->call), std::move(read->reader), std::move(ended), stream);
  return fault ? StagingFailed("rdma_read", fault, sizes) : ffi::Error::Success();
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

// A shard of this process, from its regions.
GpuShard OwnShard(const RdmaFetchOperands& read, int32_t d) {
  const size_t columns = read.call.gather.columns.size();
  const int32_t first = read.call.shards[d].region;
  GpuShard own{d, {}, static_cast<const uint32_t*>(read.reader->OwnRegion(first + static_cast<int32_t>(columns)))};
  for (size_t k = 0; k < columns; ++k) {
    own.tables.push_back(static_cast<const uint8_t*>(read.reader->OwnRegion(first + static_cast<int32_t>(k))));
  }
  return own;
}

// Whether every GPU of the process reads a shard where it is, and a gather of several takes it for one of them.
bool GpusRead(const GpuShard& shard) {
  const auto is = [](const void* at, int64_t multiple) {
    bool read = false;
    const bool asked = reinterpret_cast<uintptr_t>(at) % multiple == 0 && IsReadByAll(at, &read) == cudaSuccess;
    return asked && read;
  };
  return is(shard.stamp, 1) && std::all_of(shard.tables.begin(), shard.tables.end(),
                                           [&](const void* at) { return is(at, kPointerAlignment); });
}

// The shards of this process that this device gathers rows of: that of its own operands, and those of other GPUs, if
// all of them can be read as one. Without operands all of the process are alike.
std::vector<GpuShard> OwnShards(const RdmaFetchOperands& read) {
  std::vector<GpuShard> own, others;
  for (size_t d = 0; d < read.call.shards.size(); ++d) {
    if (read.call.shards[d].peer != read.reader->self()) continue;
    GpuShard shard = OwnShard(read, static_cast<int32_t>(d));
    (shard.stamp == read.stamp ? own : others).push_back(std::move(shard));
  }
  if (read.stamp == nullptr && !others.empty()) {
    own = {others[0]};
    others.erase(others.begin());
    if (!GpusRead(own[0])) return {};
  }
  own.resize(std::min<size_t>(own.size(), 1));  // tables of no bytes are all alike
  if (own.empty() || !GpusRead(own[0])) return own;
  for (GpuShard& shard : others) {
    // Slots of all of them have numbers in one.
    const auto shards = static_cast<int64_t>(own.size()) + 1;
    if (shards > kGpuShards || shards * read.call.gather.slots > INT32_MAX) break;
    if (GpusRead(shard)) own.push_back(std::move(shard));
  }
  return own;
}

// What both kinds of fetch begin with: the checks, and what is to be asked for.
ffi::Error ReadFetch(RdmaFetchOperands& read, const RdmaAttributes& rdma, bool checks, cudaStream_t stream,
                     FetchRequest* fetch) {
  ffi::Error error = CheckKnownLosses("rdma_fetch", rdma.session, read.reader, read.call.shards, rdma.error_on_loss);
  if (error.success() && checks) error = CheckRowsOnHost(read.call, stream);
  if (error.failure()) return error;
  read.call.gpu.shards = OwnShards(read);
  fetch->call = std::move(read.call);
  fetch->ended = NoteLosses<Fetch>(rdma.session, read.reader, rdma.error_on_loss);
  fetch->reader = std::move(read.reader);
  fetch->counters = &CurrentRdmaHost().counters(rdma.session);
  return ffi::Error::Success();
}

// The parts of a fetch's data as its end hands them out.
std::vector<StagedPart> Parts(const FetchCall& call) {
  std::vector<StagedPart> parts;
  for (const GatherColumn& c : call.gather.columns) parts.push_back({c.out, 0, c.pad_value, c.value_bytes});
  for (const GatherMask& m : call.gather.masks) parts.push_back({m.out});
  parts.push_back({reinterpret_cast<uint8_t*>(call.valid)});
  const std::vector<int64_t> bytes = PartBytes(call);
  for (size_t i = 0; i < parts.size(); ++i) parts[i].bytes = bytes[i];
  return parts;
}

ffi::Error RdmaFetchCuda(cudaStream_t stream, S32 slot, S32 anchor, S32 length, S32 ticket, ffi::RemainingArgs args,
                         ffi::RemainingRets rets, int64_t slots, int64_t steps, Int64s offsets, Int64s lengths,
                         Int64s anchored, Int64s pads, Int64s pad_values, int64_t lead, Int64s layouts, int64_t session,
                         Int64s peers, Int64s regions, bool error_on_loss, int64_t tries, bool any, bool checks) {
  const GatherAttributes attributes{slots,      steps, offsets, lengths, anchored, pads,
                                    pad_values, lead,  true,    {},      {},       layouts};
  const RdmaAttributes rdma{session, peers, regions, error_on_loss};
  auto read = ReadRdmaFetch(slot, anchor, length, args, attributes, rdma, tries, any);
  if (!read) return read.error();
  ffi::Error error = PlaceRdmaResults(read->call, rets);
  if (error.failure()) return error;
  auto ticket_out = rets.get<S32>(rets.size() - 1);
  if (!ticket_out) return ticket_out.error();
  const std::vector<StagedPart> parts = Parts(read->call);
  const std::string sizes = Sizes(read->call.gather);
  FetchRequest fetch;
  error = ReadFetch(*read, rdma, checks, stream, &fetch);
  if (error.failure()) return error;
  StagingRequest request;
  request.queue = kOneCall;
  request.depth = kOneCallDepth;
  request.ticket = ticket.typed_data();
  request.ticket_out = (*ticket_out)->typed_data();
  cudaError_t cuda = cudaSuccess;
  if (fetch.call.gather.rows == 0) {  // asked for its checks alone, by each insertion
    cuda = cudaMemcpyAsync(request.ticket_out, request.ticket, sizeof(int32_t), cudaMemcpyDefault, stream);
    return cuda == cudaSuccess ? ffi::Error::Success() : CudaFailed("rdma_fetch, the ticket", sizes, cuda);
  }
  DeviceStaging* const staging = DeviceStaging::Current(&cuda);
  if (staging == nullptr) return CudaFailed("rdma_fetch, finding the device", sizes, cuda);
  const StagingFault fault = staging->WholeFetch(std::move(fetch), request, parts, stream);
  return fault ? StagingFailed("rdma_fetch", fault, sizes) : ffi::Error::Success();
}

ffi::Error RdmaFetchStartCuda(cudaStream_t stream, S32 slot, S32 anchor, S32 length, S32 ticket,
                              ffi::RemainingArgs args, ffi::Result<S32> handle, ffi::Result<S32> ticket_out,
                              int64_t slots, int64_t steps, Int64s offsets, Int64s lengths, Int64s anchored,
                              Int64s pads, Int64s pad_values, int64_t lead, Int64s layouts, int64_t session,
                              Int64s peers, Int64s regions, bool error_on_loss, int64_t tries, bool any, bool checks,
                              int64_t queue, int64_t depth) {
  const GatherAttributes attributes{slots,      steps, offsets, lengths, anchored, pads,
                                    pad_values, lead,  true,    {},      {},       layouts};
  const RdmaAttributes rdma{session, peers, regions, error_on_loss};
  auto read = ReadRdmaFetch(slot, anchor, length, args, attributes, rdma, tries, any);
  if (!read) return read.error();
  const std::string sizes = Sizes(read->call.gather);
  FetchRequest fetch;
  ffi::Error error = CheckDepth("rdma_fetch_start", depth);
  if (error.success()) error = ReadFetch(*read, rdma, checks, stream, &fetch);
  if (error.failure()) return error;
  cudaError_t none = cudaSuccess;
  DeviceStaging* const staging = DeviceStaging::Current(&none);
  if (staging == nullptr) return CudaFailed("rdma_fetch_start, finding the device", sizes, none);
  StagingRequest request;
  request.queue = queue;
  request.depth = depth;
  request.ticket = ticket.typed_data();
  request.ticket_out = ticket_out->typed_data();
  request.handle_out = handle->typed_data();
  const StagingFault fault = staging->StartFetch(std::move(fetch), request, stream);
  return fault ? StagingFailed("rdma_fetch_start", fault, sizes, queue, depth) : ffi::Error::Success();
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
