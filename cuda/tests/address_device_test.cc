// How kernels find tables by their addresses, run on the CPU.
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "cuda/gather_device.h"

namespace gear_jax {
namespace {

constexpr int32_t kOwner = 77;

struct Registry {
  alignas(128) uint8_t table[64] = {};
  std::vector<RegisteredMemory> entries = std::vector<RegisteredMemory>(3);
  uint64_t fault = 0;

  Registry() {
    entries[1] = {table, 64, 5};
    entries[2] = {table + 1, 48, 6};
  }
  RegistryView View() { return {entries.data(), static_cast<int64_t>(entries.size()), kOwner, &fault}; }
};

AddressFault Find(Registry& registry, const Address& address, int64_t bytes, uint32_t alignment, const uint8_t** base) {
  uint32_t words[4];
  address.Write(words);
  AddressFault fault;
  *base = FindTable(registry.View(), words, bytes, alignment, &fault);
  return fault;
}

TEST(FindTable, EveryFault) {
  Registry registry;
  const uint8_t* base = nullptr;
  EXPECT_EQ(Find(registry, {1, 5, kOwner}, 64, 128, &base), AddressFault::kNone);
  EXPECT_EQ(base, registry.table);
  EXPECT_EQ(Find(registry, {2, 6, kOwner}, 48, 1, &base), AddressFault::kNone);
  EXPECT_EQ(base, registry.table + 1);
  const auto fails = [&](const Address& address, int64_t bytes, uint32_t alignment, AddressFault wanted) {
    EXPECT_EQ(Find(registry, address, bytes, alignment, &base), wanted);
    EXPECT_EQ(base, nullptr);
  };
  fails({2, 6, kOwner}, 48, 16, AddressFault::kMisaligned);
  fails({1, 5, kOwner}, 65, 16, AddressFault::kSmall);
  fails({1, 4, kOwner}, 64, 16, AddressFault::kFreed);
  fails({0, 5, kOwner}, 0, 16, AddressFault::kFreed);
  fails({1, 5, kOwner + 1}, 64, 16, AddressFault::kForeign);
  fails({1, 0, kOwner}, 64, 16, AddressFault::kForeign);
  fails({3, 5, kOwner}, 64, 16, AddressFault::kForeign);
  fails({-1, 5, kOwner}, 64, 16, AddressFault::kForeign);
  fails(Address{}, 0, 16, AddressFault::kForeign);
}

TEST(Fault, PacksIntoOneWord) {
  for (const int32_t column : {0, 1, 4000, INT32_MAX}) {
    const uint64_t packed = PackFault(AddressFault::kSmall, column);
    EXPECT_NE(packed, 0u);
    EXPECT_EQ(FaultOf(packed), AddressFault::kSmall);
    EXPECT_EQ(ColumnOf(packed), column);
  }
}

struct Call {
  explicit Call(const Address& address) {
    address.Write(words);
    column.address = words;
    column.address_alignment = 16;
    column.out = out;
    column.step_bytes = 16;
    column.window = {-1, 3, true, Pad::kHead};
    column.pad_value.fill(9);
    call = {2, 2, 2, slot, anchor, length, {column}, {{mask, column.window, words, 16, 16}}};
  }
  uint32_t words[4];
  int32_t slot[2] = {1, 0}, anchor[2] = {1, 0}, length[2] = {2, 1};
  alignas(16) uint8_t out[2 * 3 * 16] = {};
  uint8_t mask[16] = {};
  GatherColumn column;
  GatherCall call;

  void Run(const RegistryView& registry, AddressFault wanted) {
    const GatherRows rows{call.rows, call.slots, call.steps, slot, anchor, length};
    GatherEntry entry = MakeEntry(call, call.columns[0]);
    EXPECT_TRUE(entry.given == Given::kAddress && IsAligned(entry));
    EXPECT_EQ(Resolve(registry, rows, &entry), wanted);
    for (int64_t unit = 0; unit < Units(call, entry); ++unit) {
      const int32_t row = static_cast<int32_t>(unit / entry.units.d);
      int64_t offset;
      const uint8_t* from = AlignedSource(rows, entry, rows.Read(row), unit % entry.units.d, &offset);
      const ChunkPlan plan = PlanGather(rows, entry, rows.Read(row), unit % entry.units.d);
      EXPECT_EQ(from != nullptr, plan.needs_low());
      EXPECT_FALSE(plan.needs_high());
      std::memcpy(out + 16 * unit, from == nullptr ? reinterpret_cast<const uint8_t*>(&entry.pad) : from, 16);
    }
    GatherEntry of_mask = MakeEntry(call, call.masks[0]);
    EXPECT_EQ(Resolve(registry, rows, &of_mask), wanted);
    int32_t count;
    StoreBytes(mask, MaskChunk(rows, of_mask, 0, &count), 0, 6);
  }
};

TEST(Resolve, AGoodAddressReadsItsTable) {
  Registry registry;
  for (int i = 0; i < 64; ++i) registry.table[i] = static_cast<uint8_t>(100 + i / 16);
  Call good({1, 5, kOwner});
  good.Run(registry.View(), AddressFault::kNone);
  const uint8_t want[] = {9, 102, 103, 9, 9, 100};
  const uint8_t want_mask[] = {0, 1, 1, 0, 0, 1};
  for (int i = 0; i < 6; ++i) EXPECT_EQ(good.out[16 * i + 15], want[i]) << i;
  EXPECT_EQ(std::memcmp(good.mask, want_mask, 6), 0);
}

TEST(Resolve, ABadAddressGivesPaddingAndReadsNothing) {
  Registry registry;
  const std::pair<Address, AddressFault> bad[] = {{{1, 4, kOwner}, AddressFault::kFreed},
                                                  {{1, 5, 1}, AddressFault::kForeign},
                                                  {{2, 6, kOwner}, AddressFault::kSmall}};
  for (const auto& [address, fault] : bad) {
    Call call(address);
    call.Run(registry.View(), fault);
    for (const uint8_t b : call.out) EXPECT_EQ(b, 9);
    for (const uint8_t b : call.mask) EXPECT_EQ(b, 0);
  }
}

// Rows of all lengths from memory of all alignments, also where more is known of it than the address says.
TEST(Resolve, AgreesWithTheCpu) {
  constexpr int64_t kSlots = 3, kSteps = 5, kRows = 6, kMargin = 256;
  int32_t slot[kRows] = {0, 2, 1, -1, 2, 0}, anchor[kRows] = {0, 1, 4, 0, -1, 3}, length[kRows] = {5, 5, 5, 5, 3, 4};
  for (const int64_t width : {3, 16, 17, 128, 352, 1040}) {
    for (const int64_t shift : {0, 3, 16, 64}) {
      const int64_t bytes = kSlots * kSteps * width;
      std::vector<uint8_t> memory(bytes + 2 * kMargin), out(kRows * 4 * width + 2 * kMargin), want(kRows * 4 * width);
      for (size_t i = 0; i < memory.size(); ++i) memory[i] = static_cast<uint8_t>(i * 7 + i / 256);
      const auto at = [](std::vector<uint8_t>& v, int64_t shift) {
        return v.data() + kMargin - reinterpret_cast<uintptr_t>(v.data()) % 128 + shift;
      };
      const RegisteredMemory registered{at(memory, shift), bytes, 1};
      const RegistryView registry{&registered, 1, kOwner, nullptr};
      uint32_t words[4];
      Address{0, 1, kOwner}.Write(words);
      for (const int64_t alignment : {1, 16, 128}) {
        if (shift % alignment != 0) continue;
        GatherColumn column;
        column.address = words;
        column.address_alignment = alignment;
        column.out = at(out, 0);
        column.step_bytes = width;
        column.window = {-1, 4, true, Pad::kAround};
        column.pad_value.fill(9);
        GatherCall call{kRows, kSlots, kSteps, slot, anchor, length, {column}, {}};
        const GatherRows rows{kRows, kSlots, kSteps, slot, anchor, length};
        GatherEntry entry = MakeEntry(call, column);
        ASSERT_EQ(Resolve(registry, rows, &entry), AddressFault::kNone);
        ASSERT_EQ(IsAligned(entry), alignment >= 16 && width % 16 == 0);
        for (int64_t unit = 0; unit < Units(call, entry); ++unit) {
          const RowRead read = rows.Read(static_cast<int32_t>(unit / entry.units.d));
          const ChunkPlan plan = PlanGather(rows, entry, read, unit % entry.units.d);
          if (plan.empty()) continue;
          Chunk16 low{}, high{};
          if (plan.needs_low()) std::memcpy(&low, plan.source, 16);
          if (plan.needs_high()) std::memcpy(&high, plan.source + 16, 16);
          const Chunk16 value =
              Blend(plan.shift == 0 ? low : Shifted(low, high, plan.shift), entry.pad, plan.data_begin, plan.data_end);
          StoreBytes(plan.out, value, plan.out_begin, plan.out_end);
        }
        call.columns[0].table = registered.base;
        call.columns[0].out = want.data();
        Gather reference(call);
        reference.Prepare(1);
        reference.Drain();
        ASSERT_EQ(std::memcmp(at(out, 0), want.data(), want.size()), 0) << width << " " << shift << " " << alignment;
      }
    }
  }
}

TEST(Resolve, LeavesATableAlone) {
  Call call({1, 5, kOwner});
  call.column.address = nullptr;
  call.column.table = call.out + 1;
  GatherEntry entry = MakeEntry(call.call, call.column);
  EXPECT_FALSE(entry.given != Given::kTable || IsAligned(entry));
  EXPECT_EQ(Resolve({}, {}, &entry), AddressFault::kNone);
  EXPECT_EQ(entry.table, call.out + 1);
}

}  // namespace
}  // namespace gear_jax
