#include "ffi/staging.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "ffi/staged_gather.h"

namespace gear_jax {
namespace {

constexpr int64_t kQueue = 7;

StagingHandle RoundTrip(const StagingHandle& handle) {
  int32_t word[4];
  handle.Write(word);
  return StagingHandle::Read(word);
}

TEST(StagingHandle, KeepsItsNumbersInFourWords) {
  for (const int64_t sequence : {int64_t{0}, int64_t{1}, int64_t{0xFFFFFFFF}, int64_t{1} << 32, INT64_MAX}) {
    const StagingHandle got = RoundTrip({5, sequence, -9});
    EXPECT_EQ(got.entry, 5);
    EXPECT_EQ(got.sequence, sequence);
    EXPECT_EQ(got.owner, -9);
  }
}

TEST(StagingLayout, PartsFollowEachOtherAligned) {
  const StagingLayout layout({0, 1, 256, 257, 0, int64_t{3} << 32});
  EXPECT_EQ(layout.offset, (std::vector<int64_t>{0, 0, 256, 512, 1024, 1024}));
  EXPECT_EQ(layout.bytes, 1024 + (int64_t{3} << 32));
  EXPECT_EQ(StagingLayout({}).bytes, 0);
}

TEST(StagingQueues, TakeTurnsAndReuseNumbers) {
  StagingQueues<int> queues(4);
  EXPECT_EQ(queues.Next(1, 0, 2).number, 0);
  EXPECT_EQ(queues.Next(1, 1, 2).number, 1);  // another device
  EXPECT_EQ(queues.Next(1, 0, 2).number, 2);
  const auto again = queues.Next(1, 0, 2);
  EXPECT_EQ(again.number, 0);
  EXPECT_EQ(again.sequence, 4);
  EXPECT_EQ(queues.Next(2, 0, 1).number, 3);
  EXPECT_EQ(queues.Next(3, 0, 1).number, -1);
  std::vector<int32_t> freed;
  queues.Release([](int64_t queue, int32_t) { return queue == 1; }, [&](int32_t n, int&) { freed.push_back(n); });
  std::sort(freed.begin(), freed.end());
  EXPECT_EQ(freed, (std::vector<int32_t>{0, 1, 2}));
  const auto next = queues.Next(3, 0, 1);
  EXPECT_GE(next.number, 0);
  EXPECT_LT(next.number, 3);
  EXPECT_EQ(queues.Find(next.number), next.entry);
  EXPECT_EQ(queues.Find(-1), nullptr);
  EXPECT_EQ(queues.Find(4), nullptr);
}

TEST(HostStaging, HandsDataOutOnce) {
  HostStaging staging;
  const auto start = [&](uint8_t value) {
    auto started = staging.Start(kQueue, 0, 2, 1000);
    std::memset(started.lease.data(), value, 1000);
    return started.handle;
  };
  const auto finish = [&](const StagingHandle& handle) {
    const auto lease = staging.Finish(RoundTrip(handle), 0, 1000);
    return lease ? lease.data()[999] : 0;
  };
  const StagingHandle a = start(1), b = start(2);
  EXPECT_EQ(finish(b), 2);
  EXPECT_EQ(finish(b), 0);
  EXPECT_EQ(finish(a), 1);
  const StagingHandle c = start(3), d = start(4), e = start(5);  // the third drops the first
  EXPECT_EQ(finish(c), 0);
  EXPECT_EQ(finish(d), 4);
  EXPECT_EQ(finish(e), 5);
  EXPECT_EQ(finish(a), 0);
}

TEST(HostStaging, RefusesWhatIsNotItsOwn) {
  HostStaging staging, other;
  StagingHandle handle = staging.Start(kQueue, 0, 1, 100).handle;
  EXPECT_FALSE(other.Finish(handle, 0, 100));
  EXPECT_FALSE(staging.Finish(handle, 0, 101));
  EXPECT_FALSE(staging.Finish(handle, 1, 100));
  for (const int32_t entry : {-1, 1, INT32_MAX}) {
    EXPECT_FALSE(staging.Finish({entry, handle.sequence, handle.owner}, 0, 100));
  }
  EXPECT_FALSE(staging.Finish({}, 0, 100));
  EXPECT_FALSE(staging.Finish({handle.entry, 0, handle.owner}, 0, 100));
  EXPECT_TRUE(staging.Finish(handle, 0, 100));
  EXPECT_FALSE(staging.Finish({handle.entry, 0, handle.owner}, 0, 100));  // an entry that is empty
}

TEST(HostStaging, QueuesAndDevicesDoNotDisturbEachOther) {
  HostStaging staging;
  const auto a = staging.Start(1, 0, 1, 10).handle, b = staging.Start(2, 0, 1, 10).handle;
  const auto c = staging.Start(1, 3, 1, 10).handle, d = staging.Start(1, 3, 1, 10).handle;
  EXPECT_TRUE(staging.Finish(a, 0, 10));
  EXPECT_TRUE(staging.Finish(b, 0, 10));
  EXPECT_FALSE(staging.Finish(c, 3, 10));
  EXPECT_TRUE(staging.Finish(d, 3, 10));
}

TEST(HostStaging, KeepsItsMemoryUntilItIsReleased) {
  HostStaging staging;
  const uint8_t* memory = staging.Start(kQueue, 0, 1, 5000).lease.data();
  EXPECT_EQ(reinterpret_cast<uintptr_t>(memory) % StagingLayout::kAlign, 0u);
  EXPECT_EQ(staging.bytes(), 5120);
  EXPECT_EQ(staging.Start(kQueue, 0, 1, 4000).lease.data(), memory);
  EXPECT_EQ(staging.bytes(), 5120);
  const auto larger = staging.Start(kQueue, 0, 1, 6000).handle;
  EXPECT_EQ(staging.bytes(), 6144);
  staging.Start(kQueue + 1, 0, 1, 0);
  EXPECT_EQ(staging.bytes(), 6144 + 256);
  staging.Release(kQueue);
  EXPECT_EQ(staging.bytes(), 256);
  EXPECT_FALSE(staging.Finish(larger, 0, 6000));
  EXPECT_TRUE(staging.Finish(staging.Start(kQueue, 0, 1, 10).handle, 0, 10));
}

TEST(HostStaging, MemoryInUseIsNotGivenToAnother) {
  HostStaging staging;
  auto first = staging.Start(kQueue, 0, 1, 100);  // still writing
  auto second = staging.Start(kQueue, 0, 1, 100);
  EXPECT_NE(first.lease.data(), second.lease.data());
  const auto reading = staging.Finish(second.handle, 0, 100);
  EXPECT_EQ(reading.data(), second.lease.data());
  EXPECT_NE(staging.Start(kQueue, 0, 1, 100).lease.data(), reading.data());
  staging.Release(kQueue);
  std::memset(first.lease.data(), 1, 100);
  std::memset(reading.data(), 1, 100);
}

TEST(HostStaging, ARetiredQueueIsFreedByTheNextStartOnItsDevice) {
  HostStaging staging;
  const int64_t retired = 1001;
  const auto a = staging.Start(retired, 0, 1, 256).handle, b = staging.Start(retired, 1, 1, 256).handle;
  RetiredQueues::Global().Add(retired);
  EXPECT_EQ(staging.bytes(), 512);
  staging.Start(kQueue, 0, 1, 256);
  EXPECT_EQ(staging.bytes(), 512);
  EXPECT_FALSE(staging.Finish(a, 0, 256));
  EXPECT_TRUE(staging.Finish(b, 1, 256));
  // A start that comes all the same takes it up again.
  const auto c = staging.Start(retired, 1, 1, 256).handle;
  staging.Start(kQueue, 1, 1, 256);
  EXPECT_TRUE(staging.Finish(c, 1, 256));
}

// Threads start and end gathers of one queue and of their own, drop some, and release: what comes out is what went in.
TEST(HostStaging, ManyThreads) {
  HostStaging staging;
  std::atomic<int64_t> good{0};
  const auto work = [&](int64_t thread) {
    std::mt19937 random(static_cast<uint32_t>(thread));
    const auto device = static_cast<int32_t>(thread % 2);
    std::vector<std::pair<StagingHandle, int64_t>> flying;
    for (int64_t i = 0; i < 300; ++i) {
      const int64_t queue = random() % 2 ? 100 : thread, bytes = 8 * (1 + random() % 100);
      const int64_t value = thread << 32 | i;
      {
        auto started = staging.Start(queue, device, 2, bytes);
        for (int64_t at = 0; at < bytes; at += 8) std::memcpy(started.lease.data() + at, &value, 8);
        flying.emplace_back(started.handle, value);
        if (random() % 4 == 0) flying.pop_back();
      }
      if (flying.size() > 2 || (random() % 2 && !flying.empty())) {
        const auto [handle, wanted] = flying.front();
        flying.erase(flying.begin());
        for (int64_t size = 8; size <= 800; size += 8) {
          if (const auto lease = staging.Finish(handle, device, size)) {
            for (int64_t at = 0; at < size; at += 8) ASSERT_EQ(std::memcmp(lease.data() + at, &wanted, 8), 0);
            ++good;
          }
        }
      }
      if (i % 50 == 49) staging.Release(queue);
    }
  };
  std::vector<std::thread> threads;
  for (int64_t t = 0; t < 4; ++t) threads.emplace_back(work, t);
  for (std::thread& t : threads) t.join();
  EXPECT_GT(good, 0);
}

// Outputs of exactly the right size: the sanitizer guards their ends.
struct Batch {
  explicit Batch(const GatherCall& call) {
    for (const int64_t bytes : PartBytes(call)) out.emplace_back(bytes, 0xCD);
  }
  std::vector<StagedPart> Parts(const GatherCall& call) {
    std::vector<StagedPart> parts;
    for (size_t i = 0; i < out.size(); ++i) {
      StagedPart part{out[i].data(), static_cast<int64_t>(out[i].size()), {}, 1};
      if (i < call.columns.size()) {
        part.pad_value = call.columns[i].pad_value;
        part.value_bytes = call.columns[i].value_bytes;
      }
      parts.push_back(part);
    }
    return parts;
  }
  std::vector<std::vector<uint8_t>> out;
};

void RunAll(Gather& gather) {
  gather.Prepare(4);
  gather.Drain();
}

class StagedGather : public testing::TestWithParam<int64_t> {};

TEST_P(StagedGather, IsTheGatherInTwoHalves) {
  const int64_t rows = GetParam(), slots = 5, steps = 11;
  std::mt19937 random(0);
  std::vector<int32_t> slot, anchor, length;
  for (int64_t i = 0; i < rows; ++i) {
    slot.push_back(static_cast<int32_t>(random() % 7) - 1);
    anchor.push_back(static_cast<int32_t>(random() % 20) - 4);
    length.push_back(static_cast<int32_t>(random() % 14) - 1);
  }
  std::vector<std::vector<uint8_t>> tables;
  GatherCall call{rows, slots, steps, slot.data(), anchor.data(), length.data(), {}, {}};
  const int64_t widths[] = {1, 2, 4, 8, 16, 17, 4099};
  for (const int64_t step_bytes : widths) {
    tables.emplace_back(slots * steps * step_bytes);
    for (uint8_t& b : tables.back()) b = static_cast<uint8_t>(random());
    GatherColumn column;
    column.table = tables.back().data();
    column.step_bytes = step_bytes;
    column.window = {-3, step_bytes == 2 ? 0 : 6, step_bytes != 8, Pad::kHead};
    column.value_bytes = step_bytes % 2 ? 1 : std::min<int64_t>(step_bytes, 16);
    std::iota(column.pad_value.begin(), column.pad_value.end(), static_cast<uint8_t>(1));
    call.columns.push_back(column);
    call.masks.push_back({nullptr, column.window});
  }

  HostStaging staging;
  const StagingLayout layout(PartBytes(call));
  const auto start = [&] {
    auto started = staging.Start(kQueue, 0, 1, layout.bytes);
    GatherIntoStaging gather(call, layout, std::move(started.lease));
    RunAll(gather);
    return started.handle;
  };
  const auto finish = [&](const StagingHandle& handle) {
    Batch batch(call);
    GatherFromStaging copy(batch.Parts(call), layout, staging.Finish(handle, 0, layout.bytes));
    RunAll(copy);
    return batch.out;
  };
  const StagingHandle dropped = start(), handle = start();
  Batch wanted(call);
  Gather whole(call);
  for (size_t i = 0; i < wanted.out.size(); ++i) {
    (i < call.columns.size() ? whole.columns[i].out : whole.masks[i - call.columns.size()].out) = wanted.out[i].data();
  }
  RunAll(whole);
  EXPECT_EQ(finish(handle), wanted.out);
  for (const StagingHandle& stale : {dropped, handle}) {
    const auto got = finish(stale);
    for (size_t i = 0; i < got.size(); ++i) {
      for (size_t at = 0; at < got[i].size(); ++at) {
        const bool mask = i >= call.columns.size();
        ASSERT_EQ(got[i][at], mask ? 0 : 1 + at % call.columns[i].value_bytes) << "part " << i << ", byte " << at;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Rows, StagedGather, testing::Values(0, 1, 7, 300));

}  // namespace
}  // namespace gear_jax
