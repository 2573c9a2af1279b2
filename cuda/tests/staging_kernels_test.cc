// Gathers in two halves on a GPU, compared with the CPU's gather. Small enough for compute-sanitizer.
#include "cuda/staging_kernels.h"

#include <memory>
#include <random>
#include <vector>

#include "cuda/device_staging.h"
#include "cuda/scatter_kernels.h"
#include "cuda/tests/device.h"

namespace gear_jax {
namespace {

using Bytes = std::vector<uint8_t>;
using Ints = std::vector<int32_t>;

constexpr int64_t kSlots = 64, kSteps = 8;
constexpr int64_t kWidths[] = {1, 12, 4096};

// A table in mapped host memory, a stream that stands for XLA's, and batches of rows.
class StagingKernels : public ::testing::Test {
 protected:
  using Array = DeviceArray<uint8_t>;

  // A batch: its rows (the arrays stay, as XLA's do not), and what it should give.
  struct Flight {
    std::unique_ptr<DeviceArray<int32_t>> slot, anchor, length, handle, ticket;
    std::vector<Bytes> want;
    GatherCall call;
  };

  void SetUp() override {
    if (!HasDevice()) GTEST_SKIP() << "needs a GPU";
    for (const int64_t width : kWidths) {
      Bytes content(kSlots * kSteps * width);
      for (uint8_t& b : content) b = static_cast<uint8_t>(rng_());
      host_.push_back(content);
      tables_.push_back(std::make_unique<Array>(content, true));
    }
    cudaError_t error;
    staging_ = DeviceStaging::Current(&error);
    ASSERT_CUDA(error);
    ASSERT_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));  // as XLA's are
  }
  void TearDown() override {
    if (stream_ == nullptr) return;
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    EXPECT_EQ(cudaStreamDestroy(stream_), cudaSuccess);
    for (int64_t queue = 0; queue < 3; ++queue) EXPECT_FALSE(DeviceStaging::Release(queue));
  }

  Flight Start(int64_t queue, int64_t depth, int64_t rows, bool ordered = false) {
    Flight flight;
    Ints slot, anchor, length;
    for (int64_t i = 0; i < rows; ++i) {
      slot.push_back(static_cast<int32_t>(rng_() % (kSlots + 2)) - 1);
      anchor.push_back(static_cast<int32_t>(rng_() % 12) - 2);
      length.push_back(static_cast<int32_t>(rng_() % 10));
    }
    flight.call = {rows, kSlots, kSteps, slot.data(), anchor.data(), length.data(), {}, {}};
    for (size_t k = 0; k < host_.size(); ++k) {
      GatherColumn column;
      column.table = host_[k].data();
      column.step_bytes = kWidths[k];
      column.window = {-2, 5, k != 1, Pad::kAround};
      column.pad_value.fill(static_cast<uint8_t>(k + 1));
      flight.call.columns.push_back(column);
      flight.call.masks.push_back({nullptr, column.window});
    }
    for (const int64_t bytes : PartBytes(flight.call)) flight.want.emplace_back(bytes);
    Gather reference(flight.call);
    for (size_t i = 0; i < flight.want.size(); ++i) Result(reference, i) = flight.want[i].data();
    reference.Prepare(1);
    reference.Drain();

    flight.slot = std::make_unique<DeviceArray<int32_t>>(slot);
    flight.anchor = std::make_unique<DeviceArray<int32_t>>(anchor);
    flight.length = std::make_unique<DeviceArray<int32_t>>(length);
    flight.handle = std::make_unique<DeviceArray<int32_t>>(Ints(4));
    flight.ticket = std::make_unique<DeviceArray<int32_t>>(Ints{7, 0});
    GatherCall& call = flight.call;
    call.slot = flight.slot->data(), call.anchor = flight.anchor->data(), call.length = flight.length->data();
    for (size_t k = 0; k < call.columns.size(); ++k) call.columns[k].table = tables_[k]->data();
    int32_t* const ticket = flight.ticket->data();
    EXPECT_FALSE(staging_->Start(call, {queue, depth, ordered, 2, ticket, ticket + 1, flight.handle->data()}, stream_));
    // XLA may use the rows' memory for something else now.
    for (int32_t* ids : {flight.slot->data(), flight.anchor->data(), flight.length->data()}) {
      EXPECT_EQ(cudaMemsetAsync(ids, 0x55, 4 * rows, stream_), cudaSuccess);
    }
    return flight;
  }

  static uint8_t*& Result(GatherCall& call, size_t i) {
    return i < call.columns.size() ? call.columns[i].out : call.masks[i - call.columns.size()].out;
  }

  // The end of a flight, and what came of it.
  struct Landing {
    std::vector<std::unique_ptr<Array>> out;
    std::unique_ptr<Array> ok;
    std::vector<StagedPart> parts;
  };
  Landing Prepare(const Flight& flight) {
    Landing landing;
    for (size_t i = 0; i < flight.want.size(); ++i) {
      landing.out.push_back(std::make_unique<Array>(Bytes(flight.want[i].size(), 0xCD)));
      StagedPart part{landing.out.back()->data(), static_cast<int64_t>(flight.want[i].size()), {}, 1};
      if (i < flight.call.columns.size()) part.pad_value = flight.call.columns[i].pad_value;
      landing.parts.push_back(part);
    }
    landing.ok = std::make_unique<Array>(Bytes{9});
    return landing;
  }
  void Done(const Flight& flight, const Landing& landing, cudaStream_t stream) {
    bool* const ok = reinterpret_cast<bool*>(landing.ok->data());
    EXPECT_FALSE(staging_->Done(flight.handle->data(), landing.parts, ok, stream));
  }
  void Check(const Flight& flight, const Landing& landing, bool good) {
    EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    EXPECT_EQ(landing.ok->Content()[0], good);
    for (size_t i = 0; i < flight.want.size(); ++i) {
      const uint8_t pad = i < flight.call.columns.size() ? static_cast<uint8_t>(i + 1) : 0;
      const Bytes padding(flight.want[i].size(), pad);
      EXPECT_EQ(landing.out[i]->Content(), good ? flight.want[i] : padding) << "part " << i;
    }
    EXPECT_EQ(flight.ticket->Content(), (Ints{7, 7}));
  }
  void Finish(const Flight& flight, bool good) {
    const Landing landing = Prepare(flight);
    Done(flight, landing, stream_);
    Check(flight, landing, good);
  }

  // Writes other steps to every slot of the table, as the handler does.
  void Overwrite() {
    FlightSet tables;
    Ints slot(kSlots), start(kSlots, 0), length(kSlots, kSteps);
    for (int32_t i = 0; i < kSlots; ++i) slot[i] = i;
    written_.push_back(std::make_unique<DeviceArray<int32_t>>(slot));
    written_.push_back(std::make_unique<DeviceArray<int32_t>>(start));
    written_.push_back(std::make_unique<DeviceArray<int32_t>>(length));
    const size_t n = written_.size();
    ScatterCall call{kSlots, kSlots, kSteps, written_[n - 3]->data(), written_[n - 2]->data(), written_[n - 1]->data(),
                     {}};
    for (size_t k = 0; k < host_.size(); ++k) {
      for (uint8_t& b : host_[k]) b = static_cast<uint8_t>(rng_());
      values_.push_back(std::make_unique<Array>(host_[k]));
      call.columns.push_back({tables_[k]->data(), values_.back()->data(), kWidths[k], kSteps});
      tables.Add(tables_[k]->data());
    }
    EXPECT_EQ(LaunchFlightsWait(tables, stream_), cudaSuccess);
    EXPECT_EQ(LaunchScatter(call, 0, stream_), cudaSuccess);
  }

  std::mt19937 rng_{0};
  std::vector<Bytes> host_;
  std::vector<std::unique_ptr<Array>> tables_, values_;
  std::vector<std::unique_ptr<DeviceArray<int32_t>>> written_;
  DeviceStaging* staging_ = nullptr;
  cudaStream_t stream_ = nullptr;
};

TEST_F(StagingKernels, IsTheGatherInTwoHalves) {
  for (const int64_t rows : {0, 1, 7, 3000}) {
    for (const bool ordered : {false, true}) {
      const Flight flight = Start(0, 2, rows, ordered);
      Finish(flight, true);
      Finish(flight, false);  // handed out already
    }
  }
}

TEST_F(StagingKernels, DropsTheOldestBeyondTheDepth) {
  const Flight a = Start(0, 2, 50), b = Start(0, 2, 70), c = Start(0, 2, 3000), other = Start(1, 1, 20);
  Finish(c, true);
  Finish(a, false);
  Finish(b, true);
  Finish(other, true);
  const Flight d = Start(0, 2, 50);
  EXPECT_FALSE(DeviceStaging::Release(0));
  Finish(d, false);
  Finish(Start(0, 2, 50), true);
}

TEST_F(StagingKernels, RefusesForeignHandles) {
  const Flight flight = Start(0, 2, 50);
  for (const Ints& words : {Ints{0, 0, 0, 0}, Ints{-1, 1, 0, 1}, Ints{1 << 30, 1, 0, 1}}) {
    const DeviceArray<int32_t> handle(words);
    const Landing landing = Prepare(flight);
    EXPECT_FALSE(staging_->Done(handle.data(), landing.parts, reinterpret_cast<bool*>(landing.ok->data()), stream_));
    Check(flight, landing, false);
  }
  Finish(flight, true);
}

// A write that comes later does not change what a gather in flight gives, and the next gather sees it.
TEST_F(StagingKernels, AWriteWaits) {
  for (int i = 0; i < 20; ++i) {
    const Flight before = Start(0, 3, 3000, i % 2), beside = Start(1, 1, 3000);
    Overwrite();
    const Flight after = Start(0, 3, 500);
    Finish(after, true);
    Finish(beside, true);
    Finish(before, true);
  }
}

// The end as a part of a CUDA graph, which reads whatever handle is in its operand.
TEST_F(StagingKernels, TheEndInAGraph) {
  Flight flight = Start(0, 2, 300);
  const Landing landing = Prepare(flight);
  cudaStream_t capture;
  ASSERT_CUDA(cudaStreamCreateWithFlags(&capture, cudaStreamNonBlocking));
  ASSERT_CUDA(cudaStreamBeginCapture(capture, cudaStreamCaptureModeThreadLocal));
  Done(flight, landing, capture);
  cudaGraph_t graph;
  ASSERT_CUDA(cudaStreamEndCapture(capture, &graph));
  cudaGraphExec_t run;
  ASSERT_CUDA(cudaGraphInstantiate(&run, graph, 0));
  for (int i = 0; i < 5; ++i) {
    ASSERT_CUDA(cudaGraphLaunch(run, stream_));
    Check(flight, landing, true);
    ASSERT_CUDA(cudaGraphLaunch(run, stream_));
    Check(flight, landing, false);
    Flight next = Start(0, 2, 300);
    ASSERT_CUDA(cudaMemcpyAsync(flight.handle->data(), next.handle->data(), 16, cudaMemcpyDefault, stream_));
    flight.want = next.want;
  }
  ASSERT_CUDA(cudaGraphExecDestroy(run));
  ASSERT_CUDA(cudaGraphDestroy(graph));
  ASSERT_CUDA(cudaStreamDestroy(capture));
}

// Starts that nobody ends, of growing sizes, with other work on the stream.
TEST_F(StagingKernels, DroppedFlightsDoNoHarm) {
  for (int64_t i = 0; i < 100; ++i) {
    const int64_t queue = static_cast<int64_t>(rng_() % 3);
    Flight flight = Start(queue, 2, 1 + 20 * i);
    if (rng_() % 3 == 0) Overwrite();
    if (rng_() % 2) Finish(flight, true);
    EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);  // its rows' memory goes
  }
}

}  // namespace
}  // namespace gear_jax
