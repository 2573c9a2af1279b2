// How kernels find slots in tables that are in shards, run on the CPU.
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

#include "cuda/gather_device.h"

namespace gear_jax {
namespace {

TEST(Divisor, DividesEveryInt) {
  std::mt19937 rng(0);
  for (const uint32_t d : {1u, 2u, 3u, 7u, 16u, 1000u, 65537u, 1u << 30, (1u << 31) - 1}) {
    const Divisor divisor(d, UINT32_MAX);
    std::vector<uint32_t> numbers = {0, 1, d - 1, d, d + 1, 2 * d - 1, (1u << 31) - 1, UINT32_MAX};
    for (int i = 0; i < 1000; ++i) numbers.push_back(static_cast<uint32_t>(rng()));
    for (const uint32_t n : numbers) ASSERT_EQ(divisor.QuotientOfInt(n), n / d) << n << " / " << d;
  }
}

// A table in shards, each at a multiple of 128 bytes, and the lists that a kernel's blocks make.
struct Table {
  Table(int64_t slots, int64_t steps, int64_t step_bytes, int64_t shards, std::mt19937& rng)
      : shard_bytes(slots / shards * steps * step_bytes), memory(shards), words(2 * shards) {
    for (int64_t s = 0; s < shards; ++s) {
      memory[s].resize(shard_bytes + 256 + 128 * s);
      uint8_t* const begin = Begin(s);
      for (int64_t i = 0; i < shard_bytes; ++i) begin[i] = static_cast<uint8_t>(rng());
      WritePointer(begin, &words[2 * s]);
    }
    for (int64_t s = 0; s < shards; ++s) whole.insert(whole.end(), Begin(s), Begin(s) + shard_bytes);
    whole.resize(whole.size() + 16);  // a chunk that holds the last byte is read whole
  }
  uint8_t* Begin(int64_t s) {
    uint8_t* const data = memory[s].data();
    return data + (128 - reinterpret_cast<uintptr_t>(data) % 128);
  }

  int64_t shard_bytes;
  std::vector<std::vector<uint8_t>> memory;
  std::vector<uint32_t> words;
  std::vector<uint8_t> whole;
};

class Shards : public testing::TestWithParam<int64_t> {};

// Both ways in which a kernel copies chunks, and the CPU's.
TEST_P(Shards, AgreeWithTheCpu) {
  const int64_t width = GetParam(), slots = 12, steps = 5, rows = 60, margin = 128;
  std::mt19937 rng(static_cast<uint32_t>(width));
  const auto draw = [&](int64_t low, int64_t high) {
    return static_cast<int32_t>(std::uniform_int_distribution<int64_t>(low, high)(rng));
  };
  std::vector<int32_t> slot, anchor, length;
  for (int64_t i = 0; i < rows; ++i) {
    slot.push_back(i == 0 ? INT32_MAX : i == 1 ? INT32_MIN : draw(-1, slots));
    anchor.push_back(draw(-2, steps + 1)), length.push_back(draw(-1, steps + 1));
  }
  for (const int64_t shards : {1, 2, 3, 12}) {
    for (const bool in_shards : {true, false}) {  // a table of one piece, beside one that is in shards
      Table table(slots, steps, width, shards, rng);
      std::vector<uint8_t> out(rows * 4 * width + 2 * margin), want(rows * 4 * width);
      GatherColumn column;
      column.table = in_shards ? nullptr : table.whole.data();
      column.shards = in_shards ? table.words.data() : nullptr;
      column.address_alignment = 128;
      column.out = out.data() + (margin - reinterpret_cast<uintptr_t>(out.data()) % margin);
      column.step_bytes = width;
      column.window = {-1, 4, true, static_cast<Pad>(shards % 3)};
      column.pad_value.fill(9);
      GatherCall call{rows, slots, steps, slot.data(), anchor.data(), length.data(), {column}, {}, shards};
      const GatherRows numbers{rows, slots, steps, slot.data(), anchor.data(), length.data()};
      GatherEntry entry = MakeEntry(call, column);
      ASSERT_EQ(entry.given, in_shards ? Given::kShards : Given::kTable);
      ASSERT_EQ(Resolve({}, numbers, &entry), AddressFault::kNone);
      std::vector<const uint8_t*> list;
      for (int64_t s = 0; s < shards; ++s) list.push_back(ShardBegin(numbers, entry, static_cast<int32_t>(s)));
      entry.table = reinterpret_cast<const uint8_t*>(list.data());
      const ShardedTables tables(numbers, entry.shards);
      for (int64_t unit = 0; unit < Units(call, entry); ++unit) {
        const RowRead read = numbers.Read(static_cast<int32_t>(unit / entry.units.d));
        const int64_t chunk = unit % entry.units.d;
        const ChunkPlan plan = PlanGather(numbers, entry, read, chunk, tables);
        if (IsAligned(entry)) {
          int64_t offset;
          const uint8_t* const from = AlignedSource(numbers, entry, read, chunk, &offset, tables);
          ASSERT_EQ(from != nullptr, plan.needs_low());
          ASSERT_EQ(offset < 0, plan.empty());
          ASSERT_TRUE(from == nullptr || from == plan.source);
        }
        if (plan.empty()) continue;
        Chunk16 low{}, high{};
        if (plan.needs_low()) std::memcpy(&low, plan.source, 16);
        if (plan.needs_high()) std::memcpy(&high, plan.source + 16, 16);
        const Chunk16 value =
            Blend(plan.shift == 0 ? low : Shifted(low, high, plan.shift), entry.pad, plan.data_begin, plan.data_end);
        StoreBytes(plan.out, value, plan.out_begin, plan.out_end);
      }
      call.columns[0].out = want.data();
      Gather reference(call);
      reference.Prepare(1);
      reference.Drain();
      ASSERT_EQ(std::memcmp(column.out, want.data(), want.size()), 0) << shards << " shards";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Widths, Shards, testing::Values(1, 3, 16, 17, 48, 128, 352, 1040, 4096));

TEST(ShardedTables, ATableWithoutSlots) {
  const GatherRows rows{1, 0, 3, nullptr, nullptr, nullptr};
  const uint8_t* const list[2] = {nullptr, nullptr};
  GatherEntry entry{};
  entry.table = reinterpret_cast<const uint8_t*>(list);
  entry.step_bytes = 4;
  EXPECT_EQ(ShardedTables(rows, 2).Find(rows, entry, 5, Visible{}), nullptr);
}

}  // namespace
}  // namespace gear_jax
