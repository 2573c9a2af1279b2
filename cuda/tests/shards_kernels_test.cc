// Pointers and gathers of tables in shards on a GPU, compared with the CPU's. Small enough for compute-sanitizer.
#include <algorithm>
#include <memory>
#include <random>

#include "cuda/gather_kernels.h"
#include "cuda/order_kernels.h"
#include "cuda/pointers_kernels.h"
#include "cuda/tests/device.h"
#include "ffi/pointers.h"

namespace gear_jax {
namespace {

using Bytes = std::vector<uint8_t>;
using Ints = std::vector<int32_t>;
using Words = std::vector<uint32_t>;

class ShardsKernels : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!HasDevice()) GTEST_SKIP() << "needs a GPU";
  }
  Bytes Random(int64_t bytes) {
    Bytes out(bytes);
    for (uint8_t& b : out) b = static_cast<uint8_t>(rng_());
    return out;
  }
  Ints Draw(int64_t count, int64_t low, int64_t high) {
    Ints out(count);
    for (int32_t& x : out) x = static_cast<int32_t>(std::uniform_int_distribution<int64_t>(low, high)(rng_));
    return out;
  }
  std::mt19937 rng_{0};
};

TEST_F(ShardsKernels, PointersOfAnyNumber) {
  for (const size_t count : {0, 1, 499, 500, 501, 1100}) {
    std::vector<const void*> pointers;
    Words want(2 * count);
    for (size_t k = 0; k < count; ++k) {
      pointers.push_back(reinterpret_cast<const void*>(uintptr_t{0x7F0012345678} + 128 * k));
      WritePointer(pointers.back(), &want[2 * k]);
    }
    const DeviceArray<uint32_t> out(Words(2 * count, 1));
    const DeviceArray<int32_t> ticket({5}), ticket_out({0});
    ASSERT_CUDA(LaunchPointers(pointers, out.data(), ticket.data(), ticket_out.data(), nullptr));
    ASSERT_CUDA(cudaDeviceSynchronize());
    EXPECT_EQ(out.Content(), want);
    EXPECT_EQ(ticket_out.Content(), Ints{5});
  }
}

TEST_F(ShardsKernels, MemoryThatAllGpusRead) {
  const Bytes pageable(64);
  const DeviceArray<uint8_t> device(pageable), host(pageable, true);
  bool is = false;
  ASSERT_CUDA(IsReadByAll(host.data() + 3, &is));
  EXPECT_TRUE(is);
  for (const uint8_t* pointer : {pageable.data(), static_cast<const uint8_t*>(device.data())}) {
    ASSERT_CUDA(IsReadByAll(pointer, &is));
    EXPECT_FALSE(is);
  }
}

// More columns than one launch takes, some of them in shards, of all alignments; in order of their slots and not.
TEST_F(ShardsKernels, Gather) {
  const int64_t steps = 17, slots = 24;
  const std::vector<int64_t> any = {1, 2, 3, 4, 8, 11, 12, 16, 17, 44, 64, 4096}, aligned = {16, 64, 4096, 112};
  for (const int64_t shards : {1, 2, 4, 24}) {
    for (const int64_t rows : {0, 1, 7, 300}) {
      const bool ordered = rows != 7;
      const std::vector<int64_t>& widths = shards % 4 == 0 ? aligned : any;
      const Ints slot = Draw(rows, -1, slots), anchor = Draw(rows, -3, steps + 3), length = Draw(rows, -1, steps + 2);
      const DeviceArray<int32_t> d_slot(slot), d_anchor(anchor), d_length(length), order(Ints(rows + kOrderScratch));
      const DeviceArray<int32_t> ticket({5}), ticket_out({0});
      GatherCall call{rows, slots, steps, slot.data(), anchor.data(), length.data(), {}, {}, shards};
      GatherCall device{rows, slots, steps, d_slot.data(), d_anchor.data(), d_length.data(), {}, {}, shards};
      std::vector<std::unique_ptr<DeviceArray<uint8_t>>> parts, outs, masks;
      std::vector<std::unique_ptr<DeviceArray<uint32_t>>> words;
      std::vector<Bytes> table, want, want_mask;
      for (int k = 0; k < 20; ++k) {
        const int64_t step_bytes = widths[k % widths.size()], width = k % 7 * (step_bytes > 1000 ? 1 : 5);
        GatherColumn column;
        column.window = {k % 13 - 6, width, k % 4 != 0, static_cast<Pad>(k % 3)};
        column.step_bytes = step_bytes;
        column.pad_value.fill(static_cast<uint8_t>(k));
        table.push_back(Random(slots * steps * step_bytes));
        want.emplace_back(rows * width * step_bytes, 0xAA);
        want_mask.emplace_back(rows * width, 0xAA);
        outs.push_back(std::make_unique<DeviceArray<uint8_t>>(want.back()));
        masks.push_back(std::make_unique<DeviceArray<uint8_t>>(want_mask.back()));
        GatherColumn on_device = column;
        on_device.out = outs.back()->data();
        if (k % 5 == 4) {  // in one piece
          parts.push_back(std::make_unique<DeviceArray<uint8_t>>(table.back(), true));
          on_device.table = parts.back()->data();
        } else {
          Words pointers(2 * shards);
          const int64_t bytes = static_cast<int64_t>(table.back().size()) / shards;
          for (int64_t s = 0; s < shards; ++s) {
            const auto from = table.back().begin() + s * bytes;
            parts.push_back(std::make_unique<DeviceArray<uint8_t>>(Bytes(from, from + bytes), true));
            ASSERT_EQ(reinterpret_cast<uintptr_t>(parts.back()->data()) % kPointerAlignment, 0u);
            WritePointer(parts.back()->data(), &pointers[2 * s]);
          }
          words.push_back(std::make_unique<DeviceArray<uint32_t>>(pointers));
          on_device.shards = words.back()->data();
          on_device.address_alignment = kPointerAlignment;
        }
        device.columns.push_back(on_device);
        device.masks.push_back({masks.back()->data(), column.window});
        call.columns.push_back(column);
        call.masks.push_back({nullptr, column.window});
      }
      for (int k = 0; k < 20; ++k) {
        call.columns[k].table = table[k].data();
        call.columns[k].out = want[k].data();
        call.masks[k].out = want_mask[k].data();
      }
      if (ordered) ASSERT_CUDA(LaunchOrder(d_slot.data(), rows, slots, order.data(), nullptr));
      const GatherLaunch launch{ordered ? 3 : 0, ordered ? order.data() : nullptr, ticket.data(), ticket_out.data()};
      Gather reference(call);
      reference.Prepare(1);
      reference.Drain();
      ASSERT_CUDA(LaunchGather(device, launch, nullptr));
      ASSERT_CUDA(cudaDeviceSynchronize());
      for (int k = 0; k < 20; ++k) {
        EXPECT_EQ(outs[k]->Content(), want[k]) << "column " << k << ", " << rows << " rows, " << shards << " shards";
        EXPECT_EQ(masks[k]->Content(), want_mask[k])
            << "mask " << k << ", " << rows << " rows, " << shards << " shards";
      }
      EXPECT_EQ(ticket_out.Content(), Ints{5});
    }
  }
}

}  // namespace
}  // namespace gear_jax
