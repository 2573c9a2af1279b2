#include "ffi/rdma_host.h"

namespace gear_jax {
namespace {

const RdmaHost* current = &OwnRdmaHost();

}  // namespace

const RdmaHost& OwnRdmaHost() {
  static const RdmaHost own{&transport::FindReader, &RdmaCountersOf};
  return own;
}

const RdmaHost& CurrentRdmaHost() { return *current; }

void UseRdmaHost(const RdmaHost& host) { current = &host; }

}  // namespace gear_jax
