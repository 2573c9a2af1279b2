// Where the handlers of this library find a job's readers. Sessions live in the CPU's library, and so does what counts
// their rows: the other platforms' libraries are given both when they are loaded (gear_jax/_native.py).
#ifndef GEAR_JAX_FFI_RDMA_HOST_H_
#define GEAR_JAX_FFI_RDMA_HOST_H_

#include <cstdint>
#include <memory>

#include "ffi/rdma_fetch.h"
#include "ffi/transport/reader.h"

namespace gear_jax {

struct RdmaHost {
  std::shared_ptr<transport::Reader> (*find)(int64_t number);  // null: none
  RdmaCounters& (*counters)(int64_t number);
};

// This library's own.
const RdmaHost& OwnRdmaHost();

// The one in use: this library's own, until another is set. Set it before there are calls.
const RdmaHost& CurrentRdmaHost();
void UseRdmaHost(const RdmaHost& host);

}  // namespace gear_jax

#endif  // GEAR_JAX_FFI_RDMA_HOST_H_
