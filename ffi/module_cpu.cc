// The CPU library: its table of FFI handlers. Python loops over it (gear_jax/_native.py).
#include <nanobind/nanobind.h>

#include "ffi/handlers.h"

namespace nb = nanobind;

namespace gear_jax {
namespace {

nb::dict Registrations() {
  nb::dict table;
  const auto add = [&](const char* name, XLA_FFI_Error* (*handler)(XLA_FFI_CallFrame*)) {
    table[name] = nb::capsule(reinterpret_cast<void*>(handler));
  };
  add("gear_gather", gear_gather_cpu);
  add("gear_scatter", gear_scatter_cpu);
  add("gear_sumtree_sample", gear_sumtree_sample_cpu);
  add("gear_sumtree_update", gear_sumtree_update_cpu);
  add("gear_zeros", gear_zeros_cpu);
  return table;
}

}  // namespace

NB_MODULE(_gear_cpu, m) {
  m.doc() = "FFI handlers of gear_jax for the CPU.";
  m.def("registrations", &Registrations, "dict of target name to handler capsule");
}

}  // namespace gear_jax
