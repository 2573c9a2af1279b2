// rdma_read and rdma_fetch on the CPU. No thread of XLA's pool waits for a peer: the future is there when the reader
// says so, on a thread of its own.
#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "ffi/completions.h"
#include "ffi/cpu.h"
#include "ffi/gather_start_call.h"
#include "ffi/handlers.h"
#include "ffi/rdma_flights.h"
#include "ffi/rdma_host.h"
#include "ffi/rdma_operands.h"

namespace gear_jax {
namespace {

namespace ffi = xla::ffi;
using S32 = ffi::Buffer<ffi::S32>;

void Settle(ffi::Promise promise, const ffi::Error& error) {
  if (error.failure()) {
    promise.SetError(error);
  } else {
    promise.SetAvailable();
  }
}

ffi::Future RdmaReadCpu(ffi::RemainingArgs args, ffi::RemainingRets rets, int64_t fields, bool exposed, int64_t session,
                        Int64s peers, Int64s regions, bool error_on_loss) {
  auto operands = ReadRdmaRead(args, rets, fields, exposed, {session, peers, regions, error_on_loss});
  if (!operands) return Failed(operands.error());
  operands->ticket_out[0] = operands->ticket[0];
  const auto& reader = operands->reader;
  bool travels = false;  // until Start has returned, `ended` may only run here
  for (const RdmaShard& shard : operands->call.shards) travels = travels || shard.peer != reader->self();
  auto read = std::make_shared<ReadRegions>(std::move(operands->call), reader);
  ffi::Promise promise;
  ffi::Future future(promise);
  auto settle = [read, promise, error_on_loss]() mutable {
    Settle(std::move(promise), CheckLoss("rdma_read", read->lost_peers(), read->closed(), error_on_loss));
  };
  if (travels) {
    read->Start([settle]() { Completions::Global().Run(settle); });
  } else {
    read->Start(settle);
  }
  return future;
}

ffi::Error Finished(Fetch& fetch, bool error_on_loss) {
  fetch.Finish();
  return CheckLoss("rdma_fetch", fetch.lost_peers(), fetch.closed(), error_on_loss);
}

// Has the pool help with a fetch's tasks, this thread among them.
void Help(ffi::ThreadPool& pool, const std::shared_ptr<Fetch>& fetch) {
  const int64_t helpers = fetch->bytes() < kInlineBytes ? 0 : std::min(pool.num_threads(), fetch->size()) - 1;
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([fetch] { fetch->Drain(); });
  fetch->Drain();
}

ffi::Future RdmaFetchCpu(ffi::ThreadPool pool, S32 slot, S32 anchor, S32 length, S32 ticket, ffi::RemainingArgs args,
                         ffi::RemainingRets rets, int64_t slots, int64_t steps, Int64s offsets, Int64s lengths,
                         Int64s anchored, Int64s pads, Int64s pad_values, int64_t lead, Int64s layouts, int64_t session,
                         Int64s peers, Int64s regions, bool error_on_loss, int64_t tries, bool any, bool checks) {
  const GatherAttributes attributes{slots,      steps, offsets, lengths, anchored, pads,
                                    pad_values, lead,  true,    {},      {},       layouts};
  auto read =
      ReadRdmaFetch(slot, anchor, length, args, attributes, {session, peers, regions, error_on_loss}, tries, any);
  if (!read) return Failed(read.error());
  ffi::Error error = checks ? CheckRdmaRows(read->call) : ffi::Error::Success();
  if (error.success()) error = PlaceRdmaResults(read->call, rets);
  if (error.failure()) return Failed(error);
  auto ticket_out = rets.get<S32>(rets.size() - 1);
  if (!ticket_out) return Failed(ticket_out.error());
  (*ticket_out)->typed_data()[0] = ticket.typed_data()[0];

  auto fetch = std::make_shared<Fetch>(std::move(read->call), read->reader, &CurrentRdmaHost().counters(session));
  fetch->Prepare(pool.num_threads());
  ffi::Promise promise;
  ffi::Future future(promise);
  auto settle = [fetch, promise, error_on_loss]() mutable {
    Settle(std::move(promise), Finished(*fetch, error_on_loss));
  };
  if (fetch->travels()) {
    fetch->Start([settle]() { Completions::Global().Run(settle); });
  } else {
    fetch->Start(settle);
  }
  Help(pool, fetch);
  return future;
}

// The future is there when this process's own rows have been read; the others go on travelling.
ffi::Future RdmaFetchStartCpu(ffi::ThreadPool pool, int32_t device, S32 slot, S32 anchor, S32 length, S32 ticket,
                              ffi::RemainingArgs args, ffi::Result<S32> handle, ffi::Result<S32> ticket_out,
                              int64_t slots, int64_t steps, Int64s offsets, Int64s lengths, Int64s anchored,
                              Int64s pads, Int64s pad_values, int64_t lead, Int64s layouts, int64_t session,
                              Int64s peers, Int64s regions, bool error_on_loss, int64_t tries, bool any, bool checks,
                              int64_t queue, int64_t depth) {
  const GatherAttributes attributes{slots,      steps, offsets, lengths, anchored, pads,
                                    pad_values, lead,  true,    {},      {},       layouts};
  auto read =
      ReadRdmaFetch(slot, anchor, length, args, attributes, {session, peers, regions, error_on_loss}, tries, any);
  if (!read) return Failed(read.error());
  if (const ffi::Error error = checks ? CheckRdmaRows(read->call) : ffi::Error::Success(); error.failure()) {
    return Failed(error);
  }
  auto flight = std::make_shared<FetchFlight>(std::move(read->call), error_on_loss);
  auto fetch = std::make_shared<Fetch>(flight->call(), read->reader, &CurrentRdmaHost().counters(session));
  fetch->Prepare(pool.num_threads());
  flight->Holds(fetch);
  FetchFlights::Global().Add(queue, device, depth, flight).Write(handle->typed_data());
  ticket_out->typed_data()[0] = ticket.typed_data()[0];
  fetch->Start([flight] { flight->Land(); });
  const int64_t tasks = fetch->size();
  if (tasks == 0) {
    ffi::Promise promise;
    promise.SetAvailable();
    return ffi::Future(promise);
  }
  ffi::CountDownPromise left(tasks);
  ffi::Future future(left);
  auto help = [fetch, left]() mutable {
    if (const int64_t ran = fetch->Drain()) left.CountDown(ran);
  };
  const int64_t helpers = fetch->bytes() < kInlineBytes ? 0 : std::min(pool.num_threads(), tasks) - 1;
  for (int64_t i = 0; i < helpers; ++i) {
    auto copy = help;
    pool.Schedule(std::move(copy));
  }
  help();
  return future;
}

ffi::Future RdmaFetchDoneCpu(int32_t device, S32 handle, ffi::RemainingArgs /*after*/, ffi::RemainingRets rets,
                             Int64s pad_values) {
  auto read = ReadGatherDone(handle, rets, pad_values, "rdma_fetch_done", 1);
  if (!read) return Failed(read.error());
  const std::vector<StagedPart>& parts = read->parts;
  auto flight = FetchFlights::Global().Take(StagingHandle::Read(read->handle), device, parts);
  read->ok[0] = flight != nullptr;
  ffi::Promise promise;
  ffi::Future future(promise);
  if (flight == nullptr) {
    for (const StagedPart& part : parts) {
      GatherColumn column;
      column.pad_value = part.pad_value;
      column.value_bytes = part.value_bytes;
      FillPad(column, part.out, part.bytes);
    }
    promise.SetAvailable();
    return future;
  }
  auto settle = [flight, parts, promise]() mutable {
    const ffi::Error error = Finished(flight->fetch(), flight->error_on_loss());
    flight->CopyOut(parts);
    Settle(std::move(promise), error);
  };
  if (!flight->WhenLanded([settle]() { Completions::Global().Run(settle); })) settle();
  return future;
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(gear_rdma_read_cpu, RdmaReadCpu, BindRdmaRead(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(gear_rdma_fetch_cpu, RdmaFetchCpu,
                              BindRdmaFetch(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(gear_rdma_fetch_start_cpu, RdmaFetchStartCpu,
                              BindRdmaFetchStart(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Ctx<ffi::DeviceOrdinal>()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(gear_rdma_fetch_done_cpu, RdmaFetchDoneCpu,
                              BindGatherDone(ffi::Ffi::Bind().Ctx<ffi::DeviceOrdinal>()));

}  // namespace gear_jax
