// Remote fetches and reads by a GPU, compared with the CPU's. Small enough for compute-sanitizer.
#include "cuda/fetch_kernels.h"

#include <atomic>
#include <chrono>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "cuda/device_read.h"
#include "cuda/device_staging.h"
#include "cuda/scatter_kernels.h"
#include "cuda/staging_kernels.h"
#include "cuda/stamp_kernels.h"
#include "cuda/tests/device.h"
#include "ffi/tests/fake_reader.h"

namespace gear_jax {
namespace {

using Bytes = std::vector<uint8_t>;
using Ints = std::vector<int32_t>;
using Words = std::vector<uint32_t>;
using transport::MemoryRegion;
using transport::Piece;
using transport::Status;

constexpr int64_t kSlots = 6, kSteps = 8;
constexpr int64_t kWidths[] = {3, 1200};
constexpr uint32_t kGeneration = 5;

// Shards of peers 0, 1, 2 and 1; peer 1 is this process, and its shards lie in page-locked memory. The GPU's own is the
// first of them.
class FetchKernels : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!HasDevice()) GTEST_SKIP() << "needs a GPU";
    for (int d = 0; d < 4; ++d) {
      tables_.emplace_back();
      for (const int64_t width : kWidths) {
        Bytes content(kSlots * kSteps * width);
        for (uint8_t& b : content) b = static_cast<uint8_t>(rng_());
        tables_.back().push_back(content);
      }
      stamps_.emplace_back(kSlots, 2 * kGeneration);
    }
    stamps_[1][4] += 1;  // being written
    stamps_[2][3] += 4;  // of a later trajectory
    stamps_[3][0] += 1;
    for (size_t k = 0; k < 2; ++k) {
      own_.push_back(std::make_unique<DeviceArray<uint8_t>>(tables_[1][k], true));
      other_.push_back(std::make_unique<DeviceArray<uint8_t>>(tables_[3][k], true));
    }
    own_stamp_ = std::make_unique<DeviceArray<uint32_t>>(stamps_[1], true);
    other_stamp_ = std::make_unique<DeviceArray<uint32_t>>(stamps_[3], true);
    Expose(1);
    cudaError_t error;
    staging_ = DeviceStaging::Current(&error);
    ASSERT_CUDA(error);
    ASSERT_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));  // as XLA's are
  }
  const uint8_t* Table(int d, int k) const {
    return d == 1 ? own_[k]->data() : d == 3 ? other_[k]->data() : tables_[d][k].data();
  }
  const uint32_t* Stamp(int d) const {
    return d == 1 ? own_stamp_->data() : d == 3 ? other_stamp_->data() : stamps_[d].data();
  }
  // The table has the two columns so often.
  void Expose(int copies) {
    copies_ = copies;
    std::vector<std::vector<MemoryRegion>> regions(3);
    for (int d = 0; d < 4; ++d) {
      std::vector<MemoryRegion>& of_peer = regions[d == 3 ? 1 : d];
      for (int k = 0; k < 2 * copies; ++k) of_peer.push_back({Table(d, k % 2), tables_[d][k % 2].size()});
      of_peer.push_back({Stamp(d), kSlots * sizeof(uint32_t)});
    }
    reader_ = std::make_shared<FakeReader>(1, std::move(regions));
  }
  void TearDown() override {
    if (stream_ == nullptr) return;
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    EXPECT_EQ(cudaStreamDestroy(stream_), cudaSuccess);
    EXPECT_FALSE(DeviceStaging::Release(0));
  }

  struct Batch {
    Ints slot, anchor, length, shard;
    Words generation;
    std::vector<Bytes> want;  // columns, masks, which are valid
    std::unique_ptr<DeviceArray<int32_t>> ids[4], handle, ticket;
    std::unique_ptr<DeviceArray<uint32_t>> generations;
    std::vector<std::unique_ptr<DeviceArray<uint8_t>>> out;
    std::vector<StagedPart> parts;
  };

  FetchCall Call(Batch& batch, bool any) {
    FetchCall call;
    call.gather = {static_cast<int64_t>(batch.slot.size()),
                   kSlots,
                   kSteps,
                   batch.slot.data(),
                   batch.anchor.data(),
                   batch.length.data(),
                   {},
                   {}};
    for (int k = 0; k < 2 * copies_; ++k) {
      GatherColumn column;
      column.table = own_[k % 2]->data();
      column.step_bytes = kWidths[k % 2];
      column.window = {-2, 5, k % 2 == 0, k % 2 == 0 ? Pad::kAround : Pad::kHead};
      column.pad_value.fill(static_cast<uint8_t>(k + 1));
      call.gather.columns.push_back(column);
      call.gather.masks.push_back({nullptr, column.window});
    }
    call.shard = batch.shard.data();
    call.generation = any ? nullptr : batch.generation.data();
    call.shards = {{0, 0}, {1, 0}, {2, 0}, {1, 2 * copies_ + 1}};
    call.tries = 3;
    return call;
  }

  // Rows, and what the CPU makes of them.
  std::unique_ptr<Batch> MakeBatch(int64_t rows, bool any) {
    auto batch = std::make_unique<Batch>();
    for (int64_t i = 0; i < rows; ++i) {
      batch->slot.push_back(static_cast<int32_t>(rng_() % (kSlots + 2)) - 1);
      batch->shard.push_back(static_cast<int32_t>(rng_() % 6) - 1);
      batch->anchor.push_back(static_cast<int32_t>(rng_() % 12) - 2);
      batch->length.push_back(static_cast<int32_t>(rng_() % 10));
      batch->generation.push_back(kGeneration);
    }
    FetchCall call = Call(*batch, any);
    std::vector<uint8_t*> places;
    for (const int64_t bytes : PartBytes(call)) {
      batch->want.emplace_back(bytes);
      places.push_back(batch->want.back().data());
    }
    PlaceParts(call, places);
    RdmaCounters counters;
    auto fetch = std::make_shared<Fetch>(call, reader_, &counters);
    fetch->Prepare(1);
    std::atomic<bool> ended{false};
    fetch->Start([&] { ended = true; });
    fetch->Drain();
    while (!ended) std::this_thread::yield();
    fetch->Finish();

    const Ints* const ids[] = {&batch->slot, &batch->anchor, &batch->length, &batch->shard};
    for (int i = 0; i < 4; ++i) batch->ids[i] = std::make_unique<DeviceArray<int32_t>>(*ids[i]);
    batch->generations = std::make_unique<DeviceArray<uint32_t>>(batch->generation);
    batch->handle = std::make_unique<DeviceArray<int32_t>>(Ints(4));
    batch->ticket = std::make_unique<DeviceArray<int32_t>>(Ints{7, 0});
    for (size_t i = 0; i < batch->want.size(); ++i) {
      const auto bytes = static_cast<int64_t>(batch->want[i].size());
      batch->out.push_back(std::make_unique<DeviceArray<uint8_t>>(Bytes(bytes, 0xCD)));
      StagedPart part{batch->out.back()->data(), bytes, {}, 1};
      if (i < call.gather.columns.size()) part.pad_value = call.gather.columns[i].pad_value;
      batch->parts.push_back(part);
    }
    return batch;
  }

  FetchRequest Request(Batch& batch, bool any) {
    FetchRequest request;
    request.call = Call(batch, any);
    GatherCall& gather = request.call.gather;
    gather.slot = batch.ids[0]->data(), gather.anchor = batch.ids[1]->data(), gather.length = batch.ids[2]->data();
    request.call.shard = batch.ids[3]->data();
    if (!any) request.call.generation = batch.generations->data();
    for (const int d : gpu_shards_) {
      GpuShard shard{d, {}, Stamp(d)};
      for (int k = 0; k < 2 * copies_; ++k) shard.tables.push_back(Table(d, k % 2));
      request.call.gpu.shards.push_back(std::move(shard));
    }
    request.reader = reader_;
    request.counters = &counters_;
    request.ended = [this](const Fetch&) { ++ended_; };
    return request;
  }

  void Start(Batch& batch, bool any, int64_t depth = 2) {
    int32_t* const ticket = batch.ticket->data();
    const StagingFault fault = staging_->StartFetch(
        Request(batch, any), {0, depth, false, 0, ticket, ticket + 1, batch.handle->data()}, stream_);
    ASSERT_FALSE(fault) << fault.step << ": " << cudaGetErrorString(fault.error);
    // XLA may use the rows' memory for something else now.
    for (const auto& ids : batch.ids) {
      EXPECT_EQ(cudaMemsetAsync(ids->data(), 0x55, 4 * batch.slot.size(), stream_), cudaSuccess);
    }
  }

  bool Done(Batch& batch) {
    DeviceArray<uint8_t> ok(Bytes(1));
    EXPECT_FALSE(staging_->Done(batch.handle->data(), batch.parts, reinterpret_cast<bool*>(ok.data()), stream_));
    EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    return ok.Content()[0] == 1;
  }

  void Check(const Batch& batch) {
    for (size_t i = 0; i < batch.want.size(); ++i) EXPECT_EQ(batch.out[i]->Content(), batch.want[i]) << i;
    EXPECT_EQ(batch.ticket->Content()[1], 7);
  }

  std::mt19937 rng_{3};
  int copies_ = 0;
  Ints gpu_shards_{1};
  std::vector<std::vector<Bytes>> tables_;
  std::vector<Words> stamps_;
  std::vector<std::unique_ptr<DeviceArray<uint8_t>>> own_, other_;
  std::unique_ptr<DeviceArray<uint32_t>> own_stamp_, other_stamp_;
  std::shared_ptr<FakeReader> reader_;
  DeviceStaging* staging_ = nullptr;
  cudaStream_t stream_ = nullptr;
  RdmaCounters counters_;
  std::atomic<int> ended_{0};
};

// The rows of another GPU's shard come by the host, or are gathered as the own ones.
TEST_F(FetchKernels, MatchTheCpu) {
  for (const Ints& shards : {Ints{}, Ints{1}, Ints{1, 3}, Ints{3, 1}}) {
    SCOPED_TRACE(shards.size());
    gpu_shards_ = shards;
    for (const bool any : {false, true}) {
      for (const int64_t rows : {0, 1, 7, 300}) {
        SCOPED_TRACE(rows);
        auto batch = MakeBatch(rows, any);
        Start(*batch, any);
        EXPECT_TRUE(Done(*batch));
        Check(*batch);
      }
    }
  }
  EXPECT_EQ(ended_, 32);
}

// What another GPU is writing as the kernels look at it may be whole when the host does.
TEST_F(FetchKernels, RowsOfAnotherGpuAreTriedAgain) {
  auto* const stamp = const_cast<uint32_t*>(Stamp(3));
  for (int64_t slot = 0; slot < kSlots; ++slot) stamp[slot] = 2 * kGeneration;
  auto batch = MakeBatch(200, false);
  for (int64_t slot = 0; slot < kSlots; ++slot) stamp[slot] = 2 * kGeneration - 1;
  reader_->on_piece = [=](const Piece&) {
    for (int64_t slot = 0; slot < kSlots; ++slot) stamp[slot] = 2 * kGeneration;
    return Status::kOk;
  };
  gpu_shards_ = {1, 3};
  Start(*batch, false);
  EXPECT_TRUE(Done(*batch));
  Check(*batch);
  EXPECT_EQ(counters_.torn, 0u);
}

TEST_F(FetchKernels, ALostPeersRowsArePadding) {
  reader_->on_piece = [](const Piece& piece) { return piece.peer == 2 ? Status::kLost : Status::kOk; };
  auto batch = MakeBatch(60, false);
  Start(*batch, false);
  EXPECT_TRUE(Done(*batch));
  Check(*batch);
  EXPECT_GT(counters_.lost, 0u);
}

TEST_F(FetchKernels, NobodyWaitsForWhatTravels) {
  auto batch = MakeBatch(40, false);
  reader_->delay = std::chrono::milliseconds(700);  // of each of the three reads that a row takes
  DeviceArray<uint8_t> other(Bytes(64));
  const DeviceArray<int32_t> slot(Ints{0, 1, 2, 3, 4, 5}), start(Ints(6)), length(Ints(6, kSteps));
  const DeviceArray<uint8_t> zeros(Bytes(3 * kSlots * kSteps));
  ScatterCall write;
  write.rows = write.slots = kSlots, write.steps = kSteps;
  write.slot = slot.data(), write.start = start.data(), write.length = length.data();
  write.columns.push_back({own_[0]->data(), zeros.data(), 3, kSteps});
  FlightSet tables;
  for (const auto& table : own_) tables.Add(table->data());
  Start(*batch, false);
  // A write of the tables waits for this GPU's own rows alone, and other work for nothing.
  ASSERT_CUDA(LaunchFlightsWait(tables, stream_));
  ASSERT_CUDA(LaunchScatter(write, 2, stream_));
  ASSERT_CUDA(cudaMemsetAsync(other.data(), 1, 64, stream_));
  ASSERT_CUDA(cudaStreamSynchronize(stream_));
  EXPECT_EQ(ended_, 0);
  EXPECT_EQ(own_[0]->Content(), Bytes(3 * kSlots * kSteps));
  EXPECT_TRUE(Done(*batch));
  EXPECT_EQ(ended_, 1);
  Check(*batch);  // the write has changed nothing of it
}

TEST_F(FetchKernels, TheOldestOfAQueueIsDropped) {
  std::vector<std::unique_ptr<Batch>> batches;
  for (const int64_t rows : {50, 300, 20}) {
    batches.push_back(MakeBatch(rows, false));
    Start(*batches.back(), false, 2);
  }
  EXPECT_FALSE(Done(*batches[0]));
  for (const int i : {2, 1}) {
    EXPECT_TRUE(Done(*batches[i]));
    Check(*batches[i]);
    EXPECT_FALSE(Done(*batches[i]));
  }
}

TEST_F(FetchKernels, StartAndEndInOne) {
  std::vector<std::unique_ptr<Batch>> batches;
  for (const int64_t rows : {50, 1, 300, 20}) {
    auto batch = MakeBatch(rows, false);
    int32_t* const ticket = batch->ticket->data();
    ASSERT_FALSE(
        staging_->WholeFetch(Request(*batch, false), {0, 2, false, 0, ticket, ticket + 1}, batch->parts, stream_));
    batches.push_back(std::move(batch));
  }
  ASSERT_CUDA(cudaStreamSynchronize(stream_));
  for (const auto& batch : batches) Check(*batch);
}

TEST_F(FetchKernels, MorePartsThanALaunchTakes) {
  Expose(9);  // 18 columns, their masks, which rows are valid
  for (const Ints& shards : {Ints{1}, Ints{1, 3}}) {
    gpu_shards_ = shards;
    auto batch = MakeBatch(40, false);
    Start(*batch, false);
    EXPECT_TRUE(Done(*batch));
    Check(*batch);
  }
}

TEST_F(FetchKernels, ABatchThatGrowsTakesTheMemoryOfOneInFlight) {
  auto small = MakeBatch(4, false), large = MakeBatch(400, false);
  reader_->delay = std::chrono::milliseconds(50);
  Start(*small, false, 1);
  Start(*large, false, 1);
  EXPECT_FALSE(Done(*small));
  EXPECT_TRUE(Done(*large));
  Check(*large);
  EXPECT_EQ(ended_, 2);
}

TEST_F(FetchKernels, AQueueIsReleasedWithAFetchInFlight) {
  auto batch = MakeBatch(40, false);
  reader_->delay = std::chrono::milliseconds(50);
  Start(*batch, false);
  EXPECT_FALSE(DeviceStaging::Release(0));
  EXPECT_EQ(ended_, 1);
  EXPECT_FALSE(Done(*batch));
}

TEST_F(FetchKernels, AReaderThatIsClosedEndsTheWait) {
  auto batch = MakeBatch(40, false);
  reader_->on_piece = [](const Piece&) { return Status::kClosed; };
  reader_->delay = std::chrono::milliseconds(50);
  Start(*batch, false);
  EXPECT_TRUE(Done(*batch));
  const Bytes valid = batch->out.back()->Content();
  for (size_t row = 0; row < valid.size(); ++row) {
    EXPECT_LE(valid[row], batch->shard[row] % 2 == 1) << row;
  }
}

TEST_F(FetchKernels, WholeRegionsAreRead) {
  for (const int32_t lost : {-1, 2}) {
    reader_->on_piece = [=](const Piece& piece) { return piece.peer == lost ? Status::kLost : Status::kOk; };
    DeviceArray<uint8_t> narrow(Bytes(3 * tables_[0][0].size())), wide(Bytes(3 * tables_[0][1].size())), here(Bytes(3));
    RegionsCall call{{{narrow.data(), static_cast<int64_t>(tables_[0][0].size())},
                      {wide.data(), static_cast<int64_t>(tables_[0][1].size())}},
                     {{0, 0}, {1, 0}, {2, 0}},
                     reinterpret_cast<bool*>(here.data())};
    std::atomic<size_t> peers_lost{9};
    ASSERT_FALSE(EnqueueRegionsRead(
        call, reader_, [&](const ReadRegions& read) { peers_lost = read.lost_peers().size(); }, stream_));
    ASSERT_CUDA(cudaStreamSynchronize(stream_));
    EXPECT_EQ(peers_lost, lost < 0 ? 0u : 1u);
    Bytes want[2], want_here;
    for (int d = 0; d < 3; ++d) {
      want_here.push_back(d != lost);
      for (size_t k = 0; k < 2; ++k) {
        const Bytes part = d == lost ? Bytes(tables_[d][k].size()) : tables_[d][k];
        want[k].insert(want[k].end(), part.begin(), part.end());
      }
    }
    EXPECT_EQ(narrow.Content(), want[0]);
    EXPECT_EQ(wide.Content(), want[1]);
    EXPECT_EQ(here.Content(), want_here);
  }
}

TEST_F(FetchKernels, StampsOpenAndClose) {
  const DeviceArray<int32_t> slot(Ints{0, -1, 2, 6, 5}), from(Ints{0, 0, 1, 1, 2});
  const DeviceArray<uint32_t> value(Words{12, 12, 14, 16, 7});
  ScatterCall call;
  call.rows = 5, call.slots = kSlots, call.steps = kSteps;
  call.slot = slot.data();
  call.stamp = own_stamp_->data();
  call.stamp_value = value.data();
  Words want = stamps_[1];
  for (const bool picked : {false, true}) {
    if (picked) call.from = from.data(), call.value_rows = 2;  // there is no row 2
    for (const bool open : {true, false}) {
      ASSERT_CUDA(LaunchStamps(call, open, stream_));
      ASSERT_CUDA(cudaStreamSynchronize(stream_));
      want[0] = open ? 11 : 12, want[2] = open ? 13 : 14;
      if (!picked) want[5] = 7;  // odd: it stays open
      EXPECT_EQ(own_stamp_->Content(), want);
    }
  }
  call.rows = 0;
  ASSERT_CUDA(LaunchStamps(call, true, stream_));
}

}  // namespace
}  // namespace gear_jax
