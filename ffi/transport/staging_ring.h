// Where the bytes of reads under way lie in a piece of memory: taken and given back in the same order. No verbs here.
#ifndef GEAR_JAX_FFI_TRANSPORT_STAGING_RING_H_
#define GEAR_JAX_FFI_TRANSPORT_STAGING_RING_H_

#include <cstdint>
#include <deque>

namespace gear_jax::transport {

// Not thread-safe.
class StagingRing {
 public:
  static constexpr uint64_t kNone = ~uint64_t{0};
  static constexpr uint64_t kAlign = 64;

  explicit StagingRing(uint64_t capacity) : capacity_(capacity / kAlign * kAlign) {}

  // The offset of `bytes` contiguous bytes, aligned to kAlign; kNone: no room now (or ever, beyond the capacity).
  uint64_t Take(uint64_t bytes) {
    if (bytes == 0 || bytes > capacity_) return kNone;
    const uint64_t size = (bytes + kAlign - 1) / kAlign * kAlign;
    uint64_t begin = 0;
    if (!spans_.empty()) {
      const uint64_t oldest = spans_.front().begin;
      const uint64_t end = spans_.back().end;
      if (end > oldest) {  // not wrapped: room behind the newest, else before the oldest
        if (size <= capacity_ - end) {
          begin = end;
        } else if (size > oldest) {
          return kNone;
        }
      } else {  // wrapped: room only up to the oldest
        if (size > oldest - end) return kNone;
        begin = end;
      }
    }
    spans_.push_back({begin, begin + size});
    return begin;
  }

  // Gives back what was taken first. There must be something.
  void Give() { spans_.pop_front(); }

  void Clear() { spans_.clear(); }
  uint64_t taken() const { return spans_.size(); }
  uint64_t capacity() const { return capacity_; }

 private:
  struct Span {
    uint64_t begin, end;
  };
  uint64_t capacity_;
  std::deque<Span> spans_;
};

}  // namespace gear_jax::transport

#endif  // GEAR_JAX_FFI_TRANSPORT_STAGING_RING_H_
