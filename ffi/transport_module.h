// The Python side of ffi/transport/: sessions and what they read.
#ifndef GEAR_JAX_FFI_TRANSPORT_MODULE_H_
#define GEAR_JAX_FFI_TRANSPORT_MODULE_H_

#include <nanobind/nanobind.h>

namespace gear_jax {

void AddTransport(nanobind::module_& m);

}  // namespace gear_jax

#endif  // GEAR_JAX_FFI_TRANSPORT_MODULE_H_
