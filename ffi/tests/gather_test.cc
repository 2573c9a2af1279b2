#include "ffi/gather.h"

#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <random>
#include <thread>
#include <tuple>
#include <vector>

#include "ffi/copy_past_caches.h"
#include "ffi/pointers.h"

namespace gear_jax {
namespace {

constexpr int64_t kMin = std::numeric_limits<int32_t>::min();
constexpr int64_t kMax = std::numeric_limits<int32_t>::max();

void DrainWith(Work& work, int threads) {
  std::vector<std::thread> helpers;
  for (int i = 1; i < threads; ++i) helpers.emplace_back([&work] { work.Drain(); });
  work.Drain();
  for (std::thread& t : helpers) t.join();
}

// A table of random bytes and everything that a Gather reads.
struct Table {
  Table(int64_t slots, int64_t steps, int64_t step_bytes, int64_t rows, uint32_t seed)
      : slots(slots), steps(steps), step_bytes(step_bytes), rows(rows), bytes(slots * steps * step_bytes) {
    std::mt19937 random(seed);
    for (uint8_t& b : bytes) b = static_cast<uint8_t>(random());
    const auto draw = [&](int64_t low, int64_t high) {
      return static_cast<int32_t>(std::uniform_int_distribution<int64_t>(low, high)(random));
    };
    for (int64_t i = 0; i < rows; ++i) {
      slot.push_back(draw(-1, slots));
      anchor.push_back(i % 7 == 6 ? draw(kMin, kMax) : draw(-steps - 2, steps + 2));
      length.push_back(i % 7 == 5 ? draw(kMin, kMax) : draw(-1, steps + 1));
    }
  }

  // Binds the work to this table, with outputs of exactly the right size: the sanitizer guards their ends.
  void Bind(Gather& gather, const std::vector<Window>& windows, const std::vector<uint8_t>& pad) {
    gather.rows = rows;
    gather.slots = slots;
    gather.steps = steps;
    gather.slot = slot.data();
    gather.anchor = anchor.data();
    gather.length = length.data();
    out.assign(windows.size(), {});
    mask.assign(windows.size(), {});
    for (size_t k = 0; k < windows.size(); ++k) {
      out[k].assign(rows * windows[k].length * step_bytes, 0xCD);
      mask[k].assign(rows * windows[k].length, 0xCD);
      GatherColumn column;
      column.table = bytes.data();
      column.out = out[k].data();
      column.step_bytes = step_bytes;
      column.window = windows[k];
      std::copy(pad.begin(), pad.end(), column.pad_value.begin());
      column.value_bytes = static_cast<int64_t>(pad.size());
      gather.columns.push_back(column);
      gather.masks.push_back({mask[k].data(), windows[k]});
    }
  }

  // The step that element w shows by the documentation, or -1.
  int64_t Shows(const Window& window, int64_t row, int64_t w) const {
    if (slot[row] < 0 || slot[row] >= slots) return -1;
    std::vector<int64_t> seen;
    const int64_t first = window.offset + (window.anchored ? anchor[row] : 0);
    for (int64_t i = 0; i < window.length; ++i) {
      if (first + i >= 0 && first + i < std::min<int64_t>(length[row], steps)) seen.push_back(first + i);
    }
    if (seen.empty()) return -1;
    const int64_t count = static_cast<int64_t>(seen.size());
    int64_t begin = seen[0] - first;
    if (window.pad == Pad::kHead) begin = window.length - count;
    if (window.pad == Pad::kTail) begin = 0;
    return w < begin || w >= begin + count ? -1 : seen[w - begin];
  }

  void Check(const std::vector<Window>& windows, const std::vector<uint8_t>& pad) const {
    for (size_t k = 0; k < windows.size(); ++k) {
      for (int64_t row = 0; row < rows; ++row) {
        for (int64_t w = 0; w < windows[k].length; ++w) {
          const int64_t step = Shows(windows[k], row, w);
          const int64_t element = row * windows[k].length + w;
          ASSERT_EQ(mask[k][element], step >= 0) << "column " << k << ", row " << row << ", element " << w;
          const uint8_t* got = out[k].data() + element * step_bytes;
          if (step_bytes == 0) continue;
          if (step >= 0) {
            const uint8_t* from = bytes.data() + (slot[row] * steps + step) * step_bytes;
            ASSERT_EQ(std::memcmp(got, from, step_bytes), 0) << "column " << k << ", row " << row << ", element " << w;
            continue;
          }
          for (int64_t b = 0; b < step_bytes; ++b) {
            ASSERT_EQ(got[b], pad[b % pad.size()]) << "column " << k << ", row " << row << ", element " << w;
          }
        }
      }
    }
  }

  int64_t slots, steps, step_bytes, rows;
  std::vector<uint8_t> bytes;
  std::vector<int32_t> slot, anchor, length;
  std::vector<std::vector<uint8_t>> out, mask;
};

std::vector<Window> EveryWindow(int64_t offset, int64_t length, int64_t steps) {
  std::vector<Window> windows;
  for (const Pad pad : {Pad::kAround, Pad::kHead, Pad::kTail}) {
    windows.push_back({offset, length, true, pad});
    windows.push_back({0, steps, false, pad});
  }
  return windows;
}

TEST(See, ClampsWithoutOverflow) {
  const Window window{-kMax, kMax, true, Pad::kAround};
  for (const int64_t anchor : {kMin, int64_t{-1}, int64_t{0}, kMax}) {
    for (const int64_t length : {kMin, int64_t{0}, int64_t{5}, kMax}) {
      const Visible seen = See(window, anchor, length, 5);
      EXPECT_GE(seen.count, 0);
      EXPECT_LE(seen.step + seen.count, 5);
      EXPECT_LE(seen.element + seen.count, window.length);
    }
  }
}

TEST(See, PlacesWhatIsVisible) {
  const auto see = [](Pad pad, int64_t anchor) { return See({-2, 4, true, pad}, anchor, 3, 7); };
  EXPECT_EQ(see(Pad::kAround, 0).element, 2);
  EXPECT_EQ(see(Pad::kHead, 0).element, 2);
  EXPECT_EQ(see(Pad::kTail, 0).element, 0);
  EXPECT_EQ(see(Pad::kAround, 2).element, 0);
  EXPECT_EQ(see(Pad::kHead, 2).element, 1);
  EXPECT_EQ(see(Pad::kHead, 2).step, 0);
  EXPECT_EQ(see(Pad::kHead, 2).count, 3);
  EXPECT_EQ(see(Pad::kAround, 9).count, 0);
}

class GatherSizes : public testing::TestWithParam<std::tuple<int64_t, int64_t>> {};

TEST_P(GatherSizes, EveryWindow) {
  const auto [step_bytes, rows] = GetParam();
  Table table(5, 9, step_bytes, rows, 1);
  const std::vector<Window> windows = EveryWindow(-3, 7, table.steps);
  Gather gather;
  table.Bind(gather, windows, {7});
  gather.Prepare(2);
  gather.Drain();
  table.Check(windows, {7});
}

INSTANTIATE_TEST_SUITE_P(Sizes, GatherSizes,
                         testing::Combine(testing::Values(1, 3, 17, 64, 4099), testing::Values(0, 1, 2, 31)));

// Rows of 97 * 24 bytes and pad values of several widths straddle the limits between tasks, which are multiples of 64.
class GatherSplit : public testing::TestWithParam<std::tuple<int64_t, int>> {};

TEST_P(GatherSplit, TasksCutRowsAndPadValues) {
  const auto [width, threads] = GetParam();
  Table table(3, 101, 48, 150, 2);
  const std::vector<Window> windows = EveryWindow(-50, 97, table.steps);
  std::vector<uint8_t> pad;
  for (int64_t i = 0; i < width; ++i) pad.push_back(static_cast<uint8_t>(0xA0 + i));
  Gather gather;
  table.Bind(gather, windows, pad);
  const int64_t bytes = gather.Prepare(threads);
  int64_t wanted = 0;
  for (const auto& out : table.out) wanted += static_cast<int64_t>(out.size());
  for (const auto& mask : table.mask) wanted += static_cast<int64_t>(mask.size());
  EXPECT_EQ(bytes, wanted);
  EXPECT_GT(gather.size(), 6);
  DrainWith(gather, threads);
  table.Check(windows, pad);
}

INSTANTIATE_TEST_SUITE_P(Widths, GatherSplit,
                         testing::Combine(testing::Values(1, 2, 4, 8, 16), testing::Values(1, 2, 5)));

TEST(Gather, OneRowOverSeveralTasks) {
  Table table(1, 3, (1 << 20) + 1, 2, 3);
  table.slot = {0, 0};
  table.anchor = {1, 2};
  table.length = {3, 2};
  const std::vector<Window> windows = {{-1, 3, true, Pad::kAround}, {-2, 4, true, Pad::kHead}};
  Gather gather;
  table.Bind(gather, windows, {0});
  gather.Prepare(8);
  DrainWith(gather, 3);
  table.Check(windows, {0});
}

TEST(Gather, BatchesThatNoCacheHolds) {
  const std::vector<Window> windows{{0, 40, false, Pad::kAround}, {-3, 5, true, Pad::kHead}};
  static_assert(300 * 45 * 1301 >= kPastCachesBytes);
  Table table(9, 40, 1301, 300, 5);
  Gather gather;
  table.Bind(gather, windows, {7});
  gather.Prepare(4);
  DrainWith(gather, 4);
  table.Check(windows, {7});
}

TEST(Gather, TasksRunInAnyOrder) {
  Table table(3, 101, 48, 301, 4);
  const std::vector<Window> windows = EveryWindow(-10, 60, table.steps);
  Gather gather;
  table.Bind(gather, windows, {1, 2});
  gather.Prepare(4);
  for (int64_t task = gather.size(); task-- > 0;) gather.Run(task);
  table.Check(windows, {1, 2});
}

TEST(Gather, MoreThreadsThanTasks) {
  Table table(2, 3, 4, 1, 5);
  const std::vector<Window> windows = {{0, 2, true, Pad::kAround}};
  Gather gather;
  table.Bind(gather, windows, {0});
  gather.Prepare(64);
  DrainWith(gather, 8);
  table.Check(windows, {0});
}

TEST(Gather, EmptyTables) {
  for (const auto& [slots, steps, step_bytes] :
       {std::tuple<int64_t, int64_t, int64_t>{0, 4, 3}, {2, 0, 3}, {2, 4, 0}, {0, 0, 0}}) {
    Table table(slots, steps, step_bytes, 5, 6);
    const std::vector<Window> windows = EveryWindow(-1, 3, steps);
    Gather gather;
    table.Bind(gather, windows, {9});
    gather.Prepare(2);
    DrainWith(gather, 2);
    table.Check(windows, {9});
  }
}

// The table cut into shards that lie anywhere, each in memory of exactly its size.
TEST(Gather, ATableInShards) {
  for (const int64_t shards : {1, 2, 3, 6, 60}) {
    for (const auto& [steps, step_bytes] : {std::tuple<int64_t, int64_t>{9, 7}, {1, 4}, {1, 3}, {101, 480}}) {
      Table table(60, steps, step_bytes, 47, 8);
      std::vector<Window> windows = EveryWindow(-3, 7, steps);
      Gather gather;
      table.Bind(gather, windows, {9});
      const int64_t bytes = static_cast<int64_t>(table.bytes.size()) / shards;
      std::vector<std::vector<uint8_t>> parts;
      std::vector<uint32_t> words(2 * shards);
      for (int64_t s = 0; s < shards; ++s) {
        parts.emplace_back(table.bytes.begin() + s * bytes, table.bytes.begin() + (s + 1) * bytes);
        WritePointer(parts.back().data(), &words[2 * s]);
      }
      gather.shards = shards;
      for (size_t k = 0; k < windows.size(); k += 2) {  // the others stay in one piece
        gather.columns[k].table = nullptr;
        gather.columns[k].shards = words.data();
      }
      gather.Prepare(3);
      DrainWith(gather, 3);
      table.Check(windows, {9});
    }
  }
}

// What is not given is 0, and all steps.
TEST(Gather, WithoutAnchorsAndLengths) {
  for (const auto& [steps, step_bytes] : {std::tuple<int64_t, int64_t>{9, 7}, {1, 4}, {1, 3}}) {
    Table table(6, steps, step_bytes, 13, 9);
    std::fill(table.anchor.begin(), table.anchor.end(), 0);
    std::fill(table.length.begin(), table.length.end(), static_cast<int32_t>(steps));
    const std::vector<Window> windows = EveryWindow(-3, 7, steps);
    Gather gather;
    table.Bind(gather, windows, {9});
    gather.anchor = gather.length = nullptr;
    gather.Prepare(2);
    DrainWith(gather, 2);
    table.Check(windows, {9});
  }
}

TEST(Gather, NoColumns) {
  Gather gather;
  EXPECT_EQ(gather.Prepare(2), 0);
  DrainWith(gather, 2);
}

TEST(Gather, FirstBadRow) {
  Table table(4, 3, 1, 3, 7);
  Gather gather;
  table.Bind(gather, {}, {0});
  table.slot = {0, 3, 2};
  gather.slot = table.slot.data();
  EXPECT_EQ(gather.FirstBadRow(), -1);
  table.slot[1] = 4;
  EXPECT_EQ(gather.FirstBadRow(), 1);
  table.slot[0] = -1;
  EXPECT_EQ(gather.FirstBadRow(), 0);
}

TEST(TaskBytes, IsAMultipleOf64WithinBounds) {
  for (const int64_t total : {int64_t{0}, int64_t{1}, int64_t{1} << 20, (int64_t{1} << 24) + 13, int64_t{1} << 40}) {
    for (const int64_t threads : {0, 1, 3, 128}) {
      const int64_t bytes = TaskBytes(total, threads);
      EXPECT_EQ(bytes % 64, 0);
      EXPECT_GE(bytes, 64 << 10);
      EXPECT_LE(bytes, 2 << 20);
    }
  }
}

TEST(AdviseHugePages, TakesAnyBuffer) {
  std::vector<uint8_t> data(5 << 20, 1);
  AdviseHugePages(data.data() + 3, static_cast<int64_t>(data.size()) - 3);
  AdviseHugePages(data.data(), 1);
  AdviseHugePages(nullptr, 0);
  EXPECT_EQ(data.front() + data.back(), 2);
}

}  // namespace
}  // namespace gear_jax
