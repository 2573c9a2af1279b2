// gather by the copy engines of a GPU, compared with the CPU's gather. Small enough for compute-sanitizer.
#include <algorithm>
#include <cstring>
#include <memory>
#include <random>

#include "cuda/device_engine.h"
#include "cuda/padding_kernels.h"
#include "cuda/tests/device.h"

namespace gear_jax {
namespace {

using Bytes = std::vector<uint8_t>;
using Ints = std::vector<int32_t>;

class EngineKernels : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!HasDevice()) GTEST_SKIP() << "needs a GPU";
    ASSERT_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  }
  void TearDown() override {
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }
  bool HasBatchCopy() const {
    int driver = 0;
    return CUDART_VERSION >= 12080 && cudaDriverGetVersion(&driver) == cudaSuccess && driver >= 12080;
  }
  int32_t Draw(int64_t low, int64_t high) {
    return static_cast<int32_t>(std::uniform_int_distribution<int64_t>(low, high)(rng_));
  }
  Bytes Random(int64_t bytes) {
    Bytes out(bytes);
    for (uint8_t& b : out) b = static_cast<uint8_t>(rng_());
    return out;
  }
  cudaStream_t stream_ = nullptr;
  std::mt19937 rng_{0};
};

// Columns of all alignments, with every kind of window; some copied, some read by the kernel.
TEST_F(EngineKernels, AgreesWithTheCpu) {
  if (!HasBatchCopy()) GTEST_SKIP() << "needs a driver for CUDA 12.8";
  const int64_t steps = 37, slots = 19, widths[] = {1, 2, 3, 4, 8, 11, 12, 16, 17, 44, 64, 4096};
  for (const int64_t rows : {0, 1, 7, 300}) {
    Ints slot, anchor, length;
    for (int64_t i = 0; i < rows; ++i) {
      slot.push_back(Draw(-1, slots));
      anchor.push_back(Draw(-3, steps + 3));
      length.push_back(Draw(-1, steps + 2));
    }
    const DeviceArray<int32_t> h_slot(slot, true), h_anchor(anchor, true), h_length(length, true);
    const DeviceArray<int32_t> ticket({5}), ticket_out({0});
    GatherCall call{rows, slots, steps, slot.data(), anchor.data(), length.data(), {}, {}};
    GatherCall device{rows, slots, steps, h_slot.data(), h_anchor.data(), h_length.data(), {}, {}};
    std::vector<std::unique_ptr<DeviceArray<uint8_t>>> tables, outs, masks;
    std::vector<Bytes> table, want, want_mask;
    std::vector<bool> copied;
    const int columns = 14;
    for (int k = 0; k < columns; ++k) {
      const int64_t step_bytes = widths[k % 12], width = k % 7 * (step_bytes > 1000 ? 1 : 5);
      GatherColumn column;
      column.window = {Draw(-6, 6), width, k % 4 != 0, static_cast<Pad>(k % 3)};
      column.step_bytes = step_bytes;
      column.value_bytes = step_bytes % 4 == 0 ? 4 : 1;
      for (uint8_t& b : column.pad_value) b = static_cast<uint8_t>(k % 2 ? rng_() : 0);
      copied.push_back(k % 5 != 4);
      table.push_back(Random(slots * steps * step_bytes));
      want.emplace_back(rows * width * step_bytes, 0xAA);
      want_mask.emplace_back(rows * width, 0xAA);
      tables.push_back(std::make_unique<DeviceArray<uint8_t>>(table.back(), k % 3 != 2));
      outs.push_back(std::make_unique<DeviceArray<uint8_t>>(want.back()));
      masks.push_back(std::make_unique<DeviceArray<uint8_t>>(want_mask.back()));
      column.table = tables.back()->data();
      column.out = outs.back()->data();
      device.columns.push_back(column);
      device.masks.push_back({masks.back()->data(), column.window});
      call.columns.push_back(column);
      call.masks.push_back({nullptr, column.window});
    }
    for (int k = 0; k < columns; ++k) {
      call.columns[k].table = table[k].data();
      call.columns[k].out = want[k].data();
      call.masks[k].out = want_mask[k].data();
    }
    Gather reference(call);
    reference.Prepare(1);
    reference.Drain();
    ASSERT_CUDA(cudaDeviceSynchronize());  // the fills of the arrays are not on the stream
    const EngineFault fault =
        LaunchEngineGather(device, copied, {12, nullptr, ticket.data(), ticket_out.data()}, stream_);
    ASSERT_EQ(fault.error, cudaSuccess) << fault.step << ": " << cudaGetErrorString(fault.error);
    ASSERT_CUDA(cudaStreamSynchronize(stream_));
    for (int k = 0; k < columns; ++k) {
      EXPECT_EQ(outs[k]->Content(), want[k]) << "column " << k << " of " << rows << " rows";
      EXPECT_EQ(masks[k]->Content(), want_mask[k]) << "mask " << k << " of " << rows << " rows";
    }
    EXPECT_EQ(ticket_out.Content(), Ints{5});
  }
}

// A write of the table that is enqueued before the gather is seen by it.
TEST_F(EngineKernels, ComesBehindWhatIsOnTheStream) {
  if (!HasBatchCopy()) GTEST_SKIP() << "needs a driver for CUDA 12.8";
  const int64_t bytes = 4 << 20;
  const DeviceArray<uint8_t> table(Bytes(bytes, 1), true), out(Bytes(bytes, 0)), values(Bytes(bytes, 9));
  const DeviceArray<int32_t> slot({0}, true), anchor({0}, true), length({1}, true);
  GatherCall call{1, 1, 1, slot.data(), anchor.data(), length.data(), {}, {}};
  GatherColumn column;
  column.table = table.data();
  column.out = out.data();
  column.step_bytes = bytes;
  column.window = {0, 1, false, Pad::kAround};
  call.columns.push_back(column);
  ASSERT_CUDA(cudaDeviceSynchronize());
  ASSERT_CUDA(cudaMemcpyAsync(table.data(), values.data(), bytes, cudaMemcpyDefault, stream_));
  ASSERT_EQ(LaunchEngineGather(call, {true}, {}, stream_).error, cudaSuccess);
  ASSERT_CUDA(cudaStreamSynchronize(stream_));
  EXPECT_EQ(out.Content(), Bytes(bytes, 9));
}

TEST_F(EngineKernels, RowsThatTheHostCannotReadAreAnError) {
  const DeviceArray<int32_t> numbers({0});
  const GatherCall call{1, 1, 1, numbers.data(), numbers.data(), numbers.data(), {}, {}};
  EXPECT_EQ(LaunchEngineGather(call, {}, {}, stream_).error, cudaErrorInvalidValue);
}

// More ranges than one launch takes, of all alignments and sizes.
TEST_F(EngineKernels, Padding) {
  Bytes want(1 << 20, 0xAB);
  const DeviceArray<uint8_t> memory(want);
  Padding padding;
  for (uint8_t& b : padding.chunk) b = static_cast<uint8_t>(rng_());
  for (int64_t at = 3; at < static_cast<int64_t>(want.size());) {
    const int64_t bytes = std::min<int64_t>(Draw(1, at % 7 == 0 ? 20000 : 70), want.size() - at);
    padding.ranges.push_back({memory.data() + at, bytes});
    for (int64_t i = at; i < at + bytes; ++i) want[i] = padding.chunk[i % 16];
    at += bytes + Draw(1, 40);
  }
  EXPECT_GT(padding.ranges.size(), 500);
  ASSERT_CUDA(cudaDeviceSynchronize());
  for (const int blocks : {0, 3}) {
    ASSERT_CUDA(LaunchPadding(padding, blocks, stream_));
    ASSERT_CUDA(cudaStreamSynchronize(stream_));
    EXPECT_EQ(memory.Content(), want);
  }
  ASSERT_CUDA(LaunchPadding({}, 0, stream_));
}

}  // namespace
}  // namespace gear_jax
