// The CPU library: its table of FFI handlers. Python loops over it (gear_jax/_native.py).
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>

#include <array>
#include <cstdint>

#include "ffi/actors/module.h"
#include "ffi/handlers.h"
#include "ffi/memory_registry.h"
#include "ffi/staging.h"

namespace nb = nanobind;

namespace gear_jax {
namespace {

nb::dict Registrations() {
  nb::dict table;
#define GEAR_JAX_ADD(target) table[#target] = nb::capsule(reinterpret_cast<void*>(target##_cpu))
  GEAR_JAX_FOR_EACH_TARGET(GEAR_JAX_ADD);
#undef GEAR_JAX_ADD
  return table;
}

void ReleaseQueue(int64_t queue) { HostStaging::Global().Release(queue); }

void RetireQueue(int64_t queue) { RetiredQueues::Global().Add(queue); }

using Words = std::array<uint32_t, 4>;

Words RegisterMemory(uintptr_t pointer, int64_t bytes) {
  Words words;
  MemoryRegistry::Global().Add(reinterpret_cast<const void*>(pointer), bytes).Write(words.data());
  return words;
}

bool UnregisterMemory(const Words& words) { return MemoryRegistry::Global().Remove(Address::Read(words.data())); }

}  // namespace

NB_MODULE(_gear_cpu, m) {
  m.doc() = "FFI handlers of gear_jax for the CPU.";
  m.def("registrations", &Registrations, "dict of target name to handler capsule");
  m.def("release_queue", &ReleaseQueue, nb::call_guard<nb::gil_scoped_release>(),
        "Frees the staging memory of a queue of gathers.");
  m.def("retire_queue", &RetireQueue, "Has the next start on a device free the staging memory that a queue has there.");
  m.def("register_memory", &RegisterMemory, "Gives memory (pointer, bytes) an address, four words.");
  m.def("unregister_memory", &UnregisterMemory, nb::call_guard<nb::gil_scoped_release>(),
        "Makes an address stale, then waits until nobody reads its memory. False: it is stale already.");
  AddActors(m);
}

}  // namespace gear_jax
