// What the kernels of a remote fetch do for a row or a chunk, run on the CPU.
#include "cuda/fetch_device.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "cuda/scatter_device.h"

namespace gear_jax {
namespace {

TEST(OwnSlot, IsThatOfRowsOfTheGpusShards) {
  const std::vector<int32_t> slot{0, 4, 5, -1, 2, 2, 2, 0, 4}, shard{1, 1, 1, 1, 0, -1, 2, 3, 3};
  const std::vector<uint32_t> first(5), second(5);
  FetchIds ids;
  ids.rows = 9, ids.slots = 5;
  ids.id[0] = slot.data(), ids.id[3] = shard.data();
  ids.shard[0] = 1, ids.shard[1] = 3;
  ids.stamp[0] = first.data(), ids.stamp[1] = second.data();
  const std::vector<int32_t> wanted{0, 4, -1, -1, -1, -1, -1, 5, 9};
  for (const int32_t shards : {0, 1, 2}) {
    ids.shards = shards;
    for (int64_t row = 0; row < ids.rows; ++row) {
      EXPECT_EQ(OwnSlot(ids, row), wanted[row] < 5 * shards ? wanted[row] : -1) << row;
    }
  }
  EXPECT_EQ(OwnStamp(ids, 4), first.data() + 4);
  EXPECT_EQ(OwnStamp(ids, 5), second.data());
}

// Every byte of the rows that are taken is written once, and no other.
TEST(PlanTaken, CopiesWholeRows) {
  constexpr int64_t kRows = 5;
  for (const int64_t bytes : {1, 3, 15, 16, 17, 100, 1024, 1027, 5000}) {
    alignas(256) static uint8_t from[kRows * 5000], out[kRows * 5000 + 256];
    for (int64_t i = 0; i < kRows * bytes; ++i) from[i] = static_cast<uint8_t>(i * 7 + 1);
    std::memset(out, 0xCD, sizeof(out));
    const TakenPart part = MakeTakenPart(out, from, bytes, kRows);
    std::vector<int> written(kRows * bytes);
    for (const int64_t row : {0, 1, 3, 4}) {
      for (int64_t k = 0; k < part.units.d; ++k) {
        const ChunkPlan plan = PlanTaken(part, row, k);
        for (int b = plan.out_begin; b < plan.out_end; ++b) {
          const int64_t at = plan.out + b - out;
          ASSERT_TRUE(at >= row * bytes && at < (row + 1) * bytes) << bytes << " " << row << " " << k;
          ASSERT_TRUE(b >= plan.data_begin && b < plan.data_end);
          ++written[at];
          out[at] = plan.source[plan.shift + b];
        }
      }
    }
    for (int64_t i = 0; i < kRows * bytes; ++i) {
      const bool taken = i / bytes != 2;
      ASSERT_EQ(written[i], taken) << bytes << " " << i;
      ASSERT_EQ(out[i], taken ? from[i] : 0xCD) << bytes << " " << i;
    }
  }
}

TEST(StampOf, IsOddWhileTheSlotIsOpen) {
  for (const uint32_t value : {0u, 1u, 2u, 7u, 8u, 0xFFFFFFFEu, 0xFFFFFFFFu}) {
    EXPECT_EQ(StampOf(value, false), value);
    EXPECT_EQ(StampOf(value, true) % 2, 1u);
    EXPECT_EQ(StampOf(value, true), value % 2 == 0 ? value - 1 : value);
  }
}

TEST(Skipped, RowsWithoutASlotOrAValue) {
  const std::vector<int32_t> slot{0, 4, 5, -1, 2, 2}, from{0, 2, 0, 0, 3, -1};
  ScatterRows rows{6, 5, 1, slot.data(), nullptr, nullptr, nullptr, -1};
  const std::vector<bool> without{false, false, true, true, false, false}, with{false, false, true, true, true, true};
  for (int64_t row = 0; row < 6; ++row) EXPECT_EQ(Skipped(rows, row), without[row]) << row;
  rows.from = from.data(), rows.value_rows = 3;
  for (int64_t row = 0; row < 6; ++row) EXPECT_EQ(Skipped(rows, row), with[row]) << row;
}

}  // namespace
}  // namespace gear_jax
