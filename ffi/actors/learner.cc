// The learner's side of the ring.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "ffi/actors/chain.h"
#include "ffi/actors/futex.h"
#include "ffi/actors/ring.h"

namespace gear_jax {
namespace actors {

Learner::Learner(std::shared_ptr<Ring> ring) : ring_(std::move(ring)) {
  Control& control = ring_->control();
  uint64_t held = control.learner.load(std::memory_order_acquire);
  const uint64_t me = OwnerOfThis();
  if ((held != 0 && LifeOf(held) != Life::kDead) ||
      !control.learner.compare_exchange_strong(held, me, std::memory_order_acq_rel)) {
    const bool mine = held == me;
    throw Error("busy", "learner: got the ring " + ring_->segment().path() + " that " +
                            (mine ? "another Ingest of this process" : "process " + std::to_string(OwnerPid(held))) +
                            (LifeOf(held) == Life::kStopped ? ", which is stopped," : "") +
                            " has, wanted one without a living learner. " +
                            (mine ? "Close that one first." : "End it, or make another ring."));
  }
  owner_ = me;
  control.learner_incarnation.fetch_add(1, std::memory_order_acq_rel);
  try {
    Reclaim();
  } catch (...) {
    Leave();
    throw;
  }
}

uint64_t Learner::pending() const {
  const Control& control = ring_->control();
  return NumberOf(control.head.load(std::memory_order_acquire)) - control.consumed.load(std::memory_order_relaxed);
}

bool Learner::AwaitCommit(int64_t deadline) {
  Control& control = ring_->control();
  return AwaitEvent(control.commits, control.learner_waits, deadline, [&] { return pending() > 0; });
}

bool Learner::AwaitCommits(uint64_t least, int64_t deadline) const {
  constexpr int64_t kLookNs = 100'000;
  while (pending() < least) {
    const int64_t left = deadline - Now();
    if (left <= 0) return false;
    std::this_thread::sleep_for(std::chrono::nanoseconds(std::min(left, kLookNs)));
  }
  return true;
}

std::vector<Committed> Learner::Collect(uint32_t most) const {
  const Control& control = ring_->control();
  const uint64_t head = control.head.load(std::memory_order_acquire);
  const uint64_t consumed = control.consumed.load(std::memory_order_relaxed);
  const uint64_t count = NumberOf(head) - consumed;
  const auto damaged = [&](uint32_t slot, uint64_t number) {
    return Error("foreign", "ring " + ring_->segment().path() + ": got slot " + std::to_string(slot) + " for commit " +
                                std::to_string(number) +
                                ", wanted a slot that holds it: something "
                                "else has written to the file. Remove it and start learner and actors anew.");
  };
  if (count > ring_->slots()) throw damaged(SlotOf(head), NumberOf(head));
  std::vector<Committed> found;
  found.reserve(std::min<uint64_t>(count, most));
  uint32_t index = SlotOf(head);
  for (uint64_t number = NumberOf(head); number != consumed; --number) {
    if (index >= ring_->slots()) throw damaged(index, number);
    const Slot& slot = ring_->slot(index);
    const uint32_t length = slot.length.load(std::memory_order_relaxed);
    if (slot.number.load(std::memory_order_relaxed) != number || length > ring_->layout().header.steps) {
      throw damaged(index, number);
    }
    if (number - consumed <= most) {
      found.push_back(
          {index,
           index / ring_->layout().header.slots,
           number,
           slot.sequence.load(std::memory_order_relaxed),
           {length, slot.flags.load(std::memory_order_relaxed), slot.priority.load(std::memory_order_relaxed),
            slot.version.load(std::memory_order_relaxed), slot.checksum.load(std::memory_order_relaxed)}});
    }
    index = slot.before.load(std::memory_order_relaxed);
  }
  std::reverse(found.begin(), found.end());
  return found;
}

void Learner::Free(Slot& slot, Lane& lane) {
  slot.state.store(StateWord(0, kFree), std::memory_order_release);
  Notify(lane.freed, lane.actor_waits);
}

void Learner::Consume(const std::vector<Committed>& committed) {
  if (committed.empty()) return;
  // First what is done with: if this process dies in between, the next learner finds slots that nothing names, and
  // frees them. The other way round it would find a chain with strange slots in it.
  ring_->control().consumed.store(committed.back().number, std::memory_order_release);
  for (const Committed& c : committed) Free(ring_->slot(c.slot), ring_->lane(c.lane));
}

uint32_t Learner::Reclaim() {
  const Header& header = ring_->layout().header;
  for (uint32_t i = 0; i < header.lanes; ++i) {
    uint64_t owner = ring_->lane(i).owner.load(std::memory_order_acquire);
    if (owner != 0 && LifeOf(owner) == Life::kDead) {
      ring_->lane(i).owner.compare_exchange_strong(owner, 0, std::memory_order_acq_rel);
    }
  }
  // The states before the head: what is seen committed is then in the chain of this head, or consumed.
  std::vector<uint64_t> states(ring_->slots());
  for (uint32_t s = 0; s < states.size(); ++s) states[s] = ring_->slot(s).state.load(std::memory_order_acquire);
  std::vector<bool> orphan(states.size());
  for (uint32_t s = 0; s < states.size(); ++s) {
    const Lane& lane = ring_->lane(s / header.slots);
    // The owner before the incarnation: a new owner counts up only once it has the lane.
    const bool free_lane = lane.owner.load(std::memory_order_acquire) == 0;
    const bool old = lane.incarnation.load(std::memory_order_acquire) != IncarnationOf(states[s]);
    const SlotState state = StateOf(states[s]);
    orphan[s] = state == kCommitted || (state == kOpen && (free_lane || old));
  }
  for (const Committed& c : Collect(UINT32_MAX)) orphan[c.slot] = false;
  uint32_t freed = 0;
  for (uint32_t s = 0; s < states.size(); ++s) {
    if (!orphan[s]) continue;
    Lane& lane = ring_->lane(s / header.slots);
    if (!ring_->slot(s).state.compare_exchange_strong(states[s], StateWord(0, kFree), std::memory_order_acq_rel)) {
      continue;
    }
    if (StateOf(states[s]) == kOpen) {
      lane.abandoned.fetch_add(1, std::memory_order_relaxed);
      ++freed;
    }
    Notify(lane.freed, lane.actor_waits);
  }
  return freed;
}

std::vector<Question> Learner::Questions() const {
  std::vector<Question> found;
  const Header& header = ring_->layout().header;
  const int64_t now = Now();
  for (uint32_t i = 0; i < header.lanes; ++i) {
    const Lane& lane = ring_->lane(i);
    const uint32_t asked = lane.asked.load(std::memory_order_acquire);
    if (asked == lane.answered.load(std::memory_order_relaxed)) continue;
    if (lane.until.load(std::memory_order_relaxed) <= now) continue;
    found.push_back({i, asked, std::min(lane.rows.load(std::memory_order_relaxed), header.requests)});
  }
  return found;
}

bool Learner::AwaitQuestions(uint32_t least, int64_t deadline) {
  Control& control = ring_->control();
  return AwaitEvent(control.questions, control.server_waits, deadline, [&] { return Questions().size() >= least; });
}

bool Learner::Answer(const Question& question) {
  Lane& lane = ring_->lane(question.lane);
  if (lane.asked.load(std::memory_order_relaxed) != question.asked) return false;
  lane.answered.store(question.asked, std::memory_order_seq_cst);
  if (lane.actor_waits_answer.load(std::memory_order_seq_cst) != 0) FutexWake(lane.answered);
  return true;
}

void Learner::Leave() {
  if (owner_ == 0) return;
  // A child that was forked has a copy of this, and not the ring.
  if (OwnerPid(owner_) == getpid()) {
    ring_->control().learner.compare_exchange_strong(owner_, 0, std::memory_order_acq_rel);
  }
  owner_ = 0;
}

}  // namespace actors
}  // namespace gear_jax
