// rdma_read and rdma_fetch on the CPU. No thread of XLA's pool waits for a peer: the future is there when the reader
// says so, on a thread of its own.
#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ffi/completions.h"
#include "ffi/cpu.h"
#include "ffi/handlers.h"
#include "ffi/rdma_flights.h"
#include "ffi/rdma_operands.h"

namespace gear_jax {
namespace {

namespace ffi = xla::ffi;
using S32 = ffi::Buffer<ffi::S32>;
using U32 = ffi::Buffer<ffi::U32>;

void Settle(ffi::Promise promise, const ffi::Error& error) {
  if (error.failure()) {
    promise.SetError(error);
  } else {
    promise.SetAvailable();
  }
}

// Operands: the fields, the ticket, then buffers that are only waited for. Results: the fields of all shards, which
// shards are there, and the ticket.
ffi::Future RdmaReadCpu(ffi::RemainingArgs args, ffi::RemainingRets rets, int64_t fields, int64_t session, Int64s peers,
                        Int64s regions, bool error_on_loss) {
  auto found = FindShards("rdma_read", {session, peers, regions, error_on_loss});
  if (!found) return Failed(found.error());
  const auto& [reader, shards] = *found;
  const auto k = static_cast<size_t>(fields);
  const auto broken = [](const std::string& what) {
    return Failed(InvalidArgument("gear_rdma_read: " + what, "another", "that of the fields",
                                  "Call gear_jax.ops.rdma_read, which prepares the operands."));
  };
  if (args.size() < k + 1 || rets.size() != k + 2) return broken("number of operands");
  RegionsCall call;
  call.shards = shards;
  for (size_t i = 0; i < k; ++i) {
    auto field = args.get<ffi::AnyBuffer>(i);
    auto out = rets.get<ffi::AnyBuffer>(i);
    if (!field) return Failed(field.error());
    if (!out) return Failed(out.error());
    const size_t bytes = field->size_bytes();
    if ((*out)->size_bytes() != bytes * shards.size()) return broken("bytes of a result");
    call.fields.push_back({static_cast<uint8_t*>((*out)->untyped_data()), static_cast<int64_t>(bytes)});
    if (bytes == 0) continue;
    const std::string fault = CheckOwnRegion(*reader, shards, static_cast<int32_t>(i), field->untyped_data());
    if (!fault.empty()) return Failed(ffi::Error(ffi::ErrorCode::kFailedPrecondition, "rdma_read: " + fault));
  }
  auto here = rets.get<ffi::Buffer<ffi::PRED>>(k);
  auto ticket = args.get<S32>(k);
  auto ticket_out = rets.get<S32>(k + 1);
  if (!here) return Failed(here.error());
  if (!ticket) return Failed(ticket.error());
  if (!ticket_out) return Failed(ticket_out.error());
  if ((*here)->element_count() != shards.size()) return broken("number of shards");
  call.here = reinterpret_cast<bool*>((*here)->typed_data());
  (*ticket_out)->typed_data()[0] = ticket->typed_data()[0];

  auto read = std::make_shared<ReadRegions>(std::move(call), reader);
  const std::string fault = read->Check();
  if (!fault.empty()) return Failed(ffi::Error(ffi::ErrorCode::kInvalidArgument, "rdma_read: " + fault));
  ffi::Promise promise;
  ffi::Future future(promise);
  bool travels = false;  // until Start has returned, `ended` may only run here
  for (const RdmaShard& shard : shards) travels = travels || shard.peer != reader->self();
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
                         Int64s anchored, Int64s pads, Int64s pad_values, int64_t lead, int64_t session, Int64s peers,
                         Int64s regions, bool error_on_loss, int64_t tries, bool any, bool checks) {
  const GatherAttributes attributes{slots, steps, offsets, lengths, anchored, pads, pad_values, lead, true};
  auto read = ReadRdmaFetch(slot, anchor, length, args, attributes, {session, peers, regions, error_on_loss}, tries,
                            any, checks);
  if (!read) return Failed(read.error());
  ffi::Error error = PlaceRdmaResults(read->call, rets);
  if (error.failure()) return Failed(error);
  auto ticket_out = rets.get<S32>(rets.size() - 1);
  if (!ticket_out) return Failed(ticket_out.error());
  (*ticket_out)->typed_data()[0] = ticket.typed_data()[0];

  auto fetch = std::make_shared<Fetch>(std::move(read->call), read->reader, &RdmaCountersOf(session));
  const std::string fault = fetch->Prepare(pool.num_threads());
  if (!fault.empty()) return Failed(ffi::Error(ffi::ErrorCode::kInvalidArgument, "rdma_fetch: " + fault));
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
                              Int64s pads, Int64s pad_values, int64_t lead, int64_t session, Int64s peers,
                              Int64s regions, bool error_on_loss, int64_t tries, bool any, bool checks, int64_t queue,
                              int64_t depth) {
  const GatherAttributes attributes{slots, steps, offsets, lengths, anchored, pads, pad_values, lead, true};
  auto read = ReadRdmaFetch(slot, anchor, length, args, attributes, {session, peers, regions, error_on_loss}, tries,
                            any, checks);
  if (!read) return Failed(read.error());
  auto flight = std::make_shared<FetchFlight>(std::move(read->call), RdmaPartBytes(read->call), error_on_loss);
  auto fetch = std::make_shared<Fetch>(flight->call(), read->reader, &RdmaCountersOf(session));
  const std::string fault = fetch->Prepare(pool.num_threads());
  if (!fault.empty()) return Failed(ffi::Error(ffi::ErrorCode::kInvalidArgument, "rdma_fetch_start: " + fault));
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

// Results: the columns' data, a mask for each, which rows are valid, and whether the handle was good, bool[1].
ffi::Future RdmaFetchDoneCpu(int32_t device, S32 handle, ffi::RemainingArgs /*after*/, ffi::RemainingRets rets,
                             Int64s pad_values) {
  if (rets.size() != pad_values.size() + 2) {  // two for each column, as there are two words of its padding
    return Failed(InvalidArgument("gear_rdma_fetch_done: results", rets.size(), pad_values.size() + 2,
                                  "Call gear_jax.ops.rdma_fetch_done, which prepares the operands."));
  }
  std::vector<FlightPart> parts;
  const size_t columns = pad_values.size() / 2;
  for (size_t i = 0; i + 1 < rets.size(); ++i) {
    auto out = rets.get<ffi::AnyBuffer>(i);
    if (!out) return Failed(out.error());
    FlightPart part{static_cast<uint8_t*>((*out)->untyped_data()), static_cast<int64_t>((*out)->size_bytes()), {}};
    part.pad.value_bytes = ffi::ByteWidth((*out)->element_type());
    if (i < columns) std::memcpy(part.pad.pad_value.data(), &pad_values[2 * i], 16);
    parts.push_back(part);
  }
  auto ok = rets.get<ffi::Buffer<ffi::PRED>>(rets.size() - 1);
  if (!ok) return Failed(ok.error());
  auto flight = FetchFlights::Global().Take(StagingHandle::Read(handle.typed_data()), device, parts);
  (*ok)->typed_data()[0] = flight != nullptr;
  ffi::Promise promise;
  ffi::Future future(promise);
  if (flight == nullptr) {
    for (const FlightPart& part : parts) FillPad(part.pad, part.out, part.bytes);
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

XLA_FFI_DEFINE_HANDLER_SYMBOL(gear_rdma_read_cpu, RdmaReadCpu,
                              BindRdmaShards(ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attr<int64_t>("fields")));
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    gear_rdma_fetch_cpu, RdmaFetchCpu,
    BindRdmaFetchAttributes(BindGatherOperands(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()).RemainingRets()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    gear_rdma_fetch_start_cpu, RdmaFetchStartCpu,
    BindRdmaFetchAttributes(
        BindGatherOperands(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Ctx<ffi::DeviceOrdinal>()).Ret<S32>().Ret<S32>())
        .Attr<int64_t>("queue")
        .Attr<int64_t>("depth"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    gear_rdma_fetch_done_cpu, RdmaFetchDoneCpu,
    ffi::Ffi::Bind().Ctx<ffi::DeviceOrdinal>().Arg<S32>().RemainingArgs().RemainingRets().Attr<Int64s>("pad_values"));

}  // namespace gear_jax
