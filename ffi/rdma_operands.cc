#include "ffi/rdma_operands.h"

#include <algorithm>
#include <sstream>

#include "ffi/rdma_host.h"

namespace gear_jax {
namespace {

namespace ffi = xla::ffi;

constexpr char kInternal[] = "Call gear_jax.ops.rdma_fetch, which prepares the operands.";

template <typename Got, typename Wanted>
ffi::Unexpected<ffi::Error> Mismatch(const std::string& what, const Got& got, const Wanted& wanted) {
  return ffi::Unexpected(InvalidArgument("gear_rdma_fetch: " + what, got, wanted, kInternal));
}

}  // namespace

ffi::Error CheckRdmaRows(const FetchCall& call) {
  const int64_t row = FirstBadRow(call);
  if (row < 0) return ffi::Error::Success();
  std::ostringstream got, wanted;
  got << "shard " << call.shard[row] << ", slot " << call.gather.slot[row];
  wanted << "-1, or a shard in [0, " << call.shards.size() << ") and a slot in [0, " << call.gather.slots << ")";
  return InvalidArgument("rdma_fetch: row " + std::to_string(row), got.str(), wanted.str(),
                         "Pass rows of the tables, or unset GEAR_JAX_CHECKS to get padding there.");
}

ffi::ErrorOr<std::pair<std::shared_ptr<transport::Reader>, std::vector<RdmaShard>>> FindShards(
    const char* op, const RdmaAttributes& attributes) {
  auto reader = CurrentRdmaHost().find(attributes.session);
  if (reader == nullptr) {
    std::ostringstream got;
    got << "number " << attributes.session << ", which is no open session of this process";
    return ffi::Unexpected(InvalidArgument(std::string(op) + ": session", got.str(), "an open one",
                                           "Call replay.connect(state), or open a gear_jax.transport.Session."));
  }
  std::vector<RdmaShard> shards;
  if (attributes.peers.size() != attributes.regions.size()) {
    return ffi::Unexpected(InvalidArgument(std::string(op) + ": regions", attributes.regions.size(),
                                           attributes.peers.size(), "Give one for each peer."));
  }
  for (size_t d = 0; d < attributes.peers.size(); ++d) {
    shards.push_back({static_cast<int32_t>(attributes.peers[d]), static_cast<int32_t>(attributes.regions[d])});
  }
  return std::make_pair(std::move(reader), std::move(shards));
}

ffi::Error CheckLoss(const char* op, const std::vector<int32_t>& lost, bool closed, bool error_on_loss) {
  if (closed) {
    return ffi::Error(ffi::ErrorCode::kCancelled, std::string(op) + ": session: got one that was closed meanwhile, " +
                                                      "wanted an open one. Close it when no program runs any more.");
  }
  if (lost.empty() || !error_on_loss) return ffi::Error::Success();
  std::vector<int32_t> sorted(lost);
  std::sort(sorted.begin(), sorted.end());
  std::ostringstream text;
  text << op << ": got no answer from process(es)";
  for (const int32_t peer : sorted) text << ' ' << peer;
  text << " within the deadline, wanted one from each. Restart them, or use on_loss=\"invalid\" to go on without them.";
  return ffi::Error(ffi::ErrorCode::kUnavailable, text.str());
}

ffi::ErrorOr<RdmaFetchOperands> ReadRdmaFetch(ffi::Buffer<ffi::S32> slot, ffi::Buffer<ffi::S32> anchor,
                                              ffi::Buffer<ffi::S32> length, ffi::RemainingArgs args,
                                              const GatherAttributes& attributes, const RdmaAttributes& rdma,
                                              int64_t tries, bool any) {
  auto found = FindShards("rdma_fetch", rdma);
  if (!found) return ffi::Unexpected(found.error());
  auto tables = ReadGatherTables(slot, anchor, length, args, attributes);
  if (!tables) return ffi::Unexpected(tables.error());
  RdmaFetchOperands read;
  read.reader = std::move(found->first);
  FetchCall& call = read.call;
  call.shards = std::move(found->second);
  call.gather = std::move(*tables);
  call.tries = tries;
  const size_t columns = call.gather.columns.size();
  const size_t own = attributes.layouts.size() == 0 ? columns + 1 : 0;
  if (args.size() < own + 2) return Mismatch("operands, at least", args.size(), own + 2);
  auto shard = args.get<ffi::Buffer<ffi::S32>>(own);
  auto generation = args.get<ffi::Buffer<ffi::U32>>(own + 1);
  if (!shard) return ffi::Unexpected(shard.error());
  if (!generation) return ffi::Unexpected(generation.error());
  const auto rows = static_cast<size_t>(call.gather.rows);
  if (shard->element_count() != rows) return Mismatch("shards", shard->element_count(), rows);
  if (!any && generation->element_count() != rows) return Mismatch("generations", generation->element_count(), rows);
  call.shard = shard->typed_data();
  call.generation = any ? nullptr : generation->typed_data();
  read.stamp = nullptr;
  if (own > 0) {
    auto stamp = args.get<ffi::Buffer<ffi::U32>>(columns);
    if (!stamp) return ffi::Unexpected(stamp.error());
    read.stamp = stamp->typed_data();
  }
  for (size_t k = 0; k < own; ++k) {
    const bool bytes = k == columns || call.gather.columns[k].step_bytes > 0;
    if (!bytes || call.gather.slots * call.gather.steps == 0) continue;
    const void* data = k == columns ? read.stamp : static_cast<const void*>(call.gather.columns[k].table);
    const std::string fault = CheckOwnRegion(*read.reader, call.shards, static_cast<int32_t>(k), data);
    if (!fault.empty()) {
      return ffi::Unexpected(ffi::Error(ffi::ErrorCode::kFailedPrecondition, "rdma_fetch: " + fault));
    }
  }
  const std::string fault = CheckRegions(call, *read.reader);
  if (!fault.empty()) return ffi::Unexpected(ffi::Error(ffi::ErrorCode::kInvalidArgument, "rdma_fetch: " + fault));
  return read;
}

ffi::ErrorOr<RdmaReadOperands> ReadRdmaRead(ffi::RemainingArgs args, ffi::RemainingRets rets, int64_t fields,
                                            bool exposed, const RdmaAttributes& rdma) {
  auto found = FindShards("rdma_read", rdma);
  if (!found) return ffi::Unexpected(found.error());
  RdmaReadOperands read;
  read.reader = std::move(found->first);
  read.call.shards = std::move(found->second);
  const auto k = static_cast<size_t>(fields);
  const auto broken = [](const std::string& what) {
    return ffi::Unexpected(InvalidArgument("gear_rdma_read: " + what, "another", "that of the fields",
                                           "Call gear_jax.ops.rdma_read, which prepares the operands."));
  };
  const size_t own = exposed ? 0 : k;
  if (args.size() < own + 1 || rets.size() != k + 2) return broken("number of operands");
  for (size_t i = 0; i < k; ++i) {
    auto out = rets.get<ffi::AnyBuffer>(i);
    if (!out) return ffi::Unexpected(out.error());
    const size_t bytes = (*out)->size_bytes() / read.call.shards.size();
    read.call.fields.push_back({static_cast<uint8_t*>((*out)->untyped_data()), static_cast<int64_t>(bytes)});
    if (exposed) continue;
    auto field = args.get<ffi::AnyBuffer>(i);
    if (!field) return ffi::Unexpected(field.error());
    if ((*out)->size_bytes() != field->size_bytes() * read.call.shards.size()) return broken("bytes of a result");
    if (bytes == 0) continue;
    const std::string fault =
        CheckOwnRegion(*read.reader, read.call.shards, static_cast<int32_t>(i), field->untyped_data());
    if (fault.empty()) continue;
    return ffi::Unexpected(ffi::Error(ffi::ErrorCode::kFailedPrecondition, "rdma_read: " + fault));
  }
  auto here = rets.get<ffi::Buffer<ffi::PRED>>(k);
  auto ticket = args.get<ffi::Buffer<ffi::S32>>(own);
  auto ticket_out = rets.get<ffi::Buffer<ffi::S32>>(k + 1);
  if (!here) return ffi::Unexpected(here.error());
  if (!ticket) return ffi::Unexpected(ticket.error());
  if (!ticket_out) return ffi::Unexpected(ticket_out.error());
  if ((*here)->element_count() != read.call.shards.size()) return broken("number of shards");
  read.call.here = reinterpret_cast<bool*>((*here)->typed_data());
  read.ticket = ticket->typed_data();
  read.ticket_out = (*ticket_out)->typed_data();
  const std::string fault = CheckRegions(read.call, *read.reader);
  if (!fault.empty()) return ffi::Unexpected(ffi::Error(ffi::ErrorCode::kInvalidArgument, "rdma_read: " + fault));
  return read;
}

ffi::Error PlaceRdmaResults(FetchCall& call, ffi::RemainingRets rets) {
  const std::vector<int64_t> bytes = PartBytes(call);
  if (rets.size() < bytes.size()) {
    return InvalidArgument("gear_rdma_fetch: results, at least", rets.size(), bytes.size(), kInternal);
  }
  std::vector<uint8_t*> parts;
  for (size_t i = 0; i < bytes.size(); ++i) {
    auto out = rets.get<ffi::AnyBuffer>(i);
    if (!out) return out.error();
    if (static_cast<int64_t>((*out)->size_bytes()) != bytes[i]) {
      const std::string what = "gear_rdma_fetch: bytes of result " + std::to_string(i);
      return InvalidArgument(what, (*out)->size_bytes(), bytes[i], kInternal);
    }
    parts.push_back(static_cast<uint8_t*>((*out)->untyped_data()));
  }
  PlaceParts(call, parts);
  return ffi::Error::Success();
}

}  // namespace gear_jax
