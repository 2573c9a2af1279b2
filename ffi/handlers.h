// The FFI handlers of each platform's library, for its registration table (module_<platform>.cc).
#ifndef GEAR_JAX_FFI_HANDLERS_H_
#define GEAR_JAX_FFI_HANDLERS_H_

#include "xla/ffi/api/c_api.h"

namespace gear_jax {

// Every target with the platform's handler: GEAR_JAX_FOR_EACH_TARGET(f) calls f(target) for each.
#define GEAR_JAX_FOR_EACH_TARGET(f) \
  f(gear_gather);                   \
  f(gear_gather_checked);           \
  f(gear_gather_engine);            \
  f(gear_gather_engine_checked);    \
  f(gear_gather_start);             \
  f(gear_gather_start_checked);     \
  f(gear_gather_done);              \
  f(gear_pointers);                 \
  f(gear_rdma_fetch);               \
  f(gear_rdma_fetch_done);          \
  f(gear_rdma_fetch_start);         \
  f(gear_rdma_read);                \
  f(gear_scatter);                  \
  f(gear_scatter_checked);          \
  f(gear_sumtree_sample);           \
  f(gear_sumtree_update);           \
  f(gear_zeros)

extern "C" {
#define GEAR_JAX_DECLARE(target)                         \
  XLA_FFI_Error* target##_cpu(XLA_FFI_CallFrame* frame); \
  XLA_FFI_Error* target##_cuda(XLA_FFI_CallFrame* frame)
GEAR_JAX_FOR_EACH_TARGET(GEAR_JAX_DECLARE);
#undef GEAR_JAX_DECLARE
}

}  // namespace gear_jax

#endif  // GEAR_JAX_FFI_HANDLERS_H_
