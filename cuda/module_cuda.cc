// Python module gear_jax._gear_cuda: its table of FFI handlers, like _gear_cpu's. It loads on a machine without a
// driver.
#include <cuda_runtime_api.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda/device_registry.h"
#include "cuda/device_staging.h"
#include "ffi/handlers.h"
#include "ffi/rdma_host.h"
#include "ffi/staging.h"

namespace nb = nanobind;

namespace gear_jax {
namespace {

nb::dict Registrations() {
  nb::dict table;
#define GEAR_JAX_ADD(target) table[#target] = nb::capsule(reinterpret_cast<void*>(target##_cuda))
  GEAR_JAX_FOR_EACH_TARGET(GEAR_JAX_ADD);
#undef GEAR_JAX_ADD
  return table;
}

void ReleaseQueue(int64_t queue) {
  const StagingFault fault = DeviceStaging::Release(queue);
  if (!fault) return;
  throw std::runtime_error(std::string("release_queue, ") + fault.step + ": " + cudaGetErrorString(fault.error));
}

void RetireQueue(int64_t queue) { RetiredQueues::Global().Add(queue); }

using Words = std::array<uint32_t, 4>;

void Check(const char* what, const RegistryFault& fault) {
  if (!fault) return;
  const std::string cuda = fault.error == cudaSuccess ? "" : std::string(": ") + cudaGetErrorString(fault.error);
  throw std::runtime_error(std::string(what) + ": " + fault.step + cuda);
}

void RegisterMemory(const Words& words, uintptr_t pointer, int64_t bytes, const std::vector<int>& devices) {
  const auto* const base = reinterpret_cast<const void*>(pointer);
  Check("register_memory", DeviceRegistry::Global().Add(Address::Read(words.data()), base, bytes, devices));
}

void UnregisterMemory(const std::vector<Words>& words) {
  std::vector<Address> addresses;
  for (const Words& w : words) addresses.push_back(Address::Read(w.data()));
  Check("unregister_memory", DeviceRegistry::Global().Remove(addresses));
}

std::string TakeAddressFault() { return DeviceRegistry::Global().TakeFault("gather"); }

// 1000 * major + 10 * minor.
int Version(cudaError_t (*ask)(int*), const char* name) {
  int version = 0;
  const cudaError_t error = ask(&version);
  if (error != cudaSuccess) throw std::runtime_error(std::string(name) + ": " + cudaGetErrorString(error));
  return version;
}

}  // namespace

NB_MODULE(_gear_cuda, m) {
  m.doc() = "XLA FFI handlers of gear_jax for CUDA.";
  m.def("registrations", &Registrations, "dict of target name to handler capsule");
  m.def("release_queue", &ReleaseQueue, nb::call_guard<nb::gil_scoped_release>(),
        "Frees the staging memory of a queue of gathers.");
  m.def("retire_queue", &RetireQueue, "Has the next start on a device free the staging memory that a queue has there.");
  m.def(
      "use_rdma_host", [](nb::capsule host) { UseRdmaHost(*static_cast<const RdmaHost*>(host.data())); },
      "Has remote reads go through the sessions of _gear_cpu.rdma_host().");
  m.def("register_memory", &RegisterMemory, nb::call_guard<nb::gil_scoped_release>(),
        "Lets kernels find page-locked host memory by an address: four words, pointer, bytes, devices.");
  m.def("unregister_memory", &UnregisterMemory, nb::call_guard<nb::gil_scoped_release>(),
        "Makes addresses stale on all devices, and waits for what is enqueued there.");
  m.def("take_address_fault", &TakeAddressFault, "What was wrong with an address that a kernel got; \"\": nothing.");
  m.def(
      "runtime_version", [] { return Version(cudaRuntimeGetVersion, "cudaRuntimeGetVersion"); },
      "Version of the linked CUDA runtime: 1000 * major + 10 * minor.");
  m.def(
      "driver_version", [] { return Version(cudaDriverGetVersion, "cudaDriverGetVersion"); },
      "Newest CUDA that the driver serves, 1000 * major + 10 * minor; 0: there is no driver.");
}

}  // namespace gear_jax
