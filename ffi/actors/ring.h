// The ring of trajectories between actors and a learner, in shared memory: lock-free, and whole whoever dies when.
//
// An actor holds a lane, K slots that it alone writes. A slot goes kFree -> kOpen (Begin: the lane's actor)
// -> kCommitted (Commit) -> kFree (Consume: the learner). The commit itself is one compare-and-swap on Control::head;
// the slot names the commit before it, so the committed slots are a chain in the order of their commits, and what is
// in the chain is committed whatever its state says. The learner alone frees slots and takes back those of the dead.
//
// Memory orders. A commit releases, and reading the head acquires, the bytes of a slot; earlier commits come with it,
// because read-modify-writes continue the release sequence. Freeing releases, and Begin acquires, the learner's reads.
#ifndef GEAR_JAX_FFI_ACTORS_RING_H_
#define GEAR_JAX_FFI_ACTORS_RING_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ffi/actors/layout.h"
#include "ffi/actors/process.h"
#include "ffi/actors/segment.h"

namespace gear_jax {
namespace actors {

constexpr int64_t kTimedOut = -1;
constexpr int64_t kClosed = -2;

// What an actor says about a trajectory.
struct Trajectory {
  uint32_t length = 0;
  uint32_t flags = 0;  // 1: it has a priority; 2: it has a version
  float priority = 0;
  int64_t version = 0;
  uint64_t checksum = 0;
};

// One that the learner finds. (lane, incarnation, sequence) is no other's.
struct Committed {
  uint32_t slot, lane;
  uint64_t number;
  uint64_t sequence;
  Trajectory trajectory;
};

struct Question {
  uint32_t lane, asked, rows;
};

struct LaneReport {
  int64_t pid;
  Life life;
  uint64_t committed, abandoned, waited;
  uint32_t incarnation, open, pending;  // slots that are being written, that wait for the learner
};

class Ring {
 public:
  // Throws Error: "exists", "space", "layout".
  static std::unique_ptr<Ring> Create(const std::string& directory, const std::string& name, const RingSpec& spec);
  // Throws Error: "missing", "foreign".
  static std::unique_ptr<Ring> Open(const std::string& directory, const std::string& name);

  const Layout& layout() const { return layout_; }
  Segment& segment() { return *segment_; }
  Control& control() const;
  Lane& lane(uint32_t i) const;
  Slot& slot(uint32_t i) const;
  uint32_t slots() const { return layout_.header.lanes * layout_.header.slots; }

  bool closed() const { return control().closed.load(std::memory_order_acquire) != 0; }
  // Ends the ring for all, and wakes those who wait.
  void Close();
  // What the lanes do, for people; O(slots).
  std::vector<LaneReport> Report() const;

 private:
  Ring() = default;
  std::unique_ptr<Segment> segment_;
  Layout layout_;
};

// An actor's hold on a lane. Not thread-safe; any number of actors in one process.
class Actor {
 public:
  // Takes the lane, or with -1 any that nobody, or a dead process, holds. Throws Error "busy" if there is none.
  Actor(std::shared_ptr<Ring> ring, int64_t lane);
  ~Actor() { Leave(); }

  uint32_t lane() const { return lane_; }
  uint32_t incarnation() const { return incarnation_; }
  // A free slot, now open; kTimedOut, kClosed. O(K).
  int64_t Begin(int64_t deadline);
  // Returns the number of the commit. What is in the slot is the learner's from here on.
  uint64_t Commit(uint32_t slot, const Trajectory& trajectory);
  void Abandon(uint32_t slot);
  // Asks about rows of the lane's request arrays; returns the question's number. One at a time: a new one withdraws
  // the last.
  uint32_t Ask(uint32_t rows, int64_t deadline);
  // 0 once the question is answered; kTimedOut, kClosed.
  int64_t AwaitAnswer(uint32_t asked, int64_t deadline);
  // Gives the lane up. An open slot is freed.
  void Leave();

 private:
  std::shared_ptr<Ring> ring_;
  uint32_t lane_ = 0, incarnation_ = 0;
  uint64_t owner_ = 0, sequence_ = 0;
  int64_t open_ = -1;
};

// The learner's hold on the ring. Not thread-safe.
class Learner {
 public:
  // Throws Error "busy" while another living process, or another Learner of this one, has it. Takes over from a dead
  // one: goes on from the last commit that was consumed.
  explicit Learner(std::shared_ptr<Ring> ring);
  ~Learner() { Leave(); }

  // Whether there is a committed trajectory that is not consumed.
  bool AwaitCommit(int64_t deadline);
  // Whether there are `least` of them. It looks now and then: being woken at each would cost the actors.
  bool AwaitCommits(uint64_t least, int64_t deadline) const;
  uint64_t pending() const;
  // The oldest `most` trajectories that are committed and not consumed, in the order of their commits. O(pending).
  // Throws Error "foreign" if the chain is damaged.
  std::vector<Committed> Collect(uint32_t most) const;
  // Frees the slots of what Collect returned.
  void Consume(const std::vector<Committed>& committed);
  // Takes back the leases and the open slots of dead actors; returns how many slots. Asks the system about each
  // actor: not for every drain.
  uint32_t Reclaim();
  // Those that wait for an answer, and whose deadline has not passed.
  std::vector<Question> Questions() const;
  // Until there are `least` of them.
  bool AwaitQuestions(uint32_t least, int64_t deadline);
  // False: the question is withdrawn.
  bool Answer(const Question& question);
  void Leave();

 private:
  void Free(Slot& slot, Lane& lane);
  std::shared_ptr<Ring> ring_;
  uint64_t owner_ = 0;
};

}  // namespace actors
}  // namespace gear_jax

#endif  // GEAR_JAX_FFI_ACTORS_RING_H_
