#include "ffi/transport_module.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "ffi/transport/session.h"
#include "ffi/transport/transports.h"

namespace nb = nanobind;

namespace gear_jax {
namespace {

using transport::ExposingTransport;
using transport::Options;
using transport::OwnMemory;
using transport::Piece;
using transport::RemoteRegion;
using transport::Session;
using transport::Status;
using transport::Transport;

using Memory = std::tuple<uintptr_t, uint64_t>;            // address, bytes
using Region = std::tuple<uint64_t, uint64_t, nb::bytes>;  // address, bytes, key
using PieceTuple = std::tuple<int32_t, int32_t, uint64_t, uint64_t, uintptr_t>;

const char* Name(Status status) {
  switch (status) {
    case Status::kOk:
      return "ok";
    case Status::kRefused:
      return "refused";
    case Status::kTimeout:
      return "timeout";
    case Status::kLost:
      return "lost";
    case Status::kClosed:
      return "closed";
  }
  return "unknown";
}

nb::bytes ToPython(const std::vector<uint8_t>& blob) { return nb::bytes(blob.data(), blob.size()); }

std::vector<uint8_t> FromPython(const nb::bytes& blob) {
  const auto* data = static_cast<const uint8_t*>(blob.data());
  return {data, data + blob.size()};
}

void Check(const std::string& error) {
  if (!error.empty()) throw std::runtime_error(error);
}

Options ToOptions(const nb::dict& dict) {
  Options options;
  for (const auto& [key, value] : dict) {
    const auto name = nb::cast<std::string>(key);
#define GEAR_JAX_OPTION(field)                                \
  if (name == #field) {                                       \
    options.field = nb::cast<decltype(options.field)>(value); \
    continue;                                                 \
  }
    GEAR_JAX_OPTION(timeout)
    GEAR_JAX_OPTION(chunk)
    GEAR_JAX_OPTION(window)
    GEAR_JAX_OPTION(queue_pairs)
    GEAR_JAX_OPTION(device)
    GEAR_JAX_OPTION(port)
    GEAR_JAX_OPTION(gid_index)
    GEAR_JAX_OPTION(mtu)
    GEAR_JAX_OPTION(traffic_class)
    GEAR_JAX_OPTION(retries)
    GEAR_JAX_OPTION(ack_timeout)
#undef GEAR_JAX_OPTION
    throw std::invalid_argument("options: got \"" + name + "\", wanted one that transport.h names. Leave it out.");
  }
  return options;
}

std::shared_ptr<Session> MakeSession(const std::string& name, int32_t self, int32_t peers,
                                     const std::vector<Memory>& own, const nb::dict& options) {
  const Options o = ToOptions(options);
  std::vector<OwnMemory> memory;
  for (const auto& [address, bytes] : own) memory.push_back({reinterpret_cast<const void*>(address), bytes});
  std::string error;
  auto made = transport::MakeTransport(name, o, &error);
  Check(error);
  return std::make_shared<Session>(std::move(made), self, peers, std::move(memory), o);
}

// Why a transport cannot be used here; "": it can.
std::string TransportMissing(const std::string& name, const nb::dict& options) {
  const Options o = ToOptions(options);
  const nb::gil_scoped_release release;
  std::string error;
  transport::MakeTransport(name, o, &error).reset();
  return error;
}

nb::bytes Offer(Session& session, int32_t peer) {
  std::string error;
  std::vector<uint8_t> blob;
  {
    const nb::gil_scoped_release release;
    blob = session.Offer(peer, &error);
  }
  Check(error);
  return ToPython(blob);
}

void Connect(Session& session, int32_t peer, const nb::bytes& blob, const std::vector<Region>& regions) {
  std::vector<uint8_t> bytes = FromPython(blob);
  std::vector<RemoteRegion> remote;
  for (const auto& [address, size, key] : regions) remote.push_back({address, size, FromPython(key)});
  std::string error;
  {
    const nb::gil_scoped_release release;
    error = session.Connect(peer, std::move(bytes), std::move(remote));
  }
  Check(error);
}

// Runs `f` with the transport as one that exposes memory, without the GIL.
template <typename F>
void WithExposing(Session& session, F f) {
  std::string error;
  {
    const nb::gil_scoped_release release;
    const bool ran = session.Run([&](Transport& t) {
      auto* const exposing = dynamic_cast<ExposingTransport*>(&t);
      error = exposing == nullptr
                  ? "transport: got one that exposes nothing by itself, wanted \"ucx\". Use its own module."
                  : f(*exposing);
    });
    if (!ran) error = "session: got one that is closed, wanted an open one. Make a new one.";
  }
  Check(error);
}

std::vector<Region> Expose(Session& session, const std::vector<Memory>& own) {
  std::vector<OwnMemory> memory;
  for (const auto& [address, bytes] : own) memory.push_back({reinterpret_cast<const void*>(address), bytes});
  std::vector<RemoteRegion> regions;
  WithExposing(session, [&](ExposingTransport& t) { return t.Expose(memory, &regions); });
  std::vector<Region> result;
  for (const RemoteRegion& r : regions) result.emplace_back(r.address, r.bytes, ToPython(r.key));
  return result;
}

nb::bytes Accept(Session& session, int32_t peer, const nb::bytes& offer) {
  const std::vector<uint8_t> bytes = FromPython(offer);
  std::vector<uint8_t> blob;
  WithExposing(session, [&](ExposingTransport& t) {
    std::string error;
    blob = t.Accept(peer, bytes.data(), bytes.size(), &error);
    return error;
  });
  return ToPython(blob);
}

std::string Way(Session& session, int32_t peer) {
  std::string way;
  WithExposing(session, [&](ExposingTransport& t) {
    way = t.Way(peer);
    return std::string();
  });
  return way;
}

std::vector<std::string> Read(Session& session, const std::vector<PieceTuple>& pieces) {
  std::vector<Piece> p;
  for (const auto& [peer, region, offset, bytes, to] : pieces) {
    p.push_back({peer, region, offset, bytes, reinterpret_cast<void*>(to)});
  }
  std::vector<std::string> names;
  const nb::gil_scoped_release release;
  if (session.ReadHere(p)) return std::vector<std::string>(p.size(), Name(Status::kOk));
  std::mutex mutex;
  std::condition_variable changed;
  bool ended = false;
  session.Read(std::move(p), [&](const std::vector<Status>& statuses) {
    const std::lock_guard<std::mutex> lock(mutex);
    for (const Status status : statuses) names.emplace_back(Name(status));
    ended = true;
    changed.notify_all();
  });
  std::unique_lock<std::mutex> lock(mutex);
  changed.wait(lock, [&]() { return ended; });
  return names;
}

std::vector<bool> Alive(const Session& session) {
  std::vector<bool> alive;
  for (int32_t peer = 0; peer < session.peers(); ++peer) alive.push_back(session.Alive(peer));
  return alive;
}

nb::dict ToDict(const transport::Counters& c) {
  nb::dict d;
  d["bytes"] = c.bytes;
  d["reads"] = c.reads;
  d["refused"] = c.refused;
  d["timeouts"] = c.timeouts;
  d["lost"] = c.lost;
  d["losses"] = c.losses;
  d["reconnects"] = c.reconnects;
  d["wait_seconds"] = c.wait_seconds;
  return d;
}

}  // namespace

void AddTransport(nb::module_& m) {
  using NoGil = nb::call_guard<nb::gil_scoped_release>;
  m.def("transport_missing", &TransportMissing, "Why a transport (name, options) cannot be used here; \"\": it can.");
  m.def("ucx_version", &transport::UcxVersion, "\"1.22.0\"; \"\": no library that can be used.");
  nb::class_<Session>(m, "TransportSession", "ffi/transport/session.h over the transport of a name.")
      .def(nb::new_(&MakeSession), nb::arg("transport"), nb::arg("self"), nb::arg("peers"), nb::arg("own"),
           nb::arg("options"), "own: (address, bytes) of each region of this process.")
      .def("offer", &Offer, "What a peer's exposing side must know of this reader.")
      .def("connect", &Connect, "Takes up a peer: (peer, its blob, its regions (address, bytes, key)).")
      .def("disconnect", &Session::Disconnect, NoGil())
      .def("expose", &Expose, "Lets peers read (address, bytes); returns (address, bytes, key). Once; ucx only.")
      .def("accept", &Accept, "The blob for a peer that has sent this offer; ucx only.")
      .def("read", &Read, "Reads (peer, region, offset, bytes, to) and waits; returns how each has ended.")
      .def("alive", &Alive)
      .def("way", &Way, "How a connected peer is read, for people; ucx only.")
      .def(
          "checks_keys",
          [](Session& s) {
            bool checks = false;
            s.Run([&](Transport& t) { checks = t.capabilities().checks_keys; });
            return checks;
          },
          NoGil(), "Whether the exposing side itself refuses wrong keys and bounds.")
      .def("region_bytes", &Session::RegionBytes)
      .def("counters", [](const Session& s) { return ToDict(s.counters()); })
      .def(
          "add", [](std::shared_ptr<Session> s, int64_t number) { transport::AddReader(number, std::move(s)); },
          "Lets ops find this session by a number.")
      .def("close", &Session::Close, NoGil(),
           "Ends all reads and the thread. Returns how many reads the transport has not ended by the deadline.");
  m.def("remove_reader", &transport::RemoveReader, NoGil(), "Ops find a session no more.");
}

}  // namespace gear_jax
