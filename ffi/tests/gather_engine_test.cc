#include "ffi/gather_engine.h"

#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <map>
#include <random>
#include <vector>

namespace gear_jax {
namespace {

using Bytes = std::vector<uint8_t>;

// Does what a plan says, and counts how often each byte is written.
void Execute(const EnginePlan& plan, std::map<uint8_t*, int>* written) {
  for (size_t i = 0; i < plan.copies.bytes.size(); ++i) {
    auto* const to = static_cast<uint8_t*>(plan.copies.to[i]);
    std::memcpy(to, plan.copies.from[i], plan.copies.bytes[i]);
    for (size_t b = 0; b < plan.copies.bytes[i]; ++b) ++(*written)[to + b];
  }
  for (const Padding& padding : plan.padding) {
    for (const PadRange& range : padding.ranges) {
      ASSERT_GT(range.bytes, 0);
      for (uint8_t* p = range.out; p < range.out + range.bytes; ++p) {
        *p = padding.chunk[reinterpret_cast<uintptr_t>(p) % 16];
        ++(*written)[p];
      }
    }
  }
  Gather rest(plan.rest);
  rest.Prepare(1);
  rest.Drain();
}

// One column of bytes, whole rows of `steps` steps of two bytes.
struct Whole {
  static constexpr int64_t kSteps = 5, kSlots = 4;
  Whole(std::vector<int32_t> slots, std::vector<int32_t> lengths)
      : slot(std::move(slots)), anchor(slot.size()), length(std::move(lengths)), out(slot.size() * kSteps * 2) {
    GatherColumn column;
    column.table = table.data();
    column.out = out.data();
    column.step_bytes = 2;
    column.window = {0, kSteps, false, Pad::kAround};
    call = {static_cast<int64_t>(slot.size()), kSlots, kSteps, slot.data(), anchor.data(), length.data(), {column}, {}};
  }
  Bytes table = Bytes(kSlots * kSteps * 2);
  std::vector<int32_t> slot, anchor, length;
  Bytes out;
  GatherCall call;
};

TEST(GatherEngine, RowsThatFollowEachOtherAreOneCopy) {
  const Whole given({1, 2, 0, 1, 3}, {5, 5, 5, 5, 5});
  const EnginePlan plan = PlanEngine(given.call, {true});
  EXPECT_EQ(plan.copies.bytes, (std::vector<size_t>{20, 20, 10}));
  EXPECT_EQ(plan.copies.from, (std::vector<const void*>{&given.table[10], &given.table[0], &given.table[30]}));
  EXPECT_EQ(plan.copies.to,
            (std::vector<void*>{const_cast<uint8_t*>(&given.out[0]), const_cast<uint8_t*>(&given.out[20]),
                                const_cast<uint8_t*>(&given.out[40])}));
  ASSERT_EQ(plan.padding.size(), 1);
  EXPECT_TRUE(plan.padding[0].ranges.empty());
}

TEST(GatherEngine, ARowThatEndsEarlyIsNotMergedWithTheNext) {
  const Whole given({1, 2}, {4, 5});
  const EnginePlan plan = PlanEngine(given.call, {true});
  EXPECT_EQ(plan.copies.bytes, (std::vector<size_t>{8, 10}));
  ASSERT_EQ(plan.padding[0].ranges.size(), 1);
  EXPECT_EQ(plan.padding[0].ranges[0].out, &given.out[8]);
  EXPECT_EQ(plan.padding[0].ranges[0].bytes, 2);
}

TEST(GatherEngine, PaddingOfRowsThatFollowEachOtherIsOneRange) {
  const Whole given({-1, 4, 3, std::numeric_limits<int32_t>::min()}, {5, 5, 0, 5});
  const EnginePlan plan = PlanEngine(given.call, {true});
  EXPECT_TRUE(plan.copies.bytes.empty());
  ASSERT_EQ(plan.padding[0].ranges.size(), 1);
  EXPECT_EQ(plan.padding[0].ranges[0].out, given.out.data());
  EXPECT_EQ(plan.padding[0].ranges[0].bytes, static_cast<int64_t>(given.out.size()));
}

TEST(GatherEngine, ColumnsWithTheSamePaddingShareIt) {
  Whole given({0, 1}, {3, 3});
  Bytes more(given.out.size()), other(given.out.size());
  given.call.columns.push_back(given.call.columns[0]);
  given.call.columns.push_back(given.call.columns[0]);
  given.call.columns[1].out = more.data();
  given.call.columns[2].out = other.data();
  given.call.columns[2].pad_value[0] = 7;
  const EnginePlan plan = PlanEngine(given.call, {true, true, true});
  ASSERT_EQ(plan.padding.size(), 2);
  EXPECT_EQ(plan.padding[0].ranges.size(), 4);
  EXPECT_EQ(plan.padding[1].ranges.size(), 2);
  EXPECT_EQ(plan.padding[1].chunk[15], 7);
}

TEST(GatherEngine, NothingToDo) {
  const Whole none({}, {});
  EXPECT_TRUE(PlanEngine(none.call, {true}).copies.bytes.empty());
  Whole narrow({0, 1}, {5, 5});
  narrow.call.columns[0].window.length = 0;
  const EnginePlan plan = PlanEngine(narrow.call, {true});
  EXPECT_TRUE(plan.copies.bytes.empty() && plan.padding.empty());
}

// Every byte of the copied columns is written once, and all is as the CPU's gather has it.
TEST(GatherEngine, AgreesWithTheGather) {
  std::mt19937 rng(0);
  const auto draw = [&](int64_t low, int64_t high) {
    return static_cast<int32_t>(std::uniform_int_distribution<int64_t>(low, high)(rng));
  };
  const int64_t widths[] = {1, 2, 3, 4, 8, 16, 17, 48, 0};
  for (int trial = 0; trial < 400; ++trial) {
    const int64_t slots = draw(0, 5), steps = draw(0, 9), rows = draw(0, 7);
    std::vector<int32_t> slot, anchor, length;
    for (int64_t i = 0; i < rows; ++i) {
      slot.push_back(draw(-1, slots));
      anchor.push_back(draw(-3, steps + 3));
      length.push_back(draw(-1, steps + 2));
    }
    GatherCall call{rows, slots, steps, slot.data(), anchor.data(), length.data(), {}, {}};
    std::vector<Bytes> tables, outs, wants, masks, want_masks;
    std::vector<bool> copied;
    const int columns = draw(1, 4);
    for (int k = 0; k < columns; ++k) {
      GatherColumn column;
      column.step_bytes = widths[draw(0, 8)];
      while (column.step_bytes % (2 * column.value_bytes) == 0 && column.value_bytes < 16 && draw(0, 1)) {
        column.value_bytes *= 2;
        if (column.step_bytes == 0) break;
      }
      column.window = {draw(-4, 4), trial % 5 == 0 ? steps : draw(0, 8), trial % 5 != 0, static_cast<Pad>(draw(0, 2))};
      for (uint8_t& b : column.pad_value) b = static_cast<uint8_t>(rng());
      tables.emplace_back(slots * steps * column.step_bytes);
      for (uint8_t& b : tables.back()) b = static_cast<uint8_t>(rng());
      outs.emplace_back(rows * column.window.length * column.step_bytes, 0xCD);
      masks.emplace_back(rows * column.window.length, 0xCD);
      wants.push_back(outs.back());
      want_masks.push_back(masks.back());
      copied.push_back(draw(0, 2) > 0);
      call.columns.push_back(column);
    }
    GatherCall want = call;
    for (int k = 0; k < columns; ++k) {
      call.columns[k].table = want.columns[k].table = tables[k].data();
      call.columns[k].out = outs[k].data();
      want.columns[k].out = wants[k].data();
      call.masks.push_back({masks[k].data(), call.columns[k].window});
      want.masks.push_back({want_masks[k].data(), call.columns[k].window});
    }
    std::map<uint8_t*, int> written;
    Execute(PlanEngine(call, copied), &written);
    Gather reference(want);
    reference.Prepare(1);
    reference.Drain();
    for (int k = 0; k < columns; ++k) {
      ASSERT_EQ(outs[k], wants[k]) << "column " << k << " of trial " << trial;
      ASSERT_EQ(masks[k], want_masks[k]) << "mask " << k << " of trial " << trial;
      for (uint8_t& b : outs[k]) ASSERT_EQ(written.count(&b) ? written[&b] : 0, copied[k] ? 1 : 0);
    }
  }
}

TEST(GatherEngine, OffsetsBeyondTwoGiB) {
  const int32_t slot[] = {5}, anchor[] = {3}, length[] = {4};
  GatherColumn column;
  column.table = reinterpret_cast<const uint8_t*>(uintptr_t{1} << 40);  // nothing is read here
  column.out = reinterpret_cast<uint8_t*>(uintptr_t{1} << 41);
  column.step_bytes = int64_t{1} << 31;
  column.window = {-1, 3, true, Pad::kAround};
  const EnginePlan plan = PlanEngine({1, 6, 4, slot, anchor, length, {column}, {}}, {true});
  EXPECT_EQ(plan.copies.from, (std::vector<const void*>{column.table + (5 * 4 + 2) * column.step_bytes}));
  EXPECT_EQ(plan.copies.bytes, (std::vector<size_t>{size_t{1} << 32}));
  EXPECT_EQ(plan.padding[0].ranges[0].out, column.out + 2 * column.step_bytes);
  EXPECT_EQ(plan.padding[0].ranges[0].bytes, column.step_bytes);
}

}  // namespace
}  // namespace gear_jax
