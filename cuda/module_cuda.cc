// Python module gear_jax._gear_cuda: what this build offers on CUDA. It loads on a machine without a driver.
#include <cuda_runtime_api.h>
#include <nanobind/nanobind.h>

#include <stdexcept>
#include <string>

namespace nb = nanobind;

namespace {

// XLA FFI target name -> capsule, like the table of _gear_cpu. No op has a CUDA kernel in this version.
nb::dict Registrations() { return nb::dict(); }

// The CUDA runtime inside this library, as 1000 * major + 10 * minor.
int RuntimeVersion() {
  int version = 0;
  const cudaError_t error = cudaRuntimeGetVersion(&version);
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("cudaRuntimeGetVersion: ") + cudaGetErrorString(error));
  }
  return version;
}

}  // namespace

NB_MODULE(_gear_cuda, m) {
  m.doc() = "XLA FFI handlers of gear_jax for CUDA.";
  m.def("registrations", &Registrations, "The XLA FFI targets of this library: name -> capsule.");
  m.def("runtime_version", &RuntimeVersion, "Version of the linked CUDA runtime: 1000 * major + 10 * minor.");
}
