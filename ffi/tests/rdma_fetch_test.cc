#include "ffi/rdma_fetch.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <future>
#include <map>
#include <random>
#include <thread>
#include <vector>

#include "ffi/completions.h"
#include "ffi/rdma_flights.h"
#include "ffi/rdma_read.h"
#include "ffi/seqlock.h"
#include "ffi/tests/fake_reader.h"
#include "ffi/transport/memory_reader.h"

namespace gear_jax {
namespace {

using transport::MemoryRegion;
using transport::Piece;
using transport::Status;

constexpr uint32_t kGeneration = 5;

// Three shards of a table with a wide and a narrow column, of peers 0, 1 and 2; peer 1 is this process.
struct Tables {
  Tables(int64_t slots, int64_t steps, std::vector<int64_t> widths) : slots(slots), steps(steps), widths(widths) {
    std::mt19937 random(1);
    for (int d = 0; d < 3; ++d) {
      std::vector<std::vector<uint8_t>> columns;
      for (const int64_t width : widths) {
        columns.emplace_back(slots * steps * width);
        for (uint8_t& b : columns.back()) b = static_cast<uint8_t>(random());
      }
      shards.push_back(std::move(columns));
      stamps.emplace_back(slots, 2 * kGeneration);
    }
  }

  std::vector<std::vector<MemoryRegion>> Regions() const {
    std::vector<std::vector<MemoryRegion>> regions(3);
    for (int d = 0; d < 3; ++d) {
      for (const auto& column : shards[d]) regions[d].push_back({column.data(), column.size()});
      regions[d].push_back({stamps[d].data(), stamps[d].size() * sizeof(uint32_t)});
    }
    return regions;
  }

  int64_t slots, steps;
  std::vector<int64_t> widths;
  std::vector<std::vector<std::vector<uint8_t>>> shards;
  std::vector<std::vector<uint32_t>> stamps;
};

struct Rows {
  std::vector<int32_t> shard, slot, start, length;
  std::vector<uint32_t> generation;

  static Rows Random(int64_t rows, int64_t slots, int64_t steps, int32_t shards = 3) {
    std::mt19937 random(static_cast<uint32_t>(rows));
    Rows r;
    for (int64_t i = 0; i < rows; ++i) {
      r.shard.push_back(static_cast<int32_t>(random() % (shards + 2)) - 1);
      r.slot.push_back(static_cast<int32_t>(random() % (slots + 2)) - 1);
      r.start.push_back(static_cast<int32_t>(random() % (2 * steps + 1)) - static_cast<int32_t>(steps) / 2);
      r.length.push_back(static_cast<int32_t>(random() % (steps + 3)) - 1);
      r.generation.push_back(kGeneration);
    }
    return r;
  }
};

// A fetch with its results, beside what a plain gather of each shard gives.
struct Trial {
  Trial(Tables& tables, Rows& rows, const Window& window) : tables(tables), rows(rows), window(window) {
    const auto n = static_cast<int64_t>(rows.slot.size());
    for (const int64_t width : tables.widths) out.emplace_back(n * window.length * width, 0xEE);
    mask.assign(n * window.length, 0xEE);
    valid = std::make_unique<bool[]>(n + 1);
  }

  FetchCall Call(bool any = false, int64_t tries = 4) {
    FetchCall call;
    GatherCall& gather = call.gather;
    gather.rows = static_cast<int64_t>(rows.slot.size());
    gather.slots = tables.slots, gather.steps = tables.steps;
    gather.slot = rows.slot.data(), gather.anchor = rows.start.data(), gather.length = rows.length.data();
    for (size_t k = 0; k < tables.widths.size(); ++k) {
      GatherColumn column;
      column.out = out[k].data();
      column.step_bytes = tables.widths[k];
      column.window = window;
      column.pad_value[0] = 7;
      gather.columns.push_back(column);
    }
    gather.masks.push_back({mask.data(), window, nullptr, 1, 0});
    call.shard = rows.shard.data();
    call.generation = any ? nullptr : rows.generation.data();
    call.valid = valid.get();
    for (int32_t d = 0; d < 3; ++d) call.shards.push_back({d, 0});
    call.tries = tries;
    return call;
  }

  // Runs it with two threads, and waits for its end.
  std::shared_ptr<Fetch> Go(const std::shared_ptr<transport::Reader>& reader, bool any = false, int64_t tries = 4) {
    return Go(reader, Call(any, tries));
  }

  std::shared_ptr<Fetch> Go(const std::shared_ptr<transport::Reader>& reader, FetchCall call) {
    EXPECT_EQ(CheckRegions(call, *reader), "");
    auto fetch = std::make_shared<Fetch>(std::move(call), reader, &counters);
    fetch->Prepare(2);
    std::promise<void> ended;
    fetch->Start([&] { Completions::Global().Run([&] { ended.set_value(); }); });
    std::thread helper([&] { fetch->Drain(); });
    fetch->Drain();
    helper.join();
    EXPECT_EQ(ended.get_future().wait_for(std::chrono::seconds(60)), std::future_status::ready);
    fetch->Finish();
    return fetch;
  }

  // What a row must be: as of a gather if it is `whole`, else padding.
  void Check(const std::function<bool(int64_t)>& whole) {
    const auto n = static_cast<int64_t>(rows.slot.size());
    for (int64_t row = 0; row < n; ++row) {
      const int32_t d = rows.shard[row];
      const bool inside = d >= 0 && d < 3 && rows.slot[row] >= 0 && rows.slot[row] < tables.slots;
      const bool good = inside && whole(row);
      EXPECT_EQ(valid[row], good) << row;
      Visible seen;
      if (good) seen = See(window, rows.start[row], rows.length[row], tables.steps);
      for (int64_t w = 0; w < window.length; ++w) {
        const bool shown = w >= seen.element && w < seen.element + seen.count;
        ASSERT_EQ(mask[row * window.length + w], shown) << row << " " << w;
        for (size_t k = 0; k < tables.widths.size(); ++k) {
          const int64_t width = tables.widths[k];
          const uint8_t* got = out[k].data() + (row * window.length + w) * width;
          for (int64_t b = 0; b < width; ++b) {
            const int64_t step = rows.slot[row] * tables.steps + seen.step + w - seen.element;
            ASSERT_EQ(got[b], shown ? tables.shards[d][k][step * width + b] : 7) << row << " " << w << " " << k;
          }
        }
      }
    }
  }

  Tables& tables;
  Rows& rows;
  Window window;
  std::vector<std::vector<uint8_t>> out;
  std::vector<uint8_t> mask;
  std::unique_ptr<bool[]> valid;
  RdmaCounters counters;
};

std::shared_ptr<FakeReader> Fake(const Tables& tables) { return std::make_shared<FakeReader>(1, tables.Regions()); }

class FetchSizes : public testing::TestWithParam<std::tuple<int64_t, Pad>> {};

TEST_P(FetchSizes, MatchesAGather) {
  const auto [count, pad] = GetParam();
  for (const int64_t length : {0, 1, 4, 13}) {
    Tables tables(5, 7, {3, 1, 64});
    Rows rows = Rows::Random(count, 5, 7);
    Trial run(tables, rows, {-2, length, true, pad});
    const auto fetch = run.Go(std::make_shared<transport::MemoryReader>(1, tables.Regions()));
    run.Check([](int64_t) { return true; });
    EXPECT_TRUE(fetch->lost_peers().empty());
    EXPECT_EQ(run.counters.rows, static_cast<uint64_t>(count));
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, FetchSizes,
                         testing::Combine(testing::Values(0, 1, 2, 31, 400),
                                          testing::Values(Pad::kAround, Pad::kHead, Pad::kTail)));

TEST(Fetch, LargeRowsFallIntoSeveralTasks) {
  Tables tables(3, 5, {100 << 10});
  Rows rows = Rows::Random(40, 3, 5);
  Trial run(tables, rows, {0, 5, false});
  run.Go(Fake(tables));
  run.Check([](int64_t) { return true; });
}

TEST(Fetch, AllLocalAsksNobody) {
  Tables tables(5, 7, {3});
  Rows rows = Rows::Random(30, 5, 7);
  std::fill(rows.shard.begin(), rows.shard.end(), 1);
  Trial run(tables, rows, {0, 7, false});
  auto reader = Fake(tables);
  const auto fetch = run.Go(reader);
  EXPECT_FALSE(fetch->travels());
  EXPECT_EQ(reader->reads(), 0);
  run.Check([](int64_t) { return true; });
}

TEST(Fetch, StampsAreReadOnBothSidesOfTheBytes) {
  Tables tables(2, 3, {2});
  Rows rows{{0}, {1}, {0}, {3}, {kGeneration}};
  Trial run(tables, rows, {0, 3, false});
  auto reader = Fake(tables);
  std::vector<std::pair<int32_t, uint64_t>> seen;
  reader->on_piece = [&](const Piece& piece) {
    seen.emplace_back(piece.region, piece.offset);
    return Status::kOk;
  };
  run.Go(reader);
  EXPECT_EQ(seen, (std::vector<std::pair<int32_t, uint64_t>>{{1, 4}, {0, 6}, {1, 4}}));
  EXPECT_EQ(reader->reads(), 3);
}

TEST(Fetch, ATrajectoryThatWasOverwrittenIsStale) {
  Tables tables(4, 3, {2});
  Rows rows{{0, 0, 1, 1, 2}, {0, 1, 0, 1, 3}, {0, 0, 0, 0, 0}, {3, 3, 3, 3, 3}, std::vector<uint32_t>(5, kGeneration)};
  tables.stamps[0][1] = 2 * kGeneration + 2;  // holds another one
  tables.stamps[1][1] = 2 * kGeneration + 1;  // one is being written over it
  Trial run(tables, rows, {0, 3, false});
  auto reader = Fake(tables);
  run.Go(reader);
  run.Check([](int64_t row) { return row != 1 && row != 3; });
  EXPECT_EQ(run.counters.stale, 2u);
  EXPECT_EQ(run.counters.retries, 0u);
  EXPECT_EQ(reader->reads(), 3);
}

TEST(Fetch, AGenerationWrapsRound) {
  Tables tables(1, 3, {2});
  const uint32_t last = 0x7FFFFFFF;  // its stamp is 2**32 - 2
  for (const auto& [stamp, valid] :
       std::vector<std::pair<uint32_t, bool>>{{2 * last, true}, {2 * last + 1, false}, {0, false}}) {
    tables.stamps[0][0] = stamp;
    Rows rows{{0}, {0}, {0}, {3}, {last}};
    Trial run(tables, rows, {0, 3, false});
    run.Go(Fake(tables));
    run.Check([valid = valid](int64_t) { return valid; });
    EXPECT_EQ(run.counters.stale, valid ? 0u : 1u);
  }
}

// Bytes that change while they travel, whether or not a certain trajectory is wanted.
TEST(Fetch, TornRowsAreNeverValid) {
  for (const bool any : {false, true}) {
    Tables tables(1, 4, {8});
    Rows rows{{2}, {0}, {0}, {4}, {kGeneration}};
    Trial run(tables, rows, {0, 4, false});
    auto reader = Fake(tables);
    reader->on_piece = [&](const Piece& piece) {
      if (piece.region == 0) tables.stamps[2][0] += 1;  // a writer begins, or ends
      return Status::kOk;
    };
    run.Go(reader, any);
    run.Check([](int64_t) { return false; });
    EXPECT_EQ(any ? run.counters.torn : run.counters.stale, 1u);
  }
}

TEST(Fetch, ARowThatIsBeingWrittenIsReadAgain) {
  for (const bool any : {false, true}) {
    Tables tables(1, 4, {8});
    tables.stamps[2][0] = 2 * kGeneration - 1;
    Rows rows{{2}, {0}, {0}, {4}, {kGeneration}};
    Trial run(tables, rows, {0, 4, false});
    auto reader = Fake(tables);
    int asked = 0;
    reader->on_piece = [&](const Piece&) {
      if (++asked == 3) tables.stamps[2][0] = 2 * kGeneration;
      return Status::kOk;
    };
    run.Go(reader, any);
    run.Check([](int64_t) { return true; });
    EXPECT_EQ(run.counters.retries, 2u);
    EXPECT_EQ(run.counters.torn, 0u);
  }
}

TEST(Fetch, TriesAreBounded) {
  Tables tables(1, 4, {8});
  for (const int32_t shard : {0, 1}) {  // remote, and here
    tables.stamps[shard][0] = 2 * kGeneration - 1;
    Rows rows{{shard}, {0}, {0}, {4}, {kGeneration}};
    Trial run(tables, rows, {0, 4, false});
    auto reader = Fake(tables);
    run.Go(reader, false, 5);
    run.Check([](int64_t) { return false; });
    EXPECT_EQ(run.counters.torn, 1u);
    EXPECT_EQ(run.counters.retries, 4u);
    EXPECT_EQ(reader->reads(), shard == 0 ? 5 : 0);
  }
}

TEST(Fetch, OnlyRowsThatNeedItAreReadAgain) {
  Tables tables(3, 4, {8});
  tables.stamps[0][1] = 2 * kGeneration - 1;
  Rows rows{{0, 0, 2}, {0, 1, 2}, {0, 0, 0}, {4, 4, 4}, std::vector<uint32_t>(3, kGeneration)};
  Trial run(tables, rows, {0, 4, false});
  auto reader = Fake(tables);
  std::map<uint64_t, int> pieces;
  int reads = 0;
  reader->on_piece = [&](const Piece& piece) {
    if (piece.peer == 0 && piece.region == 0) ++pieces[piece.offset];
    if (piece.region == 1 && piece.offset == 4 && ++reads == 2) tables.stamps[0][1] = 2 * kGeneration;
    return Status::kOk;
  };
  run.Go(reader);
  run.Check([](int64_t) { return true; });
  EXPECT_EQ(pieces, (std::map<uint64_t, int>{{0, 1}, {32, 1}}));
  EXPECT_EQ(run.counters.retries, 1u);
}

TEST(Fetch, WhatAPeerDoesNotGiveIsPadding) {
  for (const Status status : {Status::kLost, Status::kTimeout, Status::kRefused, Status::kClosed}) {
    for (const int32_t at : {0, 1}) {  // the stamps do not come, or the bytes
      Tables tables(5, 7, {3, 4});
      Rows rows = Rows::Random(60, 5, 7);
      Trial run(tables, rows, {0, 7, false});
      auto reader = Fake(tables);
      reader->on_piece = [&](const Piece& piece) {
        if (piece.peer != 2 || piece.region != (at == 0 ? 2 : 1)) return Status::kOk;
        if (piece.bytes > 0) std::memset(piece.to, 0xDD, piece.bytes / 2);  // some had come
        return status;
      };
      const auto fetch = run.Go(reader);
      const auto gone = [&](int64_t row) {
        if (rows.shard[row] != 2 || rows.slot[row] < 0 || rows.slot[row] >= 5) return false;
        return at == 0 || rows.length[row] > 0;
      };
      run.Check([&](int64_t row) { return !gone(row); });
      const auto lost = static_cast<uint64_t>(
          std::count_if(rows.shard.begin(), rows.shard.end(), [&, i = 0](int) mutable { return gone(i++); }));
      ASSERT_GT(lost, 0u);
      EXPECT_EQ(status == Status::kRefused ? run.counters.refused : run.counters.lost, lost);
      EXPECT_EQ(fetch->lost_peers(), (std::vector<int32_t>{2}));
      EXPECT_EQ(fetch->closed(), status == Status::kClosed);
    }
  }
}

TEST(Fetch, WaitsForASlowPeer) {
  Tables tables(5, 7, {3});
  Rows rows = Rows::Random(20, 5, 7);
  Trial run(tables, rows, {0, 7, false});
  auto reader = Fake(tables);
  reader->delay = std::chrono::milliseconds(30);
  run.Go(reader);
  run.Check([](int64_t) { return true; });
}

TEST(Fetch, IsInFlightUntilItHasEnded) {
  Tables tables(2, 3, {2});
  Rows rows{{0}, {1}, {0}, {3}, {kGeneration}};
  Trial run(tables, rows, {0, 3, false});
  EXPECT_TRUE(WaitForFetches(run.counters, 0));
  auto reader = Fake(tables);
  std::promise<void> answer;
  reader->on_piece = [&, asked = answer.get_future().share()](const Piece&) {
    asked.wait();
    return Status::kOk;
  };
  std::promise<void> ended;
  auto fetch = std::make_shared<Fetch>(run.Call(), reader, &run.counters);
  EXPECT_FALSE(WaitForFetches(run.counters, 0));  // it will ask
  fetch->Prepare(1);
  fetch->Start([&] { ended.set_value(); });
  fetch->Drain();
  EXPECT_FALSE(WaitForFetches(run.counters, 0.01));
  answer.set_value();
  EXPECT_TRUE(WaitForFetches(run.counters, 60));
  ended.get_future().wait();
  fetch->Finish();
  EXPECT_FALSE(fetch->closed());
  fetch.reset();
  std::make_shared<Fetch>(run.Call(), reader, &run.counters).reset();  // one that never starts
  EXPECT_TRUE(WaitForFetches(run.counters, 0));
}

// What the kernels of a GPU do is done by a plain gather here, before the fetch.
TEST(Fetch, AGpuGathersTheRowsOfItsShard) {
  for (const int32_t on_gpu : {0, 1}) {  // one of another process would do as well
    Tables tables(5, 7, {3, 64});
    Rows rows = Rows::Random(300, 5, 7);
    const Window window{-2, 6, true, Pad::kHead};
    Trial run(tables, rows, window), kernels(tables, rows, window);
    std::vector<int32_t> slot(300, -1);
    std::vector<uint32_t> before(300, 1), after(300, 1);
    std::vector<uint8_t> take(300, 0xEE);
    const auto here = [&](int64_t row) {
      return rows.shard[row] == on_gpu && rows.slot[row] >= 0 && rows.slot[row] < 5;
    };
    uint64_t torn = 0, stale = 0;
    for (int64_t row = 0; row < 300; ++row) {
      if (!here(row)) continue;
      slot[row] = rows.slot[row];
      before[row] = after[row] = 2 * kGeneration;
      if (row % 4 == 1) ++torn, after[row] -= 1;
      if (row % 4 == 2) ++stale, before[row] += 2;
    }
    FetchCall call = kernels.Call();
    Gather gather(call.gather);
    gather.slot = slot.data();
    for (size_t k = 0; k < 2; ++k) gather.columns[k].table = tables.shards[on_gpu][k].data();
    gather.Prepare(1);
    gather.Drain();

    call = run.Call();
    call.gpu = {{{on_gpu, {}, nullptr}}, before.data(), after.data(), take.data()};
    auto reader = Fake(tables);
    reader->on_piece = [&](const Piece& piece) {
      EXPECT_NE(piece.peer, on_gpu);
      return Status::kOk;
    };
    run.Go(reader, call);
    for (int64_t row = 0; row < 300; ++row) {
      ASSERT_LE(take[row], 1);
      if (take[row] == 1) continue;
      for (size_t k = 0; k < 2; ++k) {
        const int64_t bytes = window.length * tables.widths[k];
        std::memcpy(run.out[k].data() + row * bytes, kernels.out[k].data() + row * bytes, bytes);
      }
      std::memcpy(run.mask.data() + row * window.length, kernels.mask.data() + row * window.length, window.length);
    }
    const bool again = on_gpu == reader->self();  // the host tries what lies in its own memory once more
    run.Check([&](int64_t row) { return !here(row) || row % 4 == 0 || row % 4 == 3 || (row % 4 == 1 && again); });
    EXPECT_GT(torn * stale, 0u);
    EXPECT_EQ(run.counters.torn, again ? 0 : torn);
    EXPECT_EQ(run.counters.stale, stale);
  }
}

TEST(Fetch, AReaderThatAnswersAtOnce) {
  Tables tables(5, 7, {3});
  Rows rows = Rows::Random(20, 5, 7);
  Trial run(tables, rows, {0, 7, false});
  auto reader = Fake(tables);
  reader->at_once = true;
  run.Go(reader);
  run.Check([](int64_t) { return true; });
}

TEST(Fetch, RegionsOfAnotherSizeAreNamed) {
  Tables tables(5, 7, {3}), other(6, 7, {3});
  Rows rows = Rows::Random(3, 6, 7);
  Trial run(other, rows, {0, 7, false});
  EXPECT_EQ(CheckRegions(run.Call(), *Fake(tables)),
            "region 0 of process 0: got 105 bytes, wanted 126. Make the same table on every process.");
}

// Writers go round the slots of a peer while fetches read them; what is valid is whole.
TEST(Fetch, NoTornRowUnderAWriter) {
  constexpr int64_t kSlots = 4, kBytes = 20000;
  Tables tables(kSlots, 1, {kBytes});
  for (int64_t slot = 0; slot < kSlots; ++slot) {
    std::memset(tables.shards[0][0].data() + slot * kBytes, 0, kBytes);
    tables.stamps[0][slot] = 0;
  }
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    for (uint32_t round = 1; !stop.load(); ++round) {
      const int64_t slot = round % kSlots;
      uint32_t* stamp = &tables.stamps[0][slot];
      StoreStamp(stamp, *stamp + 1);
      FenceAfterOpening();
      std::memset(tables.shards[0][0].data() + slot * kBytes, static_cast<int>(*stamp / 2 + 1), kBytes);
      StoreStamp(stamp, *stamp + 1);
      // Bursts, in which rows are torn, and time to read them whole.
      if (round % 64 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  });
  Rows rows{{0, 0, 0, 0}, {0, 1, 2, 3}, {0, 0, 0, 0}, {1, 1, 1, 1}, {0, 0, 0, 0}};
  auto reader = Fake(tables);
  int64_t whole = 0, torn = 0;
  for (int i = 0; i < 300 || (whole == 0 && i < 20000); ++i) {
    Trial run(tables, rows, {0, 1, false});
    run.Go(reader, true, 3);
    for (int64_t row = 0; row < 4; ++row) {
      const uint8_t* got = run.out[0].data() + row * kBytes;
      const bool same = std::all_of(got, got + kBytes, [&](uint8_t b) { return b == got[0]; });
      whole += run.valid[row];
      torn += run.valid[row] && !same;
    }
  }
  stop = true;
  writer.join();
  EXPECT_EQ(torn, 0);
  EXPECT_GT(whole, 0);
}

TEST(Flights, LandOnceAndAreTakenOnce) {
  Tables tables(5, 7, {3});
  Rows rows = Rows::Random(20, 5, 7);
  Trial trial(tables, rows, {0, 7, false});
  FetchFlights flights;
  std::vector<std::shared_ptr<FetchFlight>> started;
  const auto wait_for = [](FetchFlight& flight) {
    std::promise<void> landed;
    if (!flight.WhenLanded([&] { landed.set_value(); })) landed.set_value();
    return landed.get_future().wait_for(std::chrono::seconds(60)) == std::future_status::ready;
  };
  const auto start = [&](int64_t depth) {
    auto flight = std::make_shared<FetchFlight>(trial.Call(), false);
    auto fetch = std::make_shared<Fetch>(flight->call(), Fake(tables), &trial.counters);
    fetch->Prepare(1);
    flight->Holds(fetch);
    fetch->Start([flight] { flight->Land(); });
    fetch->Drain();
    started.push_back(flight);
    return flights.Add(3, 0, depth, flight);
  };
  std::vector<StagedPart> parts = {{trial.out[0].data(), 420, {}},
                                   {trial.mask.data(), 140, {}},
                                   {reinterpret_cast<uint8_t*>(trial.valid.get()), 20, {}}};
  const StagingHandle dropped = start(2), handle = start(2), other = start(2);
  rows.shard.assign(20, -5);  // XLA has other use for this memory
  EXPECT_EQ(flights.Take(dropped, 0, parts), nullptr);
  EXPECT_EQ(flights.Take(handle, 1, parts), nullptr);
  EXPECT_EQ(flights.Take(handle, 0, {}), nullptr);
  const auto flight = flights.Take(handle, 0, parts);
  ASSERT_NE(flight, nullptr);
  EXPECT_EQ(flights.Take(handle, 0, parts), nullptr);
  ASSERT_TRUE(wait_for(*flight));
  flight->fetch().Finish();
  flight->CopyOut(parts);
  rows = Rows::Random(20, 5, 7);
  trial.Check([](int64_t) { return true; });
  flights.Release(3);
  EXPECT_EQ(flights.Take(other, 0, parts), nullptr);
  for (const auto& each : started) ASSERT_TRUE(wait_for(*each));  // what is dropped goes on to its end
}

TEST(ReadRegions, MirrorsAllPeers) {
  Tables tables(5, 7, {3, 4});
  for (const int32_t lost : {-1, 0, 2}) {
    std::vector<uint8_t> a(3 * 105, 0xEE), b(3 * 140, 0xEE);
    bool here[3] = {};
    RegionsCall call{{{a.data(), 105}, {b.data(), 140}}, {{0, 0}, {1, 0}, {2, 0}}, here};
    auto reader = Fake(tables);
    reader->on_piece = [&](const Piece& piece) {
      return piece.peer == lost && piece.region == 1 ? Status::kLost : Status::kOk;
    };
    EXPECT_EQ(CheckRegions(call, *reader), "");
    auto read = std::make_shared<ReadRegions>(std::move(call), reader);
    std::promise<void> ended;
    EXPECT_TRUE(read->Start([&] { ended.set_value(); }));
    ASSERT_EQ(ended.get_future().wait_for(std::chrono::seconds(60)), std::future_status::ready);
    for (int d = 0; d < 3; ++d) {
      EXPECT_EQ(here[d], d != lost);
      const auto wanted = [&](int k) {
        return d == lost ? std::vector<uint8_t>(tables.shards[d][k].size()) : tables.shards[d][k];
      };
      EXPECT_EQ(std::vector<uint8_t>(a.begin() + 105 * d, a.begin() + 105 * (d + 1)), wanted(0));
      EXPECT_EQ(std::vector<uint8_t>(b.begin() + 140 * d, b.begin() + 140 * (d + 1)), wanted(1));
    }
    EXPECT_EQ(read->lost_peers(), lost < 0 ? std::vector<int32_t>{} : std::vector<int32_t>{lost});
  }
}

TEST(ReadRegions, OwnRegionsNeedNobody) {
  Tables tables(5, 7, {3});
  std::vector<uint8_t> a(105);
  bool here[1] = {};
  auto reader = Fake(tables);
  auto read = std::make_shared<ReadRegions>(RegionsCall{{{a.data(), 105}}, {{1, 0}}, here}, reader);
  bool ended = false;
  EXPECT_FALSE(read->Start([&] { ended = true; }));
  EXPECT_TRUE(ended && here[0]);
  EXPECT_EQ(a, tables.shards[1][0]);
  EXPECT_EQ(reader->reads(), 0);
}

TEST(ReadRegions, NamesWhatDoesNotFit) {
  Tables tables(5, 7, {3});
  std::vector<uint8_t> a(3 * 104);
  bool here[3] = {};
  const RegionsCall call{{{a.data(), 104}}, {{0, 0}, {1, 0}, {2, 0}}, here};
  EXPECT_EQ(CheckRegions(call, *Fake(tables)),
            "region 0 of process 0: got 105 bytes, wanted 104. Make the same table on every process.");
}

TEST(CheckOwnRegion, FindsTheShardOfADevice) {
  Tables tables(5, 7, {3, 4});
  const auto reader = Fake(tables);
  const std::vector<RdmaShard> shards = {{0, 0}, {1, 0}};
  EXPECT_EQ(CheckOwnRegion(*reader, shards, 1, tables.shards[1][1].data()), "");
  EXPECT_NE(CheckOwnRegion(*reader, shards, 0, tables.shards[1][1].data()).find("replay.connect"), std::string::npos);
  EXPECT_NE(CheckOwnRegion(*reader, shards, 1, tables.shards[0][1].data()), "");
}

TEST(MemoryReader, EndsOnceWhateverHappens) {
  Tables tables(5, 7, {3});
  std::vector<uint8_t> to(16);
  std::atomic<int> ended{0};
  const auto read = [&](transport::Reader& reader, Piece piece) {
    std::promise<Status> answer;
    reader.Read({piece}, [&](const std::vector<Status>& status) {
      ++ended;
      answer.set_value(status.at(0));
    });
    return answer.get_future().get();
  };
  transport::MemoryReader reader(1, tables.Regions());
  EXPECT_EQ(read(reader, {0, 0, 89, 16, to.data()}), Status::kOk);
  EXPECT_EQ(read(reader, {0, 0, 90, 16, to.data()}), Status::kRefused);
  EXPECT_EQ(read(reader, {0, 0, ~uint64_t{0}, 16, to.data()}), Status::kRefused);
  EXPECT_EQ(read(reader, {3, 0, 0, 1, to.data()}), Status::kRefused);
  EXPECT_EQ(read(reader, {0, 2, 0, 1, to.data()}), Status::kRefused);
  EXPECT_EQ(read(reader, {0, 0, 105, 0, nullptr}), Status::kOk);
  reader.SetAlive(0, false);
  EXPECT_EQ(read(reader, {0, 0, 0, 1, to.data()}), Status::kLost);
  EXPECT_EQ(ended, 7);
}

TEST(MemoryReader, ADoneMayHoldTheLastReference) {
  Tables tables(5, 7, {3});
  std::promise<void> ended;
  {
    auto reader = std::make_shared<transport::MemoryReader>(1, tables.Regions());
    transport::Reader& it = *reader;
    it.Read({}, [reader = std::move(reader), &ended](const std::vector<Status>&) { ended.set_value(); });
  }
  EXPECT_EQ(ended.get_future().wait_for(std::chrono::seconds(60)), std::future_status::ready);
}

TEST(Readers, AreFoundByNumber) {
  Tables tables(5, 7, {3});
  EXPECT_EQ(transport::FindReader(77), nullptr);
  transport::AddReader(77, Fake(tables));
  EXPECT_NE(transport::FindReader(77), nullptr);
  transport::RemoveReader(77);
  EXPECT_EQ(transport::FindReader(77), nullptr);
}

TEST(Completions, AnEndThatWaitsHoldsNoOtherUp) {
  auto* completions = new Completions;  // its threads never end
  std::promise<void> second;
  std::promise<void> first;
  completions->Run([&] {
    second.get_future().wait();
    first.set_value();
  });
  completions->Run([&] { second.set_value(); });
  ASSERT_EQ(first.get_future().wait_for(std::chrono::seconds(60)), std::future_status::ready);
  for (int i = 0; i < 100; ++i) {
    std::promise<void> ended;
    completions->Run([&] { ended.set_value(); });
    ended.get_future().wait();
  }
  EXPECT_LE(completions->threads(), 3 + 100);
}

}  // namespace
}  // namespace gear_jax
