// The FFI handlers of the CPU library, for its registration table (module_cpu.cc).
#ifndef GEAR_JAX_FFI_HANDLERS_H_
#define GEAR_JAX_FFI_HANDLERS_H_

#include "xla/ffi/api/c_api.h"

namespace gear_jax {

extern "C" {
XLA_FFI_Error* gear_gather_cpu(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* gear_scatter_cpu(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* gear_sumtree_sample_cpu(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* gear_sumtree_update_cpu(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* gear_zeros_cpu(XLA_FFI_CallFrame* frame);
}

}  // namespace gear_jax

#endif  // GEAR_JAX_FFI_HANDLERS_H_
