// The two words that a commit writes: the head of the chain, and the state of a slot.
#ifndef GEAR_JAX_FFI_ACTORS_CHAIN_H_
#define GEAR_JAX_FFI_ACTORS_CHAIN_H_

#include <cstdint>

#include "ffi/actors/layout.h"

namespace gear_jax {
namespace actors {

constexpr int kSlotBits = 20;
constexpr uint64_t kSlotMask = (uint64_t{1} << kSlotBits) - 1;

// 2^44 commits: half a year at a million a second.
inline uint64_t HeadWord(uint64_t number, uint32_t slot) { return number << kSlotBits | slot; }
inline uint64_t NumberOf(uint64_t head) { return head >> kSlotBits; }
inline uint32_t SlotOf(uint64_t head) { return static_cast<uint32_t>(head & kSlotMask); }

inline uint64_t StateWord(uint32_t incarnation, SlotState state) { return uint64_t{incarnation} << 32 | state; }
inline SlotState StateOf(uint64_t word) { return static_cast<SlotState>(static_cast<uint32_t>(word)); }
inline uint32_t IncarnationOf(uint64_t word) { return static_cast<uint32_t>(word >> 32); }

}  // namespace actors
}  // namespace gear_jax

#endif  // GEAR_JAX_FFI_ACTORS_CHAIN_H_
