#include "ffi/transport/session.h"

#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "ffi/tests/fake_transport.h"

namespace gear_jax::transport {
namespace {

using Clock = std::chrono::steady_clock;
using Statuses = std::vector<Status>;

constexpr int32_t kSelf = 1;

double SecondsSince(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

std::vector<uint8_t> Bytes(size_t bytes, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<uint8_t> v(bytes);
  for (uint8_t& b : v) b = static_cast<uint8_t>(random());
  return v;
}

class SessionTest : public ::testing::Test {
 protected:
  // Process 1 of three; each exposes two regions of `bytes`.
  void Start(Options options = {}, size_t bytes = 1 << 16) {
    for (int32_t peer = 0; peer < 3; ++peer) {
      for (uint32_t region = 0; region < 2; ++region) {
        world_.memory[peer].push_back(Bytes(bytes, static_cast<uint32_t>(peer) * 2 + region));
      }
    }
    std::vector<OwnMemory> own;
    for (const auto& region : world_.memory[kSelf]) own.push_back({region.data(), region.size()});
    session_ = std::make_shared<Session>(std::make_unique<FakeTransport>(&world_), kSelf, 3, own, options);
    for (const int32_t peer : {0, 2}) ASSERT_EQ(Connect(peer), "");
  }

  std::string Connect(int32_t peer) {
    std::vector<RemoteRegion> regions;
    for (const auto& region : world_.memory[peer]) regions.push_back({4096, region.size(), {1, 2}});
    return session_->Connect(peer, {static_cast<uint8_t>(peer)}, std::move(regions));
  }

  std::future<Statuses> Read(std::vector<Piece> pieces) {
    auto promise = std::make_shared<std::promise<Statuses>>();
    auto future = promise->get_future();
    // A second call of it would throw.
    session_->Read(std::move(pieces), [promise](const Statuses& s) { promise->set_value(s); });
    return future;
  }

  static Statuses Get(std::future<Statuses> future) {
    if (future.wait_for(std::chrono::seconds(20)) != std::future_status::ready) {
      ADD_FAILURE() << "a read has not ended";
      std::abort();
    }
    return future.get();
  }

  bool Same(int32_t peer, int32_t region, uint64_t offset, const std::vector<uint8_t>& got) {
    const auto& r = world_.memory[peer][static_cast<size_t>(region)];
    return std::equal(got.begin(), got.end(), r.begin() + static_cast<std::ptrdiff_t>(offset));
  }

  void TearDown() override {
    if (session_ != nullptr) session_->Close();
    session_.reset();
    EXPECT_EQ(world_.strays, 0);
  }

  FakeWorld world_;
  std::shared_ptr<Session> session_;
};

TEST_F(SessionTest, ReadsEverySizeOfEveryPeer) {
  Options options;
  options.chunk = 1000;
  options.window = 3;
  Start(options);
  for (const bool reorders : {false, true}) {
    world_.reorders = reorders;
    for (const size_t bytes :
         {size_t{0}, size_t{1}, size_t{999}, size_t{1000}, size_t{1001}, size_t{4096}, size_t{65536}}) {
      for (int32_t peer = 0; peer < 3; ++peer) {
        const uint64_t offset = (65536 - bytes) / 2;
        std::vector<uint8_t> to(bytes);
        EXPECT_EQ(Get(Read({{peer, 1, offset, bytes, to.data()}})), Statuses{Status::kOk});
        EXPECT_TRUE(Same(peer, 1, offset, to)) << bytes << " of " << peer;
      }
    }
  }
  EXPECT_LE(world_.most_under_way, 3u);
  EXPECT_EQ(session_->counters().bytes, 2u * 2 * (1 + 999 + 1000 + 1001 + 4096 + 65536));
  EXPECT_EQ(session_->counters().reads, 2u * 2 * 7);
}

TEST_F(SessionTest, AChunkIsNoLargerThanTheTransportReads) {
  world_.max_read = 100;
  Start();
  std::vector<uint8_t> to(1001);
  EXPECT_EQ(Get(Read({{0, 0, 7, 1001, to.data()}})), Statuses{Status::kOk});
  EXPECT_TRUE(Same(0, 0, 7, to));
  EXPECT_EQ(world_.Posted(0), 11u);
}

TEST_F(SessionTest, NothingToReadEndsAtOnce) {
  Start();
  EXPECT_EQ(Get(Read({})), Statuses{});
}

TEST_F(SessionTest, WhatIsOutOfBoundsIsRefusedWithoutTouchingTheWire) {
  Start();
  std::vector<uint8_t> to(64);
  const uint64_t n = 1 << 16;
  EXPECT_EQ(Get(Read({{0, 0, n, 0, to.data()},
                      {0, 0, n, 1, to.data()},
                      {0, 0, n - 1, 2, to.data()},
                      {0, 0, UINT64_MAX, 2, to.data()},
                      {0, 0, 1, UINT64_MAX, to.data()},
                      {0, 2, 0, 1, to.data()},
                      {0, -1, 0, 1, to.data()},
                      {3, 0, 0, 1, to.data()},
                      {-1, 0, 0, 1, to.data()},
                      {kSelf, 0, n, 1, to.data()}})),
            (Statuses{Status::kOk, Status::kRefused, Status::kRefused, Status::kRefused, Status::kRefused,
                      Status::kRefused, Status::kRefused, Status::kRefused, Status::kRefused, Status::kRefused}));
  EXPECT_TRUE(world_.posts.empty());
  EXPECT_TRUE(session_->Alive(0));
}

// Both peers' memory is this process's own, and may be read by any thread while `mark` stands.
class NearTest : public SessionTest {
 protected:
  void Start() {
    SessionTest::Start({}, kBytes);
    for (const int32_t peer : {0, 2}) {
      NearMemory near{mark_.Describe(), {}};
      for (const auto& region : world_.memory[peer])
        near.addresses.push_back(reinterpret_cast<uintptr_t>(region.data()));
      world_.near[peer] = std::make_shared<const NearMemory>(std::move(near));
      ASSERT_EQ(Connect(peer), "");
    }
    if (!CanRead(mark_.Describe())) GTEST_SKIP() << "a process may not read itself here";
  }

  static constexpr size_t kBytes = (1 << 20) + 1;
  Mark mark_;
};

TEST_F(NearTest, ReadsWithoutTheProgressThread) {
  Start();
  for (const size_t bytes : {size_t{0}, size_t{1}, size_t{4097}, kBytes - 1}) {
    std::vector<uint8_t> to(bytes);
    ASSERT_TRUE(session_->ReadHere({{2, 1, 1, bytes, to.data()}})) << bytes;
    EXPECT_TRUE(Same(2, 1, 1, to)) << bytes;
  }
  std::vector<std::vector<uint8_t>> to(300, std::vector<uint8_t>(100));
  std::vector<Piece> pieces;
  for (size_t i = 0; i < to.size(); ++i) pieces.push_back({i < 200 ? 0 : 2, 0, 3 * i, 100, to[i].data()});
  ASSERT_TRUE(session_->ReadHere(pieces));
  for (size_t i = 0; i < to.size(); ++i) EXPECT_TRUE(Same(pieces[i].peer, 0, 3 * i, to[i]));
  EXPECT_TRUE(session_->ReadHere({}));
  EXPECT_TRUE(world_.posts.empty());
  EXPECT_EQ(session_->counters().reads, 304u);
  EXPECT_EQ(session_->counters().bytes, 1 + 4097 + (kBytes - 1) + 30000);
}

TEST_F(NearTest, LeavesAllElseToTheProgressThread) {
  Start();
  std::vector<uint8_t> to(kBytes);
  const std::vector<Piece> others[] = {
      {{2, 0, 0, kBytes, to.data()}},  // too much, and so are these two together
      {{2, 0, 0, kBytes / 2 + 1, to.data()}, {0, 0, 0, kBytes / 2 + 1, to.data()}},
      {{2, 0, kBytes, 1, to.data()}},
      {{2, 0, UINT64_MAX, 2, to.data()}},
      {{2, 0, 1, UINT64_MAX, to.data()}},
      {{2, 2, 0, 1, to.data()}},
      {{2, -1, 0, 1, to.data()}},
      {{3, 0, 0, 1, to.data()}},
      {{-1, 0, 0, 1, to.data()}},
      {{kSelf, 0, 0, 1, to.data()}},
      {{2, 0, 0, 1, to.data()}, {kSelf, 0, 0, 1, to.data()}},
  };
  for (const auto& pieces : others) EXPECT_FALSE(session_->ReadHere(pieces));
  EXPECT_EQ(session_->counters().reads, 0u);
  session_->Disconnect(2);
  EXPECT_FALSE(session_->ReadHere({{2, 0, 0, 1, to.data()}}));
  EXPECT_TRUE(session_->ReadHere({{0, 0, 0, 1, to.data()}}));
  mark_.Clear();
  EXPECT_FALSE(session_->ReadHere({{0, 0, 0, 1, to.data()}}));
  session_->Close();
  EXPECT_FALSE(session_->ReadHere({{0, 0, 0, 1, to.data()}}));
}

TEST_F(NearTest, CloseWaitsForIt) {
  Start();
  const std::vector<uint8_t> before = world_.memory[2][0];
  std::atomic<int> running{3};
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&]() {
      std::vector<uint8_t> to(1 << 20);
      while (session_->ReadHere({{2, 0, 1, to.size(), to.data()}})) {
        EXPECT_TRUE(std::equal(to.begin(), to.end(), before.begin() + 1));
      }
      --running;
    });
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  session_->Disconnect(0);
  EXPECT_EQ(running, 3);
  session_->Close();
  std::fill(world_.memory[2][0].begin(), world_.memory[2][0].end(), uint8_t{0});  // nobody reads this
  for (auto& thread : threads) thread.join();
}

TEST_F(SessionTest, PeersTakeTurns) {
  Options options;
  options.chunk = 64;
  options.window = 4;
  Start(options);
  for (const int32_t peer : {0, 2}) world_.Set(peer, {.delay = 1e-4});
  std::vector<uint8_t> a(64 * 64), b(64);
  auto large = Read({{0, 0, 0, a.size(), a.data()}, {2, 0, 0, b.size(), b.data()}});
  EXPECT_EQ(Get(std::move(large)), (Statuses{Status::kOk, Status::kOk}));
  const auto first = std::find_if(world_.posts.begin(), world_.posts.end(), [](auto& p) { return p.first == 2; });
  EXPECT_LT(first - world_.posts.begin(), 4);
}

TEST_F(SessionTest, ASilentPeerIsLostByTheDeadlineAndTheOthersGoOn) {
  Options options;
  options.timeout = 0.2;
  options.chunk = 1024;
  options.window = 2;
  Start(options);
  world_.Set(2, {.silent = true});
  std::vector<uint8_t> a(8192), b(8192), c(100), d(100);
  const auto start = Clock::now();
  auto first = Read({{0, 0, 0, a.size(), a.data()}, {2, 0, 0, b.size(), b.data()}, {2, 0, 0, 100, d.data()}});
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  auto second = Read({{2, 1, 0, 100, c.data()}});  // queued behind it
  EXPECT_EQ(Get(std::move(first)), (Statuses{Status::kOk, Status::kTimeout, Status::kTimeout}));
  EXPECT_EQ(Get(std::move(second)), Statuses{Status::kLost});
  EXPECT_GE(SecondsSince(start), 0.2);
  EXPECT_FALSE(session_->Alive(2));
  EXPECT_TRUE(session_->Alive(0));
  EXPECT_TRUE(Same(0, 0, 0, a));
  // From now on at once.
  const auto later = Clock::now();
  EXPECT_EQ(Get(Read({{2, 1, 0, 100, c.data()}})), Statuses{Status::kLost});
  EXPECT_LT(SecondsSince(later), 0.2);
  EXPECT_EQ(world_.disconnects, 1);
  EXPECT_EQ(session_->counters().timeouts, 2u);
  EXPECT_EQ(session_->counters().lost, 2u);
  EXPECT_EQ(session_->counters().losses, 1u);
}

TEST_F(SessionTest, DoneWaitsUntilNothingWritesAnyMore) {
  Options options;
  options.timeout = 0.05;
  Start(options);
  world_.Set(2, {.silent = true, .flush_delay = 0.2});
  auto to = std::make_unique<std::vector<uint8_t>>(4096);
  const auto start = Clock::now();
  EXPECT_EQ(Get(Read({{2, 0, 0, 4096, to->data()}})), Statuses{Status::kTimeout});
  to.reset();  // a write after this is one to freed memory
  EXPECT_GE(SecondsSince(start), 0.25);
}

TEST_F(SessionTest, ALostPeerComesBack) {
  Options options;
  options.timeout = 1.0;
  Start(options);
  std::vector<uint8_t> to(4096);
  world_.Set(0, {.breaks = true});
  EXPECT_EQ(Get(Read({{0, 0, 0, 4096, to.data()}})), Statuses{Status::kLost});
  EXPECT_FALSE(session_->Alive(0));
  world_.Set(0, {});
  EXPECT_EQ(session_->RegionBytes(0, 0), uint64_t{1} << 16);
  EXPECT_EQ(Connect(0), "");
  EXPECT_TRUE(session_->Alive(0));
  EXPECT_EQ(Get(Read({{0, 0, 0, 4096, to.data()}})), Statuses{Status::kOk});
  EXPECT_TRUE(Same(0, 0, 0, to));
  EXPECT_EQ(session_->counters().reconnects, 1u);
}

TEST_F(SessionTest, ConnectingAgainWaitsForWhatIsUnderWay) {
  Options options;
  options.timeout = 5;
  Start(options);
  world_.Set(0, {.silent = true, .flush_delay = 0.1});
  std::vector<uint8_t> to(4096);
  auto read = Read({{0, 0, 0, 4096, to.data()}});
  while (world_.Posted(0) == 0) std::this_thread::yield();
  EXPECT_EQ(Connect(0), "");  // the fake counts a stray if a read is still there
  EXPECT_EQ(Get(std::move(read)), Statuses{Status::kLost});
  EXPECT_TRUE(session_->Alive(0));
}

TEST_F(SessionTest, DisconnectEndsWhatIsUnderWay) {
  Start();
  world_.Set(0, {.silent = true});
  std::vector<uint8_t> to(4096);
  auto read = Read({{0, 0, 0, 4096, to.data()}});
  session_->Disconnect(0);
  EXPECT_EQ(Get(std::move(read)), Statuses{Status::kLost});
  session_->Disconnect(0);
  session_->Disconnect(kSelf);
  session_->Disconnect(17);
  EXPECT_EQ(world_.disconnects, 1);
}

TEST_F(SessionTest, ARefusedKeyEndsThePieceAlone) {
  Options options;
  options.chunk = 512;
  options.window = 2;
  Start(options);
  world_.Set(0, {.refuses = true});
  std::vector<uint8_t> a(4096), b(16);
  auto read = Read({{0, 0, 0, a.size(), a.data()}, {2, 0, 0, b.size(), b.data()}});
  EXPECT_EQ(Get(std::move(read)), (Statuses{Status::kRefused, Status::kOk}));
  EXPECT_TRUE(session_->Alive(0));
  EXPECT_LE(world_.Posted(0), 4u);
  EXPECT_EQ(session_->counters().refused, 1u);
}

TEST_F(SessionTest, ATransportWithLittleRoomIsAskedAgain) {
  Options options;
  options.chunk = 64;
  Start(options);
  world_.Set(0, {.delay = 1e-4, .room = 1});
  std::vector<uint8_t> to(4096);
  EXPECT_EQ(Get(Read({{0, 0, 0, 4096, to.data()}})), Statuses{Status::kOk});
  EXPECT_TRUE(Same(0, 0, 0, to));
  world_.Set(0, {.room = 0});
  auto none = Read({{0, 0, 0, 4096, to.data()}});
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  world_.Set(0, {});
  EXPECT_EQ(Get(std::move(none)), Statuses{Status::kOk});
}

TEST_F(SessionTest, CloseEndsAllReads) {
  Start();
  world_.Set(0, {.silent = true, .flush_delay = 0.05});
  auto to = std::make_unique<std::vector<uint8_t>>(1 << 16);
  auto first = Read({{0, 0, 0, 1 << 16, to->data()}});
  auto second = Read({{0, 1, 0, 1 << 16, to->data()}, {2, 5, 0, 1, to->data()}});
  while (world_.Posted(0) == 0) std::this_thread::yield();
  std::thread other([&]() { session_->Close(); });
  session_->Close();
  other.join();
  EXPECT_TRUE(world_.destroyed);
  EXPECT_EQ(Get(std::move(first)), Statuses{Status::kClosed});
  EXPECT_EQ(Get(std::move(second)), (Statuses{Status::kClosed, Status::kRefused}));
  EXPECT_EQ(Get(Read({{0, 0, 0, 1, to->data()}})), Statuses{Status::kClosed});
  std::string error;
  EXPECT_TRUE(session_->Offer(0, &error).empty());
  EXPECT_NE(error, "");
  EXPECT_NE(Connect(0), "");
  EXPECT_FALSE(session_->Run([](Transport&) {}));
}

TEST_F(SessionTest, CloseEndsWithATransportThatDoesNot) {
  Options options;
  options.timeout = 0.1;
  Start(options);
  world_.Set(0, {.silent = true, .flush_delay = std::numeric_limits<double>::infinity()});
  auto to = std::make_unique<std::vector<uint8_t>>(1 << 16);
  auto first = Read({{0, 0, 0, 4096, to->data()}, {0, 1, 0, 4096, to->data()}});
  auto second = Read({{0, 0, 0, 1, to->data()}, {2, 0, 0, 1, to->data()}});
  while (world_.Posted(0) < 3) std::this_thread::yield();
  EXPECT_EQ(session_->Close(), 3u);
  to.reset();  // a write after this is one to freed memory
  for (const Status status : Get(std::move(first)))
    EXPECT_TRUE(status == Status::kClosed || status == Status::kTimeout);
  EXPECT_EQ(Get(std::move(second))[1], Status::kOk);
  EXPECT_TRUE(world_.destroyed);
  EXPECT_EQ(session_->Close(), 3u);
  EXPECT_EQ(world_.strays.exchange(0), 1);  // what the transport has not ended
}

TEST_F(SessionTest, DoneMayReadAgainAndHoldTheLastReference) {
  Start();
  auto ends = std::make_shared<std::promise<Statuses>>();
  auto future = ends->get_future();
  auto to = std::make_shared<std::vector<uint8_t>>(64);
  std::shared_ptr<Session> last = session_;
  Session* const session = session_.get();
  world_.Set(0, {.delay = 0.05});
  session->Read({{0, 0, 0, 64, to->data()}}, [=](const Statuses&) {
    session->Read({{0, 1, 0, 64, to->data()}}, [=](const Statuses& s) {
      ends->set_value(s);
      (void)last;
    });
  });
  last.reset();
  session_.reset();
  EXPECT_EQ(Get(std::move(future)), Statuses{Status::kOk});
  while (!world_.destroyed) std::this_thread::yield();
}

TEST_F(SessionTest, ManyThreadsReadWhilePeersComeAndGo) {
  Options options;
  options.chunk = 700;
  options.window = 4;
  options.timeout = 10;
  world_.reorders = true;
  Start(options);
  std::atomic<uint64_t> fine{0}, wrong{0};
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (uint32_t t = 0; t < 3; ++t) {
    threads.emplace_back([&, t]() {
      std::mt19937 random(t);
      for (int i = 0; i < 300; ++i) {
        std::vector<std::vector<uint8_t>> to;
        std::vector<Piece> pieces;
        for (int k = 0; k < 5; ++k) {
          to.emplace_back(random() % 3000);
          const auto peer = static_cast<int32_t>(random() % 3), region = static_cast<int32_t>(random() % 2);
          pieces.push_back({peer, region, random() % 60000, to.back().size(), to.back().data()});
        }
        const Statuses got = Get(Read(pieces));
        for (size_t k = 0; k < pieces.size(); ++k) {
          if (got[k] != Status::kOk) continue;
          (Same(pieces[k].peer, pieces[k].region, pieces[k].offset, to[k]) ? fine : wrong) += 1;
        }
      }
    });
  }
  std::thread coming([&]() {
    while (!stop) {
      session_->Disconnect(2);
      EXPECT_EQ(Connect(2), "");
      session_->Alive(2);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
  for (auto& thread : threads) thread.join();
  stop = true;
  coming.join();
  EXPECT_EQ(wrong, 0u);
  EXPECT_GT(fine, 3000u);
}

TEST_F(SessionTest, MalformedConnectionsAreRefused) {
  Start();
  EXPECT_NE(session_->Connect(0, {}, {}), "");
  EXPECT_FALSE(session_->Alive(0));
  EXPECT_NE(session_->Connect(kSelf, {1}, {}), "");
  EXPECT_NE(session_->Connect(-1, {1}, {}), "");
  EXPECT_NE(session_->Connect(3, {3}, {}), "");
  EXPECT_NE(session_->Connect(0, {0}, {{UINT64_MAX, 2, {}}}), "");
  EXPECT_EQ(Connect(0), "");
  std::string error;
  EXPECT_EQ(session_->Offer(2, &error), std::vector<uint8_t>{2});
  EXPECT_EQ(error, "");
  EXPECT_TRUE(session_->Offer(99, &error).empty());
  EXPECT_EQ(error, "no such peer");
}

TEST_F(SessionTest, KnowsTheRegions) {
  Start();
  EXPECT_EQ(session_->self(), kSelf);
  EXPECT_EQ(session_->peers(), 3);
  EXPECT_EQ(session_->RegionBytes(0, 1), uint64_t{1} << 16);
  EXPECT_EQ(session_->RegionBytes(kSelf, 0), uint64_t{1} << 16);
  EXPECT_EQ(session_->RegionBytes(0, 2), 0u);
  EXPECT_EQ(session_->RegionBytes(-1, 0), 0u);
  EXPECT_EQ(session_->OwnRegion(0), world_.memory[kSelf][0].data());
  EXPECT_EQ(session_->OwnRegion(2), nullptr);
  EXPECT_EQ(session_->OwnRegion(-1), nullptr);
  EXPECT_TRUE(session_->Alive(kSelf));
  EXPECT_FALSE(session_->Alive(3));
}

TEST(Readers, AreFoundByNumber) {
  FakeWorld world;
  world.memory[0] = {{1, 2, 3}};
  auto session = std::make_shared<Session>(std::make_unique<FakeTransport>(&world), 0, 1,
                                           std::vector<OwnMemory>{{world.memory[0][0].data(), 3}}, Options{});
  EXPECT_EQ(FindReader(7), nullptr);
  AddReader(7, session);
  EXPECT_EQ(FindReader(7), session);
  RemoveReader(7);
  RemoveReader(7);
  EXPECT_EQ(FindReader(7), nullptr);
  EXPECT_EQ(session.use_count(), 1);
}

}  // namespace
}  // namespace gear_jax::transport
