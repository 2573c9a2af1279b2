#include "ffi/actors/layout.h"

#include <cstddef>
#include <cstring>
#include <random>

#include "ffi/actors/process.h"
#include "ffi/actors/segment.h"

namespace gear_jax {
namespace actors {
namespace {

constexpr uint64_t kPage = 4096;
constexpr uint64_t kMostBytes = uint64_t{1} << 46;
constexpr uint32_t kMostSlots = (1u << 20) - 1;

uint64_t RoundUp(uint64_t n, uint64_t to) { return (n + to - 1) / to * to; }

void Fnv1a(const void* data, size_t bytes, uint64_t* hash) {
  const uint8_t* p = static_cast<const uint8_t*>(data);
  for (size_t i = 0; i < bytes; ++i) *hash = (*hash ^ p[i]) * 0x100000001b3u;
}

uint64_t HashOf(const Header& header, const Column* columns) {
  uint64_t hash = 0xcbf29ce484222325u;
  const size_t begin = offsetof(Header, segment_bytes);
  Fnv1a(reinterpret_cast<const uint8_t*>(&header) + begin, offsetof(Header, pid_namespace) - begin, &hash);
  Fnv1a(columns, sizeof(Column) * header.columns, &hash);
  return hash;
}

Error Refused(const std::string& what, const std::string& got, const std::string& wanted, const std::string& fix) {
  return Error("layout", what + ": got " + got + ", wanted " + wanted + ". " + fix);
}

// The product, or 0 if it passes kMostBytes.
uint64_t Times(uint64_t a, uint64_t b) { return a != 0 && b > kMostBytes / a ? 0 : a * b; }

Column MakeColumn(const ColumnSpec& spec, uint64_t rows) {
  Column column;
  std::memset(&column, 0, sizeof(column));
  if (spec.name.size() >= sizeof(column.name)) {
    throw Refused("column " + spec.name, std::to_string(spec.name.size()) + " bytes of name",
                  "at most " + std::to_string(sizeof(column.name) - 1), "Shorten it.");
  }
  if (spec.dtype.size() >= sizeof(column.dtype) || spec.shape.size() > kMaxRank) {
    throw Refused("column " + spec.name, spec.dtype + " of rank " + std::to_string(spec.shape.size()),
                  "a rank of at most " + std::to_string(kMaxRank), "Reshape the column.");
  }
  std::memcpy(column.name, spec.name.data(), spec.name.size());
  std::memcpy(column.dtype, spec.dtype.data(), spec.dtype.size());
  column.kind = static_cast<uint32_t>(spec.kind);
  column.rank = static_cast<uint32_t>(spec.shape.size());
  column.item_bytes = spec.item_bytes;
  column.bytes = Times(rows, spec.item_bytes);
  for (size_t i = 0; i < spec.shape.size(); ++i) {
    column.shape[i] = spec.shape[i];
    column.bytes = Times(column.bytes, static_cast<uint64_t>(spec.shape[i]));
  }
  if (column.bytes == 0) {
    throw Refused("column " + spec.name, "no bytes, or more than 2^46", "a column that fits memory",
                  "Use fewer slots, or a shorter trajectory_length.");
  }
  return column;
}

}  // namespace

Layout MakeLayout(const RingSpec& spec) {
  if (spec.steps == 0 || spec.steps > INT32_MAX || spec.lanes == 0 || spec.slots == 0 ||
      uint64_t{spec.lanes} * spec.slots > kMostSlots) {
    throw Refused("ring",
                  std::to_string(spec.lanes) + " actors with " + std::to_string(spec.slots) + " slots of " +
                      std::to_string(spec.steps) + " steps",
                  "one or more of each, and at most " + std::to_string(kMostSlots) + " slots", "Use fewer.");
  }
  const uint64_t slots = uint64_t{spec.lanes} * spec.slots;
  Layout layout;
  std::memset(&layout.header, 0, sizeof(layout.header));
  Header& header = layout.header;
  std::memcpy(header.magic, kMagic, sizeof(kMagic));
  header.version = kVersion;
  header.byte_order = kByteOrder;
  header.steps = spec.steps;
  header.lanes = spec.lanes;
  header.slots = spec.slots;
  header.columns = static_cast<uint32_t>(spec.columns.size());
  header.requests = spec.requests;
  header.lanes_offset = sizeof(Header) + sizeof(Control);
  header.slots_offset = header.lanes_offset + sizeof(Lane) * spec.lanes;
  header.columns_offset = header.slots_offset + sizeof(Slot) * slots;
  header.data_offset = RoundUp(header.columns_offset + sizeof(Column) * spec.columns.size(), kPage);
  uint64_t end = header.data_offset;
  for (const ColumnSpec& c : spec.columns) {
    const bool trajectory = c.kind == ColumnKind::kTrajectory;
    Column column = MakeColumn(c, trajectory ? slots * spec.steps : uint64_t{spec.lanes} * spec.requests);
    column.offset = end;
    end = RoundUp(end + column.bytes, kAlignment);
    layout.columns.push_back(column);
  }
  header.segment_bytes = RoundUp(end, kPage);
  header.layout_hash = HashOf(header, layout.columns.data());
  header.pid_namespace = PidNamespace();
  std::random_device random;
  header.identity = uint64_t{random()} << 32 | random() | 1;
  return layout;
}

Layout ReadLayout(const uint8_t* data, uint64_t bytes, const std::string& path) {
  const auto foreign = [&](const std::string& got, const std::string& wanted, const std::string& fix) {
    return Error("foreign", "ring " + path + ": got " + got + ", wanted " + wanted + ". " + fix);
  };
  const std::string anew = "Remove the file and start the learner anew.";
  Layout layout;
  if (bytes < sizeof(Header)) throw foreign(std::to_string(bytes) + " bytes", "a ring", anew);
  std::memcpy(&layout.header, data, sizeof(Header));
  const Header& header = layout.header;
  if (std::memcmp(header.magic, kMagic, sizeof(kMagic)) != 0) throw foreign("another file", "a ring", anew);
  if (header.version != kVersion || header.byte_order != kByteOrder) {
    throw foreign("a ring of version " + std::to_string(header.version), "version " + std::to_string(kVersion),
                  "Use the same gear_jax in the learner and its actors.");
  }
  if (header.segment_bytes > bytes) {
    throw foreign(std::to_string(bytes) + " bytes", std::to_string(header.segment_bytes) + ": it is cut short", anew);
  }
  const uint64_t slots = uint64_t{header.lanes} * header.slots;
  const bool sane = slots != 0 && slots <= kMostSlots && header.columns <= bytes / sizeof(Column) &&
                    header.lanes_offset == sizeof(Header) + sizeof(Control) &&
                    header.slots_offset == header.lanes_offset + sizeof(Lane) * header.lanes &&
                    header.columns_offset == header.slots_offset + sizeof(Slot) * slots &&
                    header.columns_offset + sizeof(Column) * header.columns <= header.data_offset;
  if (!sane) throw foreign("a damaged header", "a ring", anew);
  layout.columns.resize(header.columns);
  std::memcpy(layout.columns.data(), data + header.columns_offset, sizeof(Column) * header.columns);
  if (HashOf(header, layout.columns.data()) != header.layout_hash) throw foreign("a damaged header", "a ring", anew);
  for (const Column& c : layout.columns) {
    if (c.kind > static_cast<uint32_t>(ColumnKind::kResponse) || c.rank > kMaxRank || c.offset < header.data_offset ||
        c.offset > bytes || c.bytes > bytes - c.offset || c.name[sizeof(c.name) - 1] != 0 ||
        c.dtype[sizeof(c.dtype) - 1] != 0) {
      throw foreign("a damaged header", "a ring", anew);
    }
  }
  if (header.pid_namespace != PidNamespace()) {
    throw Error("elsewhere", "ring " + path +
                                 ": got a ring of another PID namespace, wanted one of this container, where process "
                                 "numbers mean the same. Run learner and actors in one container, or let them share "
                                 "a PID namespace.");
  }
  return layout;
}

}  // namespace actors
}  // namespace gear_jax
