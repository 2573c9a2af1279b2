// The Python face of the ring: the submodule `actors` of gear_jax._gear_cpu.
#ifndef GEAR_JAX_FFI_ACTORS_MODULE_H_
#define GEAR_JAX_FFI_ACTORS_MODULE_H_

#include <nanobind/nanobind.h>

namespace gear_jax {

void AddActors(nanobind::module_& m);

}  // namespace gear_jax

#endif  // GEAR_JAX_FFI_ACTORS_MODULE_H_
