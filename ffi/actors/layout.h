// What a ring's shared memory holds, and where. Version 1.
//
//   Header          who and how large; never changes once the ring has its name
//   Control         the head of the chain of committed slots, the learner's lease
//   Lane[N]         an actor's lease and its mailbox
//   Slot[N * K]     the state of each slot of a trajectory; slot s is one of lane s / K
//   Column[...]     the columns: name, dtype, shape, place
//   data            for each column one array: of a table's column [N * K, T, *shape]; of what actors ask and are
//                   answered [N, rows, *shape]; each at a multiple of 64 bytes
//
// Everything in the byte order of the machine: only its own processes see it.
#ifndef GEAR_JAX_FFI_ACTORS_LAYOUT_H_
#define GEAR_JAX_FFI_ACTORS_LAYOUT_H_

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

namespace gear_jax {
namespace actors {

constexpr char kMagic[8] = {'G', 'E', 'A', 'R', 'R', 'I', 'N', 'G'};
constexpr uint32_t kVersion = 1;
constexpr uint32_t kByteOrder = 0x01020304;
constexpr int kMaxRank = 8;
constexpr uint64_t kAlignment = 64;

enum class ColumnKind : uint32_t { kTrajectory = 0, kRequest = 1, kResponse = 2 };

struct Header {
  char magic[8];
  uint32_t version;
  uint32_t byte_order;
  uint64_t layout_hash;  // of all that follows up to `pid_namespace`, and of the columns
  uint64_t segment_bytes;
  uint64_t steps;     // T
  uint32_t lanes;     // N
  uint32_t slots;     // K, of each lane
  uint32_t columns;   // of all kinds
  uint32_t requests;  // the most rows that an actor may ask about at once; 0: actors cannot ask
  uint64_t lanes_offset, slots_offset, columns_offset, data_offset;
  uint64_t pid_namespace;
  uint64_t identity;  // random: the numbers of another ring's commits mean other trajectories, whatever its file
  uint8_t reserved[24];
};
static_assert(sizeof(Header) == 128, "");

struct alignas(64) Control {
  // The chain of committed slots, in the order of commits: number of the last commit << 20 | its slot.
  std::atomic<uint64_t> head;
  alignas(64) std::atomic<uint64_t> learner;  // its owner word (process.h)
  std::atomic<uint64_t> consumed;             // the number of the last commit that the learner is done with
  std::atomic<uint32_t> learner_incarnation;
  std::atomic<uint32_t> closed;
  std::atomic<uint32_t> wants_versions;       // 1: the learner's table keeps the versions of policies
  alignas(64) std::atomic<uint32_t> commits;  // events: futex words and who waits on them
  std::atomic<uint32_t> learner_waits;
  alignas(64) std::atomic<uint32_t> questions;
  std::atomic<uint32_t> server_waits;
};
static_assert(sizeof(Control) == 256, "");

struct alignas(64) Lane {
  std::atomic<uint64_t> owner;
  std::atomic<uint64_t> committed;  // trajectories, over all its owners
  std::atomic<uint64_t> abandoned;  // open ones that were taken back
  std::atomic<uint64_t> waited;     // nanoseconds that actors waited for a slot
  std::atomic<uint32_t> incarnation;
  std::atomic<uint32_t> freed;  // events
  std::atomic<uint32_t> actor_waits;
  std::atomic<uint32_t> next;  // the slot of the lane that is to be used next
  alignas(64) std::atomic<uint32_t> asked;
  std::atomic<uint32_t> answered;
  std::atomic<uint32_t> rows;
  std::atomic<uint32_t> actor_waits_answer;
  std::atomic<int64_t> until;  // of the question, a time of Now
};
static_assert(sizeof(Lane) == 128, "");

enum SlotState : uint32_t { kFree = 0, kOpen = 1, kCommitted = 2 };

struct alignas(64) Slot {
  std::atomic<uint64_t> state;   // incarnation of the lane << 32 | SlotState
  std::atomic<uint64_t> number;  // of the commit
  std::atomic<uint32_t> before;  // the slot of the commit before
  std::atomic<uint32_t> length;
  std::atomic<uint32_t> flags;
  std::atomic<float> priority;
  std::atomic<int64_t> version;
  std::atomic<uint64_t> sequence;  // of the lane's trajectories
  std::atomic<uint64_t> checksum;
};
static_assert(sizeof(Slot) == 64, "");

struct Column {
  char name[120];
  char dtype[24];
  uint32_t kind;
  uint32_t rank;
  int64_t shape[kMaxRank];
  uint64_t item_bytes;
  uint64_t offset;
  uint64_t bytes;
};
static_assert(sizeof(Column) == 240, "");

struct ColumnSpec {
  ColumnKind kind;
  std::string name;
  std::string dtype;
  uint64_t item_bytes;
  std::vector<int64_t> shape;
};

struct RingSpec {
  uint64_t steps = 0;
  uint32_t lanes = 0;
  uint32_t slots = 0;
  uint32_t requests = 0;
  std::vector<ColumnSpec> columns;
};

// Header and columns of a ring, filled in. Throws Error "layout" for what the format cannot hold.
struct Layout {
  Header header;
  std::vector<Column> columns;
};
Layout MakeLayout(const RingSpec& spec);

// Reads and checks what Segment::Open has mapped. Throws Error "foreign", naming what differs.
Layout ReadLayout(const uint8_t* data, uint64_t bytes, const std::string& path);

}  // namespace actors
}  // namespace gear_jax

#endif  // GEAR_JAX_FFI_ACTORS_LAYOUT_H_
