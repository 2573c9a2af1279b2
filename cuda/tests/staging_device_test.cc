// What the staging kernels do for a handle or a chunk, run on the CPU.
#include "cuda/staging_device.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

namespace gear_jax {
namespace {

TEST(FindEntry, FindsOnlyWhatTheHandleNames) {
  std::vector<StagingEntry> entries(kStagingEntries);
  entries[3] = {9, 0, 512, nullptr};
  const auto find = [&](int32_t entry, int64_t sequence, int32_t owner, int64_t bytes) {
    return FindEntry(entries.data(), {entry, sequence, owner}, 77, bytes);
  };
  EXPECT_EQ(find(3, 9, 77, 512), &entries[3]);
  EXPECT_EQ(find(3, 8, 77, 512), nullptr);
  EXPECT_EQ(find(3, 9, 78, 512), nullptr);
  EXPECT_EQ(find(3, 9, 77, 256), nullptr);
  EXPECT_EQ(find(4, 9, 77, 512), nullptr);
  EXPECT_EQ(find(-1, 9, 77, 512), nullptr);
  EXPECT_EQ(find(kStagingEntries, 9, 77, 512), nullptr);
  entries[3].sequence = 0;  // handed out
  EXPECT_EQ(find(3, 9, 77, 512), nullptr);
  EXPECT_EQ(find(3, 0, 77, 512), nullptr);
}

TEST(FlightSet, HoldsTheTablesAndFewOthers) {
  int64_t shared = 0;
  for (uintptr_t base = 0x7f0000000000; base < 0x7f0000000000 + (100 << 21); base += 1 << 21) {
    FlightSet tables;
    tables.Add(reinterpret_cast<const void*>(base));
    int numbers = 0;
    for (int i = 0; i < kFlights; ++i) numbers += tables.Contains(i);
    EXPECT_EQ(numbers, 1);
    FlightSet both = tables;
    both.Add(reinterpret_cast<const void*>(base + (1 << 21)));
    shared += std::memcmp(both.word, tables.word, sizeof(both.word)) == 0;
    for (int i = 0; i < kFlights; ++i) EXPECT_TRUE(!tables.Contains(i) || both.Contains(i));
  }
  EXPECT_LT(shared, 5);
}

TEST(Landed, AlsoWhenTheCountersWrap) {
  EXPECT_TRUE(Landed(0, 0));
  EXPECT_FALSE(Landed(1, 0));
  EXPECT_TRUE(Landed(0, 1));
  EXPECT_FALSE(Landed(1, 0xFFFFFFFF));
  EXPECT_TRUE(Landed(0xFFFFFFFF, 0));
}

TEST(PlanCopy, CopiesOrPadsEveryByteAndNoOther) {
  std::vector<uint8_t> memory(4096);
  for (size_t i = 0; i < memory.size(); ++i) memory[i] = static_cast<uint8_t>(i * 7 + 1);
  uint8_t* const base = memory.data() + (256 - reinterpret_cast<uintptr_t>(memory.data()) % 256);
  for (const int64_t bytes : {0, 1, 4, 15, 16, 17, 100, 1000}) {
    for (const int64_t shift : {0, 4, 8, 13}) {
      for (const bool good : {true, false}) {
        std::vector<uint8_t> all(bytes + 64, 0xEE);
        uint8_t* const out = all.data() + (16 - reinterpret_cast<uintptr_t>(all.data()) % 16) + shift;
        StagedPart part{out, bytes, {0xA0, 0xA1, 0xA2, 0xA3}, shift == 13 ? 1 : 4};
        const CopyEntry entry = MakeEntry(part, 256);
        for (int64_t k = 0; k < Units(entry) + 3; ++k) {
          const ChunkPlan plan = PlanCopy(entry, good ? base : nullptr, k);
          if (plan.empty()) continue;
          EXPECT_LT(k, Units(entry));
          EXPECT_TRUE(good || (!plan.needs_low() && !plan.needs_high()));
          Chunk16 low{}, high{};
          if (plan.needs_low()) std::memcpy(&low, plan.source, 16);
          if (plan.needs_high()) std::memcpy(&high, plan.source + 16, 16);
          const Chunk16 value = Blend(Shifted(low, high, plan.shift), entry.pad, plan.data_begin, plan.data_end);
          StoreBytes(plan.out, value, plan.out_begin, plan.out_end);
        }
        for (int64_t i = 0; i < bytes; ++i) {
          // Padding goes by the address, which is a multiple of the element.
          const int pad = 0xA0 + static_cast<int>((shift + i) % part.value_bytes);
          ASSERT_EQ(out[i], good ? base[256 + i] : pad) << bytes << " bytes, shift " << shift << ", byte " << i;
        }
        int64_t margin = 0;
        for (const uint8_t b : all) margin += b == 0xEE;
        EXPECT_GE(margin, 64);
      }
    }
  }
}

}  // namespace
}  // namespace gear_jax
