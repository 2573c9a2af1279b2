// gather and scatter on a GPU, compared with the CPU's. Small enough for compute-sanitizer.
#include <algorithm>
#include <numeric>
#include <random>

#include "cuda/gather_kernels.h"
#include "cuda/order_kernels.h"
#include "cuda/scatter_kernels.h"
#include "cuda/tests/device.h"

namespace gear_jax {
namespace {

using Bytes = std::vector<uint8_t>;
using Ints = std::vector<int32_t>;

class CopyKernels : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    if (!HasDevice()) GTEST_SKIP() << "needs a GPU";
  }
  int32_t Draw(int64_t low, int64_t high) {
    return static_cast<int32_t>(std::uniform_int_distribution<int64_t>(low, high)(rng_));
  }
  Bytes Random(int64_t bytes) {
    Bytes out(bytes);
    for (uint8_t& b : out) b = static_cast<uint8_t>(rng_());
    return out;
  }
  std::mt19937 rng_{0};
};

// More columns than one launch takes, of all alignments, with every kind of window.
TEST_P(CopyKernels, Gather) {
  const int64_t steps = 37, slots = 19;
  const std::vector<int64_t> any = {1, 2, 3, 4, 8, 11, 12, 16, 17, 44, 64, 4096}, aligned = {16, 64, 4096, 112};
  for (const int64_t rows : {0, 1, 7, 300}) {
    for (const bool ordered : {false, true}) {
      const std::vector<int64_t>& widths = rows != 7 && ordered ? aligned : any;
      Ints slot, anchor, length;
      for (int64_t i = 0; i < rows; ++i) {
        slot.push_back(Draw(-1, slots));
        anchor.push_back(Draw(-3, steps + 3));
        length.push_back(Draw(-1, steps + 2));
      }
      const DeviceArray<int32_t> d_slot(slot), d_anchor(anchor), d_length(length),
          order(Ints(rows + kOrderScratch, -1));
      const DeviceArray<int32_t> ticket({5}), ticket_out({0});
      GatherCall call{rows, slots, steps, slot.data(), anchor.data(), length.data(), {}, {}};
      GatherCall device{rows, slots, steps, d_slot.data(), d_anchor.data(), d_length.data(), {}, {}};
      std::vector<std::unique_ptr<DeviceArray<uint8_t>>> tables, outs, masks;
      std::vector<Bytes> table, want, want_mask;
      for (int k = 0; k < 20; ++k) {
        const int64_t step_bytes = widths[k % widths.size()], width = k % 7 * (step_bytes > 1000 ? 1 : 5);
        GatherColumn column;
        column.window = {Draw(-6, 6), width, k % 4 != 0, static_cast<Pad>(k % 3)};
        column.step_bytes = step_bytes;
        column.pad_value.fill(static_cast<uint8_t>(k));
        table.push_back(Random(slots * steps * step_bytes));
        want.emplace_back(rows * width * step_bytes, 0xAA);
        want_mask.emplace_back(rows * width, 0xAA);
        tables.push_back(std::make_unique<DeviceArray<uint8_t>>(table.back(), GetParam()));
        outs.push_back(std::make_unique<DeviceArray<uint8_t>>(want.back()));
        masks.push_back(std::make_unique<DeviceArray<uint8_t>>(want_mask.back()));
        column.table = tables.back()->data();
        column.out = outs.back()->data();
        device.columns.push_back(column);
        device.masks.push_back({masks.back()->data(), column.window});
        call.columns.push_back(column);
        call.masks.push_back({nullptr, column.window});
      }
      for (int k = 0; k < 20; ++k) {
        call.columns[k].table = table[k].data();
        call.columns[k].out = want[k].data();
        call.masks[k].out = want_mask[k].data();
      }
      if (ordered) {
        ASSERT_CUDA(LaunchOrder(d_slot.data(), rows, slots, order.data(), nullptr));
        Ints rank = order.Content(), all(rows);
        rank.resize(rows);
        std::iota(all.begin(), all.end(), 0);
        const auto place = [&](int32_t row) { return slot[row] < 0 || slot[row] >= slots ? 0 : slot[row]; };
        EXPECT_TRUE(
            std::is_sorted(rank.begin(), rank.end(), [&](int32_t a, int32_t b) { return place(a) < place(b); }));
        std::sort(rank.begin(), rank.end());
        EXPECT_EQ(rank, all);
      }
      const GatherLaunch launch{ordered ? 3 : 0, ordered ? order.data() : nullptr, ticket.data(), ticket_out.data()};
      Gather reference(call);
      reference.Prepare(1);
      reference.Drain();
      ASSERT_CUDA(LaunchGather(device, launch, nullptr));
      ASSERT_CUDA(cudaDeviceSynchronize());
      for (int k = 0; k < 20; ++k) {
        EXPECT_EQ(outs[k]->Content(), want[k]) << "column " << k << " of " << rows << " rows";
        EXPECT_EQ(masks[k]->Content(), want_mask[k]) << "mask " << k << " of " << rows << " rows";
      }
      EXPECT_EQ(ticket_out.Content(), Ints{5});
    }
  }
}

TEST_P(CopyKernels, OrderOfManyRowsOfALargeTable) {
  const int64_t slots = (int64_t{1} << 31) - 1;
  for (const int64_t rows : {1, 1000, 100003}) {
    Ints slot;
    for (int64_t i = 0; i < rows; ++i) slot.push_back(Draw(0, slots - 1));
    const DeviceArray<int32_t> d_slot(slot), order(Ints(rows + kOrderScratch, -1));
    ASSERT_CUDA(LaunchOrder(d_slot.data(), rows, slots, order.data(), nullptr));
    Ints rank = order.Content();
    rank.resize(rows);
    for (size_t i = 1; i < rank.size(); ++i) {
      EXPECT_LE(slot[rank[i - 1]] >> 17, slot[rank[i]] >> 17);  // 2^31 slots in 2^14 ranges
    }
    std::sort(rank.begin(), rank.end());
    for (int64_t i = 0; i < rows; ++i) ASSERT_EQ(rank[i], i);
  }
}

TEST_P(CopyKernels, Scatter) {
  const int64_t steps = 37, slots = 400;
  const int64_t widths[] = {1, 2, 3, 4, 8, 11, 12, 16, 17, 44, 64, 1000};
  for (const int64_t rows : {0, 1, 7, 300}) {
    Ints slot(slots), start, length;
    std::iota(slot.begin(), slot.end(), 0);
    std::shuffle(slot.begin(), slot.end(), rng_);
    slot.resize(rows);
    for (int64_t i = 0; i < rows; ++i) {
      if (i % 5 == 4) slot[i] = i % 2 ? -1 : static_cast<int32_t>(slots);
      start.push_back(Draw(-3, steps + 3));
      length.push_back(Draw(-1, steps + 2));
    }
    const DeviceArray<int32_t> d_slot(slot), d_start(start), d_length(length);
    ScatterCall call{rows, slots, steps, slot.data(), start.data(), length.data(), {}};
    ScatterCall device{rows, slots, steps, d_slot.data(), d_start.data(), d_length.data(), {}};
    std::vector<std::unique_ptr<DeviceArray<uint8_t>>> tables, values;
    std::vector<Bytes> want, from;
    for (int k = 0; k < 40; ++k) {
      const int64_t step_bytes = widths[k % 12], value_steps = Draw(0, steps);
      want.push_back(Random(slots * steps * step_bytes));
      from.push_back(Random(rows * value_steps * step_bytes));
      tables.push_back(std::make_unique<DeviceArray<uint8_t>>(want.back(), GetParam()));
      values.push_back(std::make_unique<DeviceArray<uint8_t>>(from.back()));
      device.columns.push_back({tables.back()->data(), values.back()->data(), step_bytes, value_steps});
      call.columns.push_back({nullptr, nullptr, step_bytes, value_steps});
    }
    for (int k = 0; k < 40; ++k) {
      call.columns[k].table = want[k].data();
      call.columns[k].values = from[k].data();
    }
    ASSERT_CUDA(LaunchScatter(device, 0, nullptr));
    ASSERT_CUDA(cudaDeviceSynchronize());
    Scatter reference(call);
    reference.Prepare(1);
    reference.Drain();
    for (int k = 0; k < 40; ++k)
      EXPECT_EQ(tables[k]->Content(), want[k]) << "column " << k << " of " << rows << " rows";
  }
}

INSTANTIATE_TEST_SUITE_P(Tables, CopyKernels, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "InHostMemory" : "OnTheDevice"; });

}  // namespace
}  // namespace gear_jax
