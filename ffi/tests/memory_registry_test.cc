#include "ffi/memory_registry.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <set>
#include <thread>
#include <vector>

#include "ffi/addressed_gather.h"

namespace gear_jax {
namespace {

using Words = std::vector<uint32_t>;

Words WordsOf(const Address& address) {
  Words words(4);
  address.Write(words.data());
  return words;
}

TEST(Address, WordsGoThereAndBack) {
  for (const Address& a :
       {Address{0, 1, -1}, Address{7, (int64_t{1} << 40) + 3, 5}, Address{1, INT64_MAX, INT32_MIN}}) {
    const Words words = WordsOf(a);
    const Address b = Address::Read(words.data());
    EXPECT_EQ(a.entry, b.entry);
    EXPECT_EQ(a.sequence, b.sequence);
    EXPECT_EQ(a.owner, b.owner);
  }
}

TEST(MemoryRegistry, FindsWhatItHas) {
  MemoryRegistry registry;
  const uint8_t table[12] = {};
  const Address address = registry.Add(table, 12);
  for (const int64_t bytes : {0, 1, 12}) {
    const auto found = registry.Find(address, bytes);
    EXPECT_EQ(found.fault, AddressFault::kNone);
    EXPECT_EQ(found.base, table);
    EXPECT_EQ(found.bytes, 12);
  }
  const auto small = registry.Find(address, 13);
  EXPECT_EQ(small.fault, AddressFault::kSmall);
  EXPECT_EQ(small.base, nullptr);
  EXPECT_EQ(small.bytes, 12);
  EXPECT_TRUE(registry.Remove(address));
  EXPECT_EQ(registry.Find(address, 12).fault, AddressFault::kFreed);
  EXPECT_FALSE(registry.Remove(address));
}

TEST(MemoryRegistry, AnEmptyTableHasAnAddress) {
  MemoryRegistry registry;
  const Address address = registry.Add(nullptr, 0);
  EXPECT_EQ(registry.Find(address, 0).fault, AddressFault::kNone);
  EXPECT_EQ(registry.Find(address, 1).fault, AddressFault::kSmall);
}

TEST(MemoryRegistry, AnEntryIsUsedAgainWithAnotherAddress) {
  MemoryRegistry registry;
  const uint8_t table[2] = {};
  std::set<int32_t> entries;
  Address last;
  for (int i = 0; i < 100; ++i) {
    const Address address = registry.Add(table + i % 2, 1);
    entries.insert(address.entry);
    if (i > 0) {
      EXPECT_EQ(registry.Find(last, 1).fault, AddressFault::kFreed);
      EXPECT_FALSE(registry.Remove(last));
    }
    EXPECT_EQ(registry.Find(address, 1).base, table + i % 2);
    EXPECT_TRUE(registry.Remove(address));
    last = address;
  }
  EXPECT_EQ(entries.size(), 1u);
}

TEST(MemoryRegistry, RefusesWhatItNeverGaveOut) {
  MemoryRegistry registry, other;
  const uint8_t table[4] = {};
  const Address address = registry.Add(table, 4);
  const auto fault = [&](const Address& a) { return registry.Find(a, 4).fault; };
  EXPECT_EQ(fault(Address{}), AddressFault::kForeign);
  EXPECT_EQ(fault(other.Add(table, 4)), AddressFault::kForeign);
  EXPECT_EQ(fault({address.entry, 0, address.owner}), AddressFault::kForeign);
  EXPECT_EQ(fault({address.entry, -1, address.owner}), AddressFault::kForeign);
  EXPECT_EQ(fault({-1, address.sequence, address.owner}), AddressFault::kForeign);
  EXPECT_EQ(fault({INT32_MIN, address.sequence, address.owner}), AddressFault::kForeign);
  EXPECT_EQ(fault({1, address.sequence, address.owner}), AddressFault::kForeign);
  EXPECT_EQ(fault({address.entry, address.sequence + 1, address.owner}), AddressFault::kFreed);
  EXPECT_EQ(fault(address), AddressFault::kNone);
}

TEST(MemoryRegistry, RemovingWaitsForReaders) {
  MemoryRegistry registry;
  std::vector<uint8_t> table(1, 1);
  const Address address = registry.Add(table.data(), 1);
  std::atomic<bool> removed{false};
  std::thread remover;
  {
    auto found = registry.Find(address, 1);
    const auto kept = std::move(found.lease);  // the empty one that is left behind holds nothing
    auto second = registry.Find(address, 1);
    remover = std::thread([&] {
      registry.Remove(address);
      removed = true;
    });
    while (registry.Find(address, 1).fault == AddressFault::kNone) std::this_thread::yield();
    EXPECT_FALSE(removed);
    // Nobody gets the entry while it has readers.
    EXPECT_NE(registry.Add(table.data(), 1).entry, address.entry);
  }
  remover.join();
  EXPECT_TRUE(removed);
}

TEST(MemoryRegistry, ManyThreads) {
  MemoryRegistry registry;
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 200; ++i) {
        auto table = std::make_unique<std::vector<uint8_t>>(8, static_cast<uint8_t>(i));
        const Address address = registry.Add(table->data(), 8);
        std::thread reader([&] {
          const auto found = registry.Find(address, 8);
          if (found.fault == AddressFault::kNone) {
            EXPECT_EQ(found.base[7], static_cast<uint8_t>(i));
          }
        });
        EXPECT_TRUE(registry.Remove(address));
        table.reset();  // a reader that comes now gets a fault; one that was there has left
        reader.join();
      }
    });
  }
  for (std::thread& t : threads) t.join();
}

TEST(AddressFaultText, SaysWhatGotWantedAndFix) {
  for (const AddressFault fault :
       {AddressFault::kForeign, AddressFault::kFreed, AddressFault::kSmall, AddressFault::kMisaligned}) {
    for (const int64_t bytes : {-1, 24}) {
      const std::string text = AddressFaultText("gather: columns[3]", fault, bytes < 0 ? -1 : 12, bytes);
      EXPECT_EQ(text.rfind("gather: columns[3]: got ", 0), 0u) << text;
      EXPECT_NE(text.find(", wanted "), std::string::npos) << text;
      EXPECT_EQ(text.find("-1"), std::string::npos) << text;
      EXPECT_EQ(text.back(), '.');
    }
  }
  EXPECT_NE(AddressFaultText("x", AddressFault::kSmall, 12, 24).find("got the address of 12 bytes, wanted 24."),
            std::string::npos);
  EXPECT_EQ(AddressFaultText("x", AddressFault::kNone, 0, 0), "");
}

// A call on two columns of the same bytes: one given as a table, one by address.
struct Call {
  explicit Call(MemoryRegistry& registry, int64_t rows) : slot(rows), anchor(rows), length(rows, 5), table(3 * 5 * 2) {
    for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<uint8_t>(i + 1);
    for (int64_t r = 0; r < rows; ++r) slot[r] = static_cast<int32_t>(r % 4), anchor[r] = static_cast<int32_t>(r % 5);
    address = registry.Add(table.data(), static_cast<int64_t>(table.size()));
    words = WordsOf(address);
    call.rows = rows, call.slots = 3, call.steps = 5;
    call.slot = slot.data(), call.anchor = anchor.data(), call.length = length.data();
    for (int k = 0; k < 2; ++k) {
      out[k].assign(rows * 4 * 2, 0xCD);
      mask[k].assign(rows * 4, 0xCD);
      GatherColumn column;
      column.out = out[k].data();
      column.step_bytes = 2;
      column.window = {-1, 4, true, Pad::kAround};
      if (k == 0) column.table = table.data();
      if (k == 1) column.address = words.data();
      call.columns.push_back(column);
      call.masks.push_back({mask[k].data(), column.window, column.address, 1, 2});
    }
  }
  std::vector<int32_t> slot, anchor, length;
  std::vector<uint8_t> table, out[2], mask[2];
  Address address;
  Words words;
  GatherCall call;
};

TEST(AddressedGather, ReadsWhatATableReads) {
  MemoryRegistry registry;
  for (const int64_t rows : {0, 1, 9}) {
    Call c(registry, rows);
    EXPECT_TRUE(IsAddressed(c.call));
    Leases leases;
    EXPECT_EQ(FindTables(registry, c.call, leases), "");
    EXPECT_EQ(leases.size(), 1u);
    EXPECT_EQ(c.call.columns[1].table, c.table.data());
    AddressedGather gather(c.call, std::move(leases));
    gather.Prepare(2);
    gather.Drain();
    EXPECT_EQ(c.out[0], c.out[1]);
    EXPECT_EQ(c.mask[0], c.mask[1]);
  }
}

TEST(AddressedGather, GivesItsTablesUpWithTheLastTask) {
  MemoryRegistry registry;
  Call c(registry, 9);
  Leases leases;
  ASSERT_EQ(FindTables(registry, c.call, leases), "");
  AddressedGather gather(c.call, std::move(leases));
  gather.Prepare(1);
  ASSERT_GT(gather.size(), 1);
  std::atomic<bool> removed{false};
  std::thread remover([&] {
    registry.Remove(c.address);
    removed = true;
  });
  for (int64_t task = 0; task < gather.size(); ++task) {
    EXPECT_FALSE(removed);
    gather.Run(task);
  }
  remover.join();  // though `gather` is still there
}

TEST(AddressedGather, NamesTheColumn) {
  MemoryRegistry registry;
  Call c(registry, 3);
  Leases leases;
  c.call.slots = 4;
  EXPECT_EQ(
      FindTables(registry, c.call, leases).rfind("gather: columns[1]: got the address of 30 bytes, wanted 40.", 0), 0u);
  c.call.slots = 3;
  registry.Remove(c.address);
  EXPECT_EQ(FindTables(registry, c.call, leases).rfind("gather: columns[1]: got the address of a table that was", 0),
            0u);
  EXPECT_TRUE(leases.empty());
}

}  // namespace
}  // namespace gear_jax
