// The operands, results and attributes of `gear_rdma_read`, `gear_rdma_fetch` and its two halves.
#ifndef GEAR_JAX_FFI_RDMA_OPERANDS_H_
#define GEAR_JAX_FFI_RDMA_OPERANDS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ffi/errors.h"
#include "ffi/gather_call.h"
#include "ffi/rdma_fetch.h"
#include "ffi/rdma_read.h"
#include "xla/ffi/api/ffi.h"

namespace gear_jax {

// Where the job's regions are: shard d is that of process peers[d], whose regions begin with number regions[d].
struct RdmaAttributes {
  int64_t session;
  Int64s peers, regions;
  bool error_on_loss;
};

// The session's reader and its shards, or the error.
xla::ffi::ErrorOr<std::pair<std::shared_ptr<transport::Reader>, std::vector<RdmaShard>>> FindShards(
    const char* op, const RdmaAttributes& attributes);

// The error for rows or regions of peers that are gone, if there is to be one; or success.
xla::ffi::Error CheckLoss(const char* op, const std::vector<int32_t>& lost, bool closed, bool error_on_loss);

// What a handler makes of a fetch's frame, but for the results.
struct RdmaFetchOperands {
  FetchCall call;
  const uint32_t* stamp;  // [slots], this device's own; null: all of this process are
  std::shared_ptr<transport::Reader> reader;
};

// Operands: slot, anchor, length, ticket, columns..., stamp, shard, generation, then buffers that are only waited for.
// With `attributes.layouts` there are no columns and no stamp: the session's own regions stand for them.
// `any`: the generations do not count. That the session's regions fit is checked.
xla::ffi::ErrorOr<RdmaFetchOperands> ReadRdmaFetch(xla::ffi::Buffer<xla::ffi::S32> slot,
                                                   xla::ffi::Buffer<xla::ffi::S32> anchor,
                                                   xla::ffi::Buffer<xla::ffi::S32> length, xla::ffi::RemainingArgs args,
                                                   const GatherAttributes& attributes, const RdmaAttributes& rdma,
                                                   int64_t tries, bool any);

// The error for rows outside the tables, or success. The rows' numbers are on the host.
xla::ffi::Error CheckRdmaRows(const FetchCall& call);

// The same for `rdma_read`. Operands: the fields (not if they are `exposed`: the session's own regions then stand for
// them), the ticket, then buffers that are only waited for. Results: the fields of all shards, which shards are there,
// and the ticket.
struct RdmaReadOperands {
  RegionsCall call;
  std::shared_ptr<transport::Reader> reader;
  const int32_t* ticket;
  int32_t* ticket_out;
};

xla::ffi::ErrorOr<RdmaReadOperands> ReadRdmaRead(xla::ffi::RemainingArgs args, xla::ffi::RemainingRets rets,
                                                 int64_t fields, bool exposed, const RdmaAttributes& rdma);

// Points a fetch's results to those of the frame: the columns' data, a mask for each, and which rows are valid; their
// number in all is columns + masks + 1, behind which there may be others.
xla::ffi::Error PlaceRdmaResults(FetchCall& call, xla::ffi::RemainingRets rets);

template <typename Binding>
auto BindRdmaShards(Binding&& binding) {
  return std::forward<Binding>(binding)
      .template Attr<int64_t>("session")
      .template Attr<Int64s>("peers")
      .template Attr<Int64s>("regions")
      .template Attr<bool>("error_on_loss");
}

template <typename Binding>
auto BindRdmaRead(Binding&& binding) {
  return BindRdmaShards(std::forward<Binding>(binding)
                            .RemainingArgs()
                            .RemainingRets()
                            .template Attr<int64_t>("fields")
                            .template Attr<bool>("exposed"));
}

template <typename Binding>
auto BindRdmaFetchAttributes(Binding&& binding) {
  return BindRdmaShards(BindWindowAttributes(std::forward<Binding>(binding)).template Attr<Int64s>("layouts"))
      .template Attr<int64_t>("tries")
      .template Attr<bool>("any")
      .template Attr<bool>("checks");
}

template <typename Binding>
auto BindRdmaFetch(Binding&& binding) {
  return BindRdmaFetchAttributes(BindGatherOperands(std::forward<Binding>(binding)).RemainingRets());
}

template <typename Binding>
auto BindRdmaFetchStart(Binding&& binding) {
  return BindRdmaFetchAttributes(BindGatherOperands(std::forward<Binding>(binding))
                                     .template Ret<xla::ffi::Buffer<xla::ffi::S32>>()
                                     .template Ret<xla::ffi::Buffer<xla::ffi::S32>>())
      .template Attr<int64_t>("queue")
      .template Attr<int64_t>("depth");
}

}  // namespace gear_jax

#endif  // GEAR_JAX_FFI_RDMA_OPERANDS_H_
