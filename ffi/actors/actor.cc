// The actor's side of the ring.
#include <unistd.h>

#include "ffi/actors/chain.h"
#include "ffi/actors/futex.h"
#include "ffi/actors/ring.h"

namespace gear_jax {
namespace actors {

Actor::Actor(std::shared_ptr<Ring> ring, int64_t wanted) : ring_(std::move(ring)) {
  const uint32_t lanes = ring_->layout().header.lanes;
  if (wanted >= int64_t{lanes}) {
    throw Error("busy", "actor: got number " + std::to_string(wanted) + ", wanted one below " + std::to_string(lanes) +
                            ". Make the ring for more actors.");
  }
  owner_ = OwnerOfThis();
  const uint32_t first = wanted < 0 ? 0 : static_cast<uint32_t>(wanted);
  const uint32_t last = wanted < 0 ? lanes : first + 1;
  for (lane_ = first; lane_ < last; ++lane_) {
    Lane& lane = ring_->lane(lane_);
    uint64_t held = lane.owner.load(std::memory_order_acquire);
    bool taken = false;
    // Again where it fails: the learner may have taken the lane from the dead just now.
    while (!taken && (held == 0 || LifeOf(held) == Life::kDead)) {
      taken = lane.owner.compare_exchange_strong(held, owner_, std::memory_order_acq_rel);
    }
    if (!taken) continue;
    // From here on the open slots of owners before are nobody's, and the learner takes them back.
    incarnation_ = lane.incarnation.fetch_add(1, std::memory_order_acq_rel) + 1;
    return;
  }
  const uint64_t holder = ring_->lane(first).owner.load();
  owner_ = 0;
  throw Error("busy", "actor: got " +
                          (wanted < 0 ? std::to_string(lanes) + " lanes" : "lane " + std::to_string(wanted)) +
                          " that living processes hold (the first: " + std::to_string(OwnerPid(holder)) +
                          "), wanted a free one. End one of them (a stopped one, SIGSTOP, keeps its lane), or make the "
                          "ring for more actors.");
}

int64_t Actor::Begin(int64_t deadline) {
  Lane& lane = ring_->lane(lane_);
  const uint32_t slots = ring_->layout().header.slots;
  int64_t found = kTimedOut;
  const auto look = [&] {
    if (ring_->closed()) return found = kClosed, true;
    const uint32_t next = lane.next.load(std::memory_order_relaxed);
    for (uint32_t i = 0; i < slots; ++i) {
      const uint32_t k = (next + i) % slots;
      Slot& slot = ring_->slot(lane_ * slots + k);
      if (StateOf(slot.state.load(std::memory_order_acquire)) != kFree) continue;
      slot.state.store(StateWord(incarnation_, kOpen), std::memory_order_relaxed);
      lane.next.store((k + 1) % slots, std::memory_order_relaxed);
      found = int64_t{lane_} * slots + k;
      return true;
    }
    return false;
  };
  if (!look()) {
    const int64_t start = Now();
    AwaitEvent(lane.freed, lane.actor_waits, deadline, look);
    lane.waited.fetch_add(static_cast<uint64_t>(Now() - start), std::memory_order_relaxed);
  }
  if (found >= 0) open_ = found;
  return found;
}

uint64_t Actor::Commit(uint32_t index, const Trajectory& trajectory) {
  Slot& slot = ring_->slot(index);
  Lane& lane = ring_->lane(lane_);
  Control& control = ring_->control();
  slot.length.store(trajectory.length, std::memory_order_relaxed);
  slot.flags.store(trajectory.flags, std::memory_order_relaxed);
  slot.priority.store(trajectory.priority, std::memory_order_relaxed);
  slot.version.store(trajectory.version, std::memory_order_relaxed);
  slot.checksum.store(trajectory.checksum, std::memory_order_relaxed);
  slot.sequence.store(sequence_++, std::memory_order_relaxed);
  uint64_t head = control.head.load(std::memory_order_relaxed);
  uint64_t number;
  do {
    number = NumberOf(head) + 1;
    slot.number.store(number, std::memory_order_relaxed);
    slot.before.store(SlotOf(head), std::memory_order_relaxed);
  } while (!control.head.compare_exchange_weak(head, HeadWord(number, index), std::memory_order_release,
                                               std::memory_order_relaxed));
  // The learner may have freed the slot already.
  uint64_t open = StateWord(incarnation_, kOpen);
  slot.state.compare_exchange_strong(open, StateWord(incarnation_, kCommitted), std::memory_order_release,
                                     std::memory_order_relaxed);
  open_ = -1;
  lane.committed.fetch_add(1, std::memory_order_relaxed);
  Notify(control.commits, control.learner_waits);
  return number;
}

void Actor::Abandon(uint32_t index) {
  ring_->slot(index).state.store(StateWord(incarnation_, kFree), std::memory_order_release);
  open_ = -1;
}

uint32_t Actor::Ask(uint32_t rows, int64_t deadline) {
  Lane& lane = ring_->lane(lane_);
  Control& control = ring_->control();
  lane.rows.store(rows, std::memory_order_relaxed);
  lane.until.store(deadline, std::memory_order_relaxed);
  const uint32_t asked = lane.asked.load(std::memory_order_relaxed) + 1;
  lane.asked.store(asked, std::memory_order_release);
  Notify(control.questions, control.server_waits);
  return asked;
}

int64_t Actor::AwaitAnswer(uint32_t asked, int64_t deadline) {
  Lane& lane = ring_->lane(lane_);
  int64_t result = kTimedOut;
  AwaitEvent(lane.answered, lane.actor_waits_answer, deadline, [&] {
    if (lane.answered.load(std::memory_order_acquire) == asked) return result = 0, true;
    if (ring_->closed()) return result = kClosed, true;
    return false;
  });
  return result;
}

void Actor::Leave() {
  if (owner_ == 0) return;
  Lane& lane = ring_->lane(lane_);
  // A child that was forked has a copy of this, and not the lane.
  if (OwnerPid(owner_) == getpid() && lane.owner.load() == owner_ && lane.incarnation.load() == incarnation_) {
    if (open_ >= 0) Abandon(static_cast<uint32_t>(open_));
    lane.until.store(0, std::memory_order_relaxed);
    uint64_t mine = owner_;
    lane.owner.compare_exchange_strong(mine, 0, std::memory_order_acq_rel);
  }
  owner_ = 0;
}

}  // namespace actors
}  // namespace gear_jax
