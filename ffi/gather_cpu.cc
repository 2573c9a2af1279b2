#include <memory>
#include <string>
#include <utility>

#include "ffi/addressed_gather.h"
#include "ffi/cpu.h"
#include "ffi/gather_call.h"
#include "ffi/handlers.h"

namespace gear_jax {
namespace {

namespace ffi = xla::ffi;
using S32 = ffi::Buffer<ffi::S32>;

template <bool kChecks>
ffi::Future GatherCpu(ffi::ThreadPool pool, S32 slot, S32 anchor, S32 length, S32 ticket, ffi::RemainingArgs args,
                      ffi::RemainingRets rets, int64_t slots, int64_t steps, Int64s offsets, Int64s lengths,
                      Int64s anchored, Int64s pads, Int64s pad_values, int64_t lead, bool masks, bool ordered,
                      int64_t /*blocks*/, Int64s addresses, Int64s shards) {
  const GatherAttributes attributes{slots,      steps, offsets, lengths,   anchored, pads,
                                    pad_values, lead,  masks,   addresses, shards};
  auto read = ReadGather(slot, anchor, length, ticket, args, rets, attributes, ordered);
  if (!read) return Failed(read.error());
  read->ticket_out[0] = read->ticket[0];
  if (kChecks) {
    ffi::Error error = CheckGather(read->call);
    if (error.failure()) return Failed(error);
  }
  std::shared_ptr<Gather> gather;
  if (IsAddressed(read->call)) {
    Leases leases;
    const std::string fault = FindTables(MemoryRegistry::Global(), read->call, leases);
    if (!fault.empty()) return Failed(ffi::Error(ffi::ErrorCode::kInvalidArgument, fault));
    gather = std::make_shared<AddressedGather>(std::move(read->call), std::move(leases));
  } else {
    gather = std::make_shared<Gather>(std::move(read->call));
  }
  const int64_t bytes = gather->Prepare(pool.num_threads());
  return Spread(pool, std::move(gather), bytes);
}

// The same: a CPU has no copy engines.
template <bool kChecks>
ffi::Future GatherEngineCpu(ffi::ThreadPool pool, S32 slot, S32 anchor, S32 length, S32 ticket, ffi::RemainingArgs args,
                            ffi::RemainingRets rets, int64_t slots, int64_t steps, Int64s offsets, Int64s lengths,
                            Int64s anchored, Int64s pads, Int64s pad_values, int64_t lead, bool masks, bool ordered,
                            int64_t blocks, Int64s /*copied*/) {
  return GatherCpu<kChecks>(pool, slot, anchor, length, ticket, args, rets, slots, steps, offsets, lengths, anchored,
                            pads, pad_values, lead, masks, ordered, blocks, {}, {});
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(gear_gather_cpu, GatherCpu<false>, BindGather(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(gear_gather_checked_cpu, GatherCpu<true>,
                              BindGather(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()));

XLA_FFI_DEFINE_HANDLER_SYMBOL(gear_gather_engine_cpu, GatherEngineCpu<false>,
                              BindGatherEngine(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(gear_gather_engine_checked_cpu, GatherEngineCpu<true>,
                              BindGatherEngine(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()));

}  // namespace gear_jax
