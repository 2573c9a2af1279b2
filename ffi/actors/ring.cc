#include "ffi/actors/ring.h"

#include <cstring>
#include <new>

#include "ffi/actors/futex.h"

namespace gear_jax {
namespace actors {

Control& Ring::control() const { return *reinterpret_cast<Control*>(segment_->data() + sizeof(Header)); }

Lane& Ring::lane(uint32_t i) const {
  return reinterpret_cast<Lane*>(segment_->data() + layout_.header.lanes_offset)[i];
}

Slot& Ring::slot(uint32_t i) const {
  return reinterpret_cast<Slot*>(segment_->data() + layout_.header.slots_offset)[i];
}

std::unique_ptr<Ring> Ring::Create(const std::string& directory, const std::string& name, const RingSpec& spec) {
  std::unique_ptr<Ring> ring(new Ring);
  ring->layout_ = MakeLayout(spec);
  const Header& header = ring->layout_.header;
  ring->segment_ = Segment::Create(directory, name, header.segment_bytes);
  // The file is all zeros, and of these words that is the first state; nobody else sees it yet.
  uint8_t* data = ring->segment_->data();
  std::memcpy(data, &header, sizeof(header));
  std::memcpy(data + header.columns_offset, ring->layout_.columns.data(), sizeof(Column) * header.columns);
  ring->segment_->Publish();
  return ring;
}

std::unique_ptr<Ring> Ring::Open(const std::string& directory, const std::string& name) {
  std::unique_ptr<Ring> ring(new Ring);
  ring->segment_ = Segment::Open(directory, name, sizeof(Header));
  ring->layout_ = ReadLayout(ring->segment_->data(), ring->segment_->bytes(), ring->segment_->path());
  return ring;
}

void Ring::Close() {
  Control& c = control();
  c.closed.store(1, std::memory_order_seq_cst);
  for (std::atomic<uint32_t>* events : {&c.commits, &c.questions}) {
    events->fetch_add(1, std::memory_order_seq_cst);
    FutexWake(*events);
  }
  for (uint32_t i = 0; i < layout_.header.lanes; ++i) {
    lane(i).freed.fetch_add(1, std::memory_order_seq_cst);
    FutexWake(lane(i).freed);
    FutexWake(lane(i).answered);
  }
}

std::vector<LaneReport> Ring::Report() const {
  std::vector<LaneReport> found(layout_.header.lanes);
  for (uint32_t i = 0; i < found.size(); ++i) {
    const Lane& l = lane(i);
    const uint64_t owner = l.owner.load(std::memory_order_acquire);
    LaneReport& r = found[i];
    r = {OwnerPid(owner),
         LifeOf(owner),
         l.committed.load(),
         l.abandoned.load(),
         l.waited.load(),
         l.incarnation.load(),
         0,
         0};
    for (uint32_t k = 0; k < layout_.header.slots; ++k) {
      const uint64_t state = slot(i * layout_.header.slots + k).state.load(std::memory_order_relaxed);
      r.open += static_cast<uint32_t>(state) == kOpen;
      r.pending += static_cast<uint32_t>(state) == kCommitted;
    }
  }
  return found;
}

}  // namespace actors
}  // namespace gear_jax
