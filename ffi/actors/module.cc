#include "ffi/actors/module.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "ffi/actors/ring.h"
#include "ffi/actors/steps.h"

namespace nb = nanobind;

namespace gear_jax {
namespace {

using actors::Actor;
using actors::Committed;
using actors::Learner;
using actors::Question;
using actors::Ring;

using PyColumn = std::tuple<uint32_t, std::string, std::string, uint64_t, std::vector<int64_t>>;

// All waits let other Python threads run.
using Released = nb::call_guard<nb::gil_scoped_release>;

std::shared_ptr<Ring> Create(const std::string& directory, const std::string& name, uint64_t steps, uint32_t lanes,
                             uint32_t slots, uint32_t requests, const std::vector<PyColumn>& columns) {
  actors::RingSpec spec;
  spec.steps = steps, spec.lanes = lanes, spec.slots = slots, spec.requests = requests;
  for (const auto& [kind, title, dtype, item_bytes, shape] : columns) {
    spec.columns.push_back({static_cast<actors::ColumnKind>(kind), title, dtype, item_bytes, shape});
  }
  return Ring::Create(directory, name, spec);
}

nb::list Columns(const Ring& ring) {
  nb::list found;
  for (const actors::Column& c : ring.layout().columns) {
    nb::list shape;
    for (uint32_t i = 0; i < c.rank; ++i) shape.append(c.shape[i]);
    found.append(nb::make_tuple(c.kind, c.name, c.dtype, c.item_bytes, nb::tuple(shape), c.offset, c.bytes));
  }
  return found;
}

const char* NameOf(actors::Life life) {
  switch (life) {
    case actors::Life::kNone:
      return "free";
    case actors::Life::kRunning:
      return "running";
    case actors::Life::kStopped:
      return "stopped";
    default:
      return "dead";
  }
}

nb::list Report(const Ring& ring) {
  nb::list found;
  for (const actors::LaneReport& r : ring.Report()) {
    nb::dict lane;
    lane["pid"] = r.pid, lane["life"] = NameOf(r.life), lane["committed"] = r.committed;
    lane["abandoned"] = r.abandoned, lane["waited"] = static_cast<double>(r.waited) * 1e-9;
    lane["incarnation"] = r.incarnation, lane["open"] = r.open, lane["pending"] = r.pending;
    found.append(lane);
  }
  return found;
}

// One field of all of them, as a NumPy array of its own.
template <typename T, typename Get>
nb::ndarray<nb::numpy, T> Field(const std::vector<Committed>& all, Get get) {
  T* data = new T[all.size() + 1];
  for (size_t i = 0; i < all.size(); ++i) data[i] = static_cast<T>(get(all[i]));
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  return nb::ndarray<nb::numpy, T>(data, {all.size()}, owner);
}

// What Collect found. Python reads its fields and hands it back to consume.
struct Batch {
  std::vector<Committed> all;
};

nb::dict Fields(const Batch& batch) {
  const auto& all = batch.all;
  nb::dict found;
  found["slot"] = Field<int32_t>(all, [](const Committed& c) { return c.slot; });
  found["lane"] = Field<int32_t>(all, [](const Committed& c) { return c.lane; });
  found["number"] = Field<int64_t>(all, [](const Committed& c) { return c.number; });
  found["sequence"] = Field<int64_t>(all, [](const Committed& c) { return c.sequence; });
  found["length"] = Field<int32_t>(all, [](const Committed& c) { return c.trajectory.length; });
  found["flags"] = Field<uint32_t>(all, [](const Committed& c) { return c.trajectory.flags; });
  found["priority"] = Field<float>(all, [](const Committed& c) { return c.trajectory.priority; });
  found["version"] = Field<int64_t>(all, [](const Committed& c) { return c.trajectory.version; });
  found["checksum"] = Field<uint64_t>(all, [](const Committed& c) { return c.trajectory.checksum; });
  return found;
}

void AddRing(nb::module_& m) {
  nb::class_<Ring>(m, "Ring")
      .def_static("create", &Create, Released())
      .def_static("open", [](const std::string& directory,
                             const std::string& name) { return std::shared_ptr<Ring>(Ring::Open(directory, name)); })
      .def(
          "bytes",
          [](nb::handle_t<Ring> self) {
            Ring& ring = nb::cast<Ring&>(self);
            return nb::ndarray<nb::numpy, uint8_t>(ring.segment().data(), {ring.segment().bytes()}, self);
          },
          "The whole segment, uint8; it stays mapped as long as a view of it lives.")
      .def("columns", &Columns)
      .def("report", &Report)
      .def("close", &Ring::Close)
      .def("unlink", [](Ring& ring) { return ring.segment().Unlink(); })
      .def("whole", [](Ring& ring) { return ring.segment().Whole(); })
      .def("learner",
           [](const Ring& ring) {
             const uint64_t owner = ring.control().learner.load();
             return nb::make_tuple(actors::OwnerPid(owner), NameOf(actors::LifeOf(owner)));
           })
      .def_prop_ro("closed", &Ring::closed)
      .def_prop_rw(
          "wants_versions", [](const Ring& ring) { return ring.control().wants_versions.load() != 0; },
          [](Ring& ring, bool wanted) { ring.control().wants_versions.store(wanted); },
          "Whether the learner wants to know of each trajectory which version of the policy made it.")
      .def_prop_ro("path", [](Ring& ring) { return ring.segment().path(); })
      .def_prop_ro("steps", [](const Ring& ring) { return ring.layout().header.steps; })
      .def_prop_ro("lanes", [](const Ring& ring) { return ring.layout().header.lanes; })
      .def_prop_ro("slots", [](const Ring& ring) { return ring.layout().header.slots; })
      .def_prop_ro("requests", [](const Ring& ring) { return ring.layout().header.requests; })
      .def_prop_ro("identity", [](const Ring& ring) { return ring.layout().header.identity; })
      .def_prop_ro("committed", [](const Ring& ring) { return ring.control().head.load() >> 20; })
      .def_prop_ro("consumed", [](const Ring& ring) { return ring.control().consumed.load(); });
}

void AddActor(nb::module_& m) {
  nb::class_<Actor>(m, "Actor")
      .def(nb::init<std::shared_ptr<Ring>, int64_t>())
      .def_prop_ro("lane", &Actor::lane)
      .def_prop_ro("incarnation", &Actor::incarnation)
      .def("begin", &Actor::Begin, Released(), "A slot; -1: the deadline (time.monotonic_ns) passed, -2: closed.")
      .def("commit", [](Actor& actor, uint32_t slot, uint32_t length, uint32_t flags, float priority, int64_t version,
                        uint64_t checksum) { return actor.Commit(slot, {length, flags, priority, version, checksum}); })
      .def("abandon", &Actor::Abandon)
      .def("ask", &Actor::Ask)
      .def("await_answer", &Actor::AwaitAnswer, Released())
      .def("leave", &Actor::Leave);
  nb::class_<actors::Steps>(m, "Steps")
      .def(nb::init<const std::vector<std::string>&, nb::list>())
      .def("write", &actors::Steps::Write);
}

void AddLearner(nb::module_& m) {
  nb::class_<Batch>(m, "Batch")
      .def("__len__", [](const Batch& batch) { return batch.all.size(); })
      .def("fields", &Fields);
  nb::class_<Learner>(m, "Learner")
      .def(nb::init<std::shared_ptr<Ring>>())
      .def_prop_ro("pending", &Learner::pending)
      .def("await_commit", &Learner::AwaitCommit, Released())
      .def("await_commits", &Learner::AwaitCommits, Released())
      .def("collect", [](const Learner& learner, uint32_t most) { return Batch{learner.Collect(most)}; })
      .def("consume", [](Learner& learner, const Batch& batch) { learner.Consume(batch.all); })
      .def("reclaim", &Learner::Reclaim, Released())
      .def("await_questions", &Learner::AwaitQuestions, Released())
      .def("questions",
           [](const Learner& learner) {
             std::vector<std::tuple<uint32_t, uint32_t, uint32_t>> found;
             for (const Question& q : learner.Questions()) found.emplace_back(q.lane, q.asked, q.rows);
             return found;
           })
      .def("answer", [](Learner& learner, uint32_t lane, uint32_t asked) { return learner.Answer({lane, asked, 0}); })
      .def("leave", &Learner::Leave);
}

}  // namespace

void AddActors(nb::module_& m) {
  nb::module_ sub = m.def_submodule("actors", "The ring between actors and a learner. Neither XLA nor jax.");
  // jax keeps arrays over a ring's memory, and with them the ring, longer than the interpreter keeps its modules.
  nb::set_leak_warnings(false);
  static nb::handle error = nb::exception<actors::Error>(sub, "Error", PyExc_RuntimeError).release();
  nb::register_exception_translator([](const std::exception_ptr& p, void*) {
    try {
      std::rethrow_exception(p);
    } catch (const actors::Error& e) {
      PyErr_SetObject(error.ptr(), nb::make_tuple(e.kind, e.what()).ptr());
    }
  });
  AddRing(sub);
  AddActor(sub);
  AddLearner(sub);
  sub.def("owner_of", &actors::OwnerOf, "The word that stands for a living process, 0 if there is none.");
  sub.def("life_of", [](uint64_t owner) { return NameOf(actors::LifeOf(owner)); });
}

}  // namespace gear_jax
