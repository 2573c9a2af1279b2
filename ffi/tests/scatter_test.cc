#include "ffi/scatter.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <numeric>
#include <random>
#include <thread>
#include <tuple>
#include <vector>

#include "ffi/copy_past_caches.h"
#include "ffi/seqlock.h"

namespace gear_jax {
namespace {

constexpr int32_t kMin = std::numeric_limits<int32_t>::min();
constexpr int32_t kMax = std::numeric_limits<int32_t>::max();

void DrainWith(Work& work, int threads) {
  std::vector<std::thread> helpers;
  for (int i = 1; i < threads; ++i) helpers.emplace_back([&work] { work.Drain(); });
  work.Drain();
  for (std::thread& t : helpers) t.join();
}

struct Column {
  std::vector<uint8_t> table, values;
  int64_t step_bytes, value_steps;
};

// Rows and columns of random bytes; no two rows write the same slot.
struct Fixture {
  Fixture(int64_t slots, int64_t steps, int64_t rows, const std::vector<std::pair<int64_t, int64_t>>& shapes)
      : slots(slots), steps(steps), rows(rows) {
    std::mt19937 random(static_cast<uint32_t>(slots + steps + rows));
    const auto fill = [&](std::vector<uint8_t>& bytes) {
      for (uint8_t& b : bytes) b = static_cast<uint8_t>(random());
    };
    for (const auto& [step_bytes, value_steps] : shapes) {
      Column column{{}, {}, step_bytes, value_steps};
      column.table.resize(slots * steps * step_bytes);
      column.values.resize(rows * value_steps * step_bytes);
      fill(column.table);
      fill(column.values);
      columns.push_back(std::move(column));
    }
    slot.resize(slots + rows);
    std::iota(slot.begin(), slot.begin() + slots, 0);
    std::fill(slot.begin() + slots, slot.end(), -1);
    std::shuffle(slot.begin(), slot.begin() + slots, random);
    slot.resize(rows);
    std::uniform_int_distribution<int32_t> near(static_cast<int32_t>(-steps) - 1, static_cast<int32_t>(steps) + 1);
    for (int64_t i = 0; i < rows; ++i) {
      start.push_back(i % 5 == 4 ? (i % 2 ? kMin : kMax) : near(random) / 2);
      length.push_back(i % 7 == 6 ? (i % 2 ? kMin : kMax) : std::abs(near(random)));
      if (i % 11 == 10) slot[i] = i % 2 ? static_cast<int32_t>(slots) : kMin;
    }
  }

  std::vector<std::vector<uint8_t>> Wanted() const {
    std::vector<std::vector<uint8_t>> wanted;
    for (const Column& c : columns) {
      wanted.push_back(c.table);
      for (int64_t row = 0; row < rows; ++row) {
        if (slot[row] < 0 || slot[row] >= slots) continue;
        for (int64_t i = 0; i < std::min<int64_t>(length[row], c.value_steps); ++i) {
          const int64_t step = start[row] + i;
          if (step < 0 || step >= steps) continue;
          std::copy_n(c.values.begin() + (row * c.value_steps + i) * c.step_bytes, c.step_bytes,
                      wanted.back().begin() + (slot[row] * steps + step) * c.step_bytes);
        }
      }
    }
    return wanted;
  }

  void Bind(Scatter& scatter) {
    scatter.rows = rows;
    scatter.slots = slots;
    scatter.steps = steps;
    scatter.slot = slot.data();
    scatter.start = start.data();
    scatter.length = length.data();
    for (Column& c : columns) {
      scatter.columns.push_back({c.table.data(), c.values.data(), c.step_bytes, c.value_steps});
    }
  }

  void RunAndCheck(int threads) {
    const auto wanted = Wanted();
    Scatter scatter;
    Bind(scatter);
    scatter.Prepare(threads);
    DrainWith(scatter, threads);
    for (size_t k = 0; k < columns.size(); ++k) EXPECT_EQ(columns[k].table, wanted[k]) << "column " << k;
  }

  int64_t slots, steps, rows;
  std::vector<Column> columns;
  std::vector<int32_t> slot, start, length;
};

class ScatterSizes : public testing::TestWithParam<std::tuple<int64_t, int64_t>> {};

TEST_P(ScatterSizes, MatchesTheLoop) {
  const auto [step_bytes, rows] = GetParam();
  for (const int64_t value_steps : {0, 1, 6, 9}) Fixture(8, 9, rows, {{step_bytes, value_steps}}).RunAndCheck(2);
}

INSTANTIATE_TEST_SUITE_P(Sizes, ScatterSizes,
                         testing::Combine(testing::Values(1, 3, 17, 4099), testing::Values(0, 1, 2, 31)));

TEST(Scatter, SeveralColumns) { Fixture(40, 50, 40, {{1, 50}, {3, 20}, {1031, 50}}).RunAndCheck(4); }

TEST(Scatter, TablesThatNoCacheHolds) {
  static_assert(80 * 50 * 4297 >= kPastCachesBytes && 20 * 50 < kLeastPastCaches);
  Fixture(80, 50, 40, {{4297, 50}, {20, 50}}).RunAndCheck(4);
}

TEST(Scatter, LongRowsAreSplit) {
  Fixture fixture(2, 3, 2, {{(1 << 20) + 3, 3}});
  fixture.slot = {1, 0};
  fixture.start = {0, 1};
  fixture.length = {3, 2};
  const auto wanted = fixture.Wanted();
  Scatter scatter;
  fixture.Bind(scatter);
  EXPECT_EQ(scatter.Prepare(4), 5 * ((1 << 20) + 3));
  EXPECT_GE(scatter.size(), 5);
  DrainWith(scatter, 4);
  EXPECT_EQ(fixture.columns[0].table, wanted[0]);
}

TEST(Scatter, ShortRowsShareATask) {
  Fixture fixture(1000, 4, 1000, {{8, 4}});
  Scatter scatter;
  fixture.Bind(scatter);
  EXPECT_LT(scatter.Prepare(4), 64 << 10);
  EXPECT_EQ(scatter.size(), 1);
}

TEST(Scatter, TasksRunInAnyOrder) {
  Fixture fixture(100, 64, 100, {{256, 64}});
  const auto wanted = fixture.Wanted();
  Scatter scatter;
  fixture.Bind(scatter);
  scatter.Prepare(8);
  ASSERT_GT(scatter.size(), 1);
  for (int64_t task = scatter.size(); task-- > 0;) scatter.Run(task);
  EXPECT_EQ(fixture.columns[0].table, wanted[0]);
}

TEST(Scatter, NothingToWrite) {
  for (const auto& [slots, steps, rows] : {std::tuple<int64_t, int64_t, int64_t>{0, 4, 3}, {3, 0, 3}, {3, 4, 0}}) {
    Fixture fixture(slots, steps, rows, {{2, steps}});
    Scatter scatter;
    fixture.Bind(scatter);
    std::fill(fixture.slot.begin(), fixture.slot.end(), slots == 0 ? 0 : -1);
    EXPECT_EQ(scatter.Prepare(2), 0);
    EXPECT_EQ(scatter.size(), 0);
    DrainWith(scatter, 3);
  }
}

TEST(Scatter, FirstBadRow) {
  Fixture fixture(4, 3, 1, {{1, 3}});
  Scatter scatter;
  fixture.Bind(scatter);
  const auto bad = [&](int32_t slot, int32_t start, int32_t length) {
    fixture.slot = {slot}, fixture.start = {start}, fixture.length = {length};
    scatter.slot = fixture.slot.data(), scatter.start = fixture.start.data(), scatter.length = fixture.length.data();
    return scatter.FirstBadRow() == 0;
  };
  EXPECT_FALSE(bad(3, 0, 3));
  EXPECT_FALSE(bad(-1, 7, 9));
  EXPECT_FALSE(bad(9, 9, 0));
  EXPECT_TRUE(bad(4, 0, 1));
  EXPECT_TRUE(bad(-2, 0, 1));
  EXPECT_TRUE(bad(0, -1, 1));
  EXPECT_TRUE(bad(0, 1, 3));
  EXPECT_TRUE(bad(0, kMax, kMax));
  EXPECT_TRUE(bad(0, 0, -1));
}

// What is not given is 0, and all of the values.
TEST(Scatter, WithoutStartsOrLengths) {
  for (const bool starts : {false, true}) {
    for (const bool lengths : {false, true}) {
      Fixture fixture(9, 8, 7, {{3, 5}, {16, 5}});
      if (!starts) std::fill(fixture.start.begin(), fixture.start.end(), 0);
      if (!lengths) std::fill(fixture.length.begin(), fixture.length.end(), 5);
      const auto wanted = fixture.Wanted();
      Scatter scatter;
      fixture.Bind(scatter);
      const int64_t bad = scatter.FirstBadRow();
      if (!starts) scatter.start = nullptr;
      if (!lengths) scatter.length = nullptr;
      EXPECT_EQ(scatter.FirstBadRow(), bad);
      scatter.Prepare(2);
      DrainWith(scatter, 2);
      for (size_t k = 0; k < wanted.size(); ++k) EXPECT_EQ(fixture.columns[k].table, wanted[k]);
    }
  }
}

TEST(Scatter, PicksRowsOfTheValues) {
  std::vector<uint8_t> table(4 * 2), values = {1, 2, 3, 4, 5, 6};  // [4, 2], [3, 2]
  const std::vector<int32_t> slot = {3, 0, 1, 2}, start = {0, 0, 0, 1}, length = {2, 2, 2, 2}, from = {2, 3, -1, 0};
  Scatter scatter;
  scatter.rows = 4, scatter.slots = 4, scatter.steps = 2;
  scatter.slot = slot.data(), scatter.start = start.data(), scatter.length = length.data(), scatter.from = from.data();
  scatter.value_rows = 3;
  scatter.columns = {{table.data(), values.data(), 1, 2}};
  EXPECT_EQ(scatter.Prepare(1), 3);
  DrainWith(scatter, 1);
  EXPECT_EQ(table, (std::vector<uint8_t>{0, 0, 0, 0, 0, 1, 5, 6}));
  EXPECT_EQ(scatter.FirstBadRow(), 1);
}

TEST(Scatter, StampsAreOddWhileItWrites) {
  Fixture fixture(4, 4, 4, {{1 << 20, 4}});
  fixture.slot = {0, 2, -1, 3};
  fixture.start = {0, 0, 0, 0};
  fixture.length = {4, 0, 4, 4};
  std::vector<uint32_t> stamp = {8, 8, 8, 9}, value = {10, 12, 14, 9};
  Scatter scatter;
  fixture.Bind(scatter);
  scatter.stamp = stamp.data(), scatter.stamp_value = value.data();
  scatter.Prepare(4);
  ASSERT_GT(scatter.size(), 1);
  const std::vector<uint32_t> open = {9, 8, 11, 9};
  EXPECT_EQ(stamp, open);
  for (int64_t task = scatter.size(); task-- > 1;) scatter.Run(task);
  EXPECT_EQ(stamp, open);
  scatter.Run(0);
  EXPECT_EQ(stamp, (std::vector<uint32_t>{10, 8, 12, 9}));
}

TEST(Scatter, StampsOfRowsWithoutSteps) {
  Fixture fixture(2, 3, 2, {{1, 3}});
  fixture.slot = {1, 0};
  fixture.length = {0, 0};
  std::vector<uint32_t> stamp = {4, 0}, value = {0xFFFFFFFF, 6};
  Scatter scatter;
  fixture.Bind(scatter);
  scatter.stamp = stamp.data(), scatter.stamp_value = value.data();
  EXPECT_EQ(scatter.Prepare(2), 0);
  EXPECT_EQ(stamp, (std::vector<uint32_t>{6, 0xFFFFFFFF}));
}

// Reads as a network card does: nobody who checks the program knows of it.
__attribute__((noinline, no_sanitize("thread"))) bool AllTheSame(const uint8_t* bytes, int64_t count, uint8_t* value) {
  const volatile uint8_t* at = bytes;
  *value = at[0];
  for (int64_t i = 1; i < count; ++i) {
    if (at[i] != *value) return false;
  }
  return true;
}

// Writers overwrite a slot with bytes that are all alike while readers go by its stamp.
TEST(Scatter, ReadersNeverTakeATornRow) {
  constexpr int64_t kBytes = 300 << 10;  // several tasks
  std::vector<uint8_t> table(kBytes), values(kBytes);
  uint32_t stamp = 0;
  std::atomic<bool> stop{false};
  std::atomic<int64_t> whole{0}, torn{0};
  std::vector<std::thread> readers;
  for (int r = 0; r < 2; ++r) {
    readers.emplace_back([&] {
      while (!stop.load()) {
        const uint32_t before = LoadStamp(&stamp);
        uint8_t value = 0;
        const bool same = AllTheSame(table.data(), kBytes, &value);
        FenceBeforeClosing();
        if (before % 2 == 1 || LoadStamp(&stamp) != before) continue;
        ++whole;
        if (!same || value != static_cast<uint8_t>(before / 2)) ++torn;
        std::this_thread::yield();
      }
    });
  }
  const int32_t zero = 0, one = 1;
  for (uint32_t round = 1; round <= 200 || (whole.load() < 20 && round < 20000); ++round) {
    std::fill(values.begin(), values.end(), static_cast<uint8_t>(round));
    const uint32_t value = 2 * round;
    Scatter scatter;
    scatter.rows = scatter.slots = scatter.steps = 1;
    scatter.slot = scatter.start = &zero, scatter.length = &one;
    scatter.stamp = &stamp, scatter.stamp_value = &value;
    scatter.columns = {{table.data(), values.data(), kBytes, 1}};
    scatter.Prepare(2);
    DrainWith(scatter, 2);
    if (round % 8 == 0) std::this_thread::yield();
  }
  stop = true;
  for (std::thread& t : readers) t.join();
  EXPECT_EQ(torn.load(), 0);
  EXPECT_GT(whole.load(), 0);
}

}  // namespace
}  // namespace gear_jax
