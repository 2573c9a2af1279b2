// The CPU library: its table of FFI handlers. Python loops over it (gear_jax/_native.py).
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "ffi/actors/module.h"
#include "ffi/handlers.h"
#include "ffi/memory_registry.h"
#include "ffi/rdma_fetch.h"
#include "ffi/rdma_flights.h"
#include "ffi/rdma_host.h"
#include "ffi/staging.h"
#include "ffi/transport/memory_reader.h"
#include "ffi/transport/reader.h"
#include "ffi/transport_module.h"

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

void ReleaseQueue(int64_t queue) {
  HostStaging::Global().Release(queue);
  FetchFlights::Global().Release(queue);
}

void RetireQueue(int64_t queue) { RetiredQueues::Global().Add(queue); }

using Words = std::array<uint32_t, 4>;

Words RegisterMemory(uintptr_t pointer, int64_t bytes) {
  Words words;
  MemoryRegistry::Global().Add(reinterpret_cast<const void*>(pointer), bytes).Write(words.data());
  return words;
}

bool UnregisterMemory(const Words& words) { return MemoryRegistry::Global().Remove(Address::Read(words.data())); }

// Peers of this process's own memory, each a list of (pointer, bytes).
void AddMemoryReader(int64_t number, int32_t self,
                     const std::vector<std::vector<std::pair<uintptr_t, uint64_t>>>& peers) {
  std::vector<std::vector<transport::MemoryRegion>> regions;
  for (const auto& peer : peers) {
    regions.emplace_back();
    for (const auto& [pointer, bytes] : peer) {
      regions.back().push_back({reinterpret_cast<const void*>(pointer), bytes});
    }
  }
  transport::AddReader(number, std::make_shared<transport::MemoryReader>(self, std::move(regions)));
}

bool SetPeerAlive(int64_t number, int32_t peer, bool alive) {
  const auto reader = std::dynamic_pointer_cast<transport::MemoryReader>(transport::FindReader(number));
  if (reader != nullptr) reader->SetAlive(peer, alive);
  return reader != nullptr;
}

nb::dict CountRdma(int64_t number) {
  const RdmaCounters& counters = RdmaCountersOf(number);
  nb::dict counts;
  counts["rows"] = counters.rows.load();
  counts["remote_rows"] = counters.remote.load();
  counts["retries"] = counters.retries.load();
  counts["torn"] = counters.torn.load();
  counts["stale"] = counters.stale.load();
  counts["lost_rows"] = counters.lost.load();
  counts["refused_rows"] = counters.refused.load();
  return counts;
}

}  // namespace

NB_MODULE(_gear_cpu, m) {
  m.doc() = "FFI handlers of gear_jax for the CPU.";
  m.def("registrations", &Registrations, "dict of target name to handler capsule");
  m.def("release_queue", &ReleaseQueue, nb::call_guard<nb::gil_scoped_release>(),
        "Frees the staging memory of a queue of gathers.");
  m.def("retire_queue", &RetireQueue, "Has the next start on a device free the staging memory that a queue has there.");
  m.def("register_memory", &RegisterMemory, "Gives memory (pointer, bytes) an address, four words.");
  m.def("add_memory_reader", &AddMemoryReader,
        "Has a session number read this process's own memory: (number, self, peers' lists of (pointer, bytes)).");
  m.def("set_peer_alive", &SetPeerAlive, "Whether a peer of a memory reader answers. False: there is no such reader.");
  m.def(
      "rdma_host", [] { return nb::capsule(&OwnRdmaHost()); },
      "Where other platforms' libraries find the sessions: for their use_rdma_host.");
  m.def(
      "wait_for_fetches",
      [](int64_t number, double seconds) { return WaitForFetches(RdmaCountersOf(number), seconds); },
      nb::call_guard<nb::gil_scoped_release>(),
      "Waits until no fetch through a session number is in flight, at most so long. Whether that is so.");
  m.def("rdma_counters", &CountRdma, "What has become of the rows fetched through a session number.");
  m.def("unregister_memory", &UnregisterMemory, nb::call_guard<nb::gil_scoped_release>(),
        "Makes an address stale, then waits until nobody reads its memory. False: it is stale already.");
  AddActors(m);
  AddTransport(m);
}

}  // namespace gear_jax
