// Sessions over UCX, two in one process: over TCP, and by each other's memory. Skipped where libucp is not there.
#include "ffi/transport/ucx.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <future>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "ffi/transport/sealed.h"
#include "ffi/transport/session.h"
#include "ffi/transport/transports.h"

namespace gear_jax::transport {
namespace {

using Statuses = std::vector<Status>;

constexpr size_t kBytes = (4 << 20) + 5;

class UcxTest : public ::testing::TestWithParam<const char*> {
 protected:
  struct Side {
    std::vector<uint8_t> memory;
    std::vector<RemoteRegion> regions;
    std::shared_ptr<Session> session;
  };

  void SetUp() override {
#ifdef __SANITIZE_THREAD__
    GTEST_SKIP() << "UCX is not made for the thread sanitizer: it ends the process";
#endif
    setenv("UCX_TLS", GetParam(), 1);
    std::string error;
    if (UcxApi::Load(&error) == nullptr) GTEST_SKIP() << error;
    options_.timeout = 5;
    for (int32_t i = 0; i < 2; ++i) Start(i);
    for (int32_t i = 0; i < 2; ++i) ASSERT_EQ(Connect(i), "");
  }

  void Start(int32_t i, OwnMemory second = {nullptr, 0}) {
    Side& side = sides_[i];
    std::mt19937 random(static_cast<uint32_t>(i));
    side.memory.resize(kBytes);
    for (uint8_t& b : side.memory) b = static_cast<uint8_t>(random());
    std::string error;
    auto transport = MakeTransport("ucx", options_, &error);
    ASSERT_NE(transport, nullptr) << error;
    const std::vector<OwnMemory> own = {{side.memory.data(), side.memory.size()}, second};
    side.session = std::make_shared<Session>(std::move(transport), i, 2, own, options_);
    side.regions.clear();
    Exposing(i, [&](ExposingTransport& t) { error = t.Expose(own, &side.regions); });
    ASSERT_EQ(error, "");
  }

  void Exposing(int32_t i, const std::function<void(ExposingTransport&)>& f) {
    ASSERT_TRUE(sides_[i].session->Run([&](Transport& t) { f(dynamic_cast<ExposingTransport&>(t)); }));
  }

  std::vector<uint8_t> Blob(int32_t reader) {
    std::string error;
    const std::vector<uint8_t> offer = sides_[reader].session->Offer(1 - reader, &error);
    EXPECT_EQ(error, "");
    std::vector<uint8_t> blob;
    Exposing(1 - reader, [&](ExposingTransport& t) { blob = t.Accept(reader, offer.data(), offer.size(), &error); });
    EXPECT_EQ(error, "");
    return blob;
  }

  std::string Connect(int32_t reader) {
    return sides_[reader].session->Connect(1 - reader, Blob(reader), sides_[1 - reader].regions);
  }

  std::future<Statuses> Read(int32_t reader, std::vector<Piece> pieces) {
    auto promise = std::make_shared<std::promise<Statuses>>();
    auto future = promise->get_future();
    sides_[reader].session->Read(std::move(pieces), [promise](const Statuses& s) { promise->set_value(s); });
    return future;
  }

  static Statuses Get(std::future<Statuses> future) {
    if (future.wait_for(std::chrono::seconds(60)) != std::future_status::ready) {
      ADD_FAILURE() << "a read has not ended";
      std::abort();
    }
    return future.get();
  }

  void TearDown() override {
    for (Side& side : sides_) {
      if (side.session != nullptr) side.session->Close();
    }
  }

  Options options_;
  Side sides_[2];
};

TEST_P(UcxTest, ReadsEverySize) {
  for (const size_t bytes : {size_t{0}, size_t{1}, size_t{4096}, size_t{4097}, size_t{1} << 20, kBytes}) {
    for (int32_t reader = 0; reader < 2; ++reader) {
      const size_t offset = (kBytes - bytes) / 2;
      std::vector<uint8_t> to(bytes);
      ASSERT_EQ(Get(Read(reader, {{1 - reader, 0, offset, bytes, to.data()}})), Statuses{Status::kOk});
      const auto& memory = sides_[1 - reader].memory;
      EXPECT_TRUE(std::equal(to.begin(), to.end(), memory.begin() + static_cast<std::ptrdiff_t>(offset))) << bytes;
    }
  }
  uint8_t to;
  EXPECT_EQ(Get(Read(0, {{1, 1, 0, 0, &to}, {1, 1, 0, 1, &to}, {1, 0, kBytes, 1, &to}})),
            (Statuses{Status::kOk, Status::kRefused, Status::kRefused}));
}

TEST_P(UcxTest, TheCallerReadsWhatIsNear) {
  const bool near = std::string(GetParam()).find("cma") != std::string::npos;
  std::vector<uint8_t> to(1000);
  EXPECT_EQ(sides_[0].session->ReadHere({{1, 0, 5, to.size(), to.data()}}), near);
  if (!near) return;
  EXPECT_TRUE(std::equal(to.begin(), to.end(), sides_[1].memory.begin() + 5));
  sides_[1].session->Close();
  EXPECT_FALSE(sides_[0].session->ReadHere({{1, 0, 5, to.size(), to.data()}}));
  EXPECT_EQ(Get(Read(0, {{1, 0, 0, 1, to.data()}})), Statuses{Status::kLost});
}

TEST_P(UcxTest, ReadsManyAtOnceFromSeveralThreads) {
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (uint32_t t = 0; t < 3; ++t) {
    threads.emplace_back([&, t]() {
      std::mt19937 random(t);
      const int32_t reader = t % 2;
      for (int i = 0; i < 20; ++i) {
        std::vector<std::vector<uint8_t>> to;
        std::vector<Piece> pieces;
        for (int k = 0; k < 50; ++k) {
          to.emplace_back(random() % 10000);
          pieces.push_back({1 - reader, 0, random() % (kBytes - 10000), to.back().size(), to.back().data()});
        }
        if (Get(Read(reader, pieces)) != Statuses(50, Status::kOk)) ++wrong;
        for (size_t k = 0; k < to.size(); ++k) {
          const auto from = sides_[1 - reader].memory.begin() + static_cast<std::ptrdiff_t>(pieces[k].offset);
          if (!std::equal(to[k].begin(), to[k].end(), from)) ++wrong;
        }
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST_P(UcxTest, APeerThatClosesIsLostAndComesBack) {
  std::vector<uint8_t> to(kBytes);
  auto under_way = Read(0, {{1, 0, 0, kBytes, to.data()}});
  sides_[1].session->Close();
  const Statuses ended = Get(std::move(under_way));
  EXPECT_TRUE(ended[0] == Status::kOk || ended[0] == Status::kLost || ended[0] == Status::kTimeout);
  sides_[0].session->Disconnect(1);
  EXPECT_EQ(Get(Read(0, {{1, 0, 0, 1, to.data()}})), Statuses{Status::kLost});
  Start(1);
  ASSERT_EQ(Connect(0), "");
  EXPECT_EQ(Get(Read(0, {{1, 0, 0, kBytes, to.data()}})), Statuses{Status::kOk});
  EXPECT_EQ(to, sides_[1].memory);
}

TEST_P(UcxTest, ClosingWhileReadingEndsTheReads) {
  std::vector<uint8_t> to(kBytes);
  std::vector<std::future<Statuses>> reads;
  for (int i = 0; i < 20; ++i) reads.push_back(Read(0, {{1, 0, 0, kBytes, to.data()}}));
  sides_[0].session->Close();
  to.clear();
  to.shrink_to_fit();  // a write after this is one to freed memory
  for (auto& read : reads) {
    const Status status = Get(std::move(read))[0];
    EXPECT_TRUE(status == Status::kOk || status == Status::kClosed);
  }
}

TEST_P(UcxTest, MalformedBlobsAreRefused) {
  const std::vector<uint8_t> blob = Blob(0);
  Session& session = *sides_[0].session;
  std::mt19937 random(1);
  for (int i = 0; i < 300; ++i) {
    std::vector<uint8_t> wrong = blob;
    if (i % 3 == 0) wrong.resize(random() % wrong.size());
    if (i % 3 == 1) wrong[random() % wrong.size()] ^= static_cast<uint8_t>(1 + random() % 255);
    if (i % 3 == 2) {
      for (uint8_t& b : wrong) b = static_cast<uint8_t>(random());
    }
    EXPECT_NE(session.Connect(1, wrong, sides_[1].regions), "");
    std::vector<RemoteRegion> regions = sides_[1].regions;
    regions[0].key[random() % regions[0].key.size()] ^= static_cast<uint8_t>(1 + random() % 255);
    EXPECT_NE(session.Connect(1, blob, regions), "");
    std::string error;
    Exposing(0, [&](ExposingTransport& t) { EXPECT_TRUE(t.Accept(1, wrong.data(), wrong.size(), &error).empty()); });
    EXPECT_NE(error, "");
  }
  EXPECT_EQ(Connect(0), "");
  uint8_t to;
  EXPECT_EQ(Get(Read(0, {{1, 0, 5, 1, &to}})), Statuses{Status::kOk});
}

TEST_P(UcxTest, TheExposingSideChecksKeysAndBounds) {
  const bool direct = std::string(GetParam()).find("cma") != std::string::npos;
  Session& session = *sides_[0].session;
  std::vector<uint8_t> to(100);
  std::vector<RemoteRegion> larger = sides_[1].regions;
  larger[0].bytes += 50;
  ASSERT_EQ(session.Connect(1, Blob(0), larger), "");
  EXPECT_EQ(Get(Read(0, {{1, 0, kBytes - 50, 50, to.data()}})), Statuses{Status::kOk});
  if (!direct) {
    EXPECT_EQ(Get(Read(0, {{1, 0, kBytes, 50, to.data()}, {1, 0, 0, 1, to.data()}})),
              (Statuses{Status::kRefused, Status::kRefused}));  // asked for together
    EXPECT_EQ(Get(Read(0, {{1, 0, kBytes - 49, 50, to.data()}})), Statuses{Status::kRefused});
  }
  std::vector<RemoteRegion> wrong = sides_[1].regions;  // a key that is whole, but of another session
  uint64_t kind;
  std::memcpy(&kind, wrong[0].key.data(), sizeof(kind));
  wrong[0].key[20] ^= 1;
  wrong[0].key = Seal(kind, wrong[0].key.data() + 16, wrong[0].key.size() - 24);
  for (auto& region : wrong) region.key = wrong[0].key;
  ASSERT_EQ(session.Connect(1, Blob(0), wrong), "");
  if (!direct) {
    EXPECT_EQ(Get(Read(0, {{1, 0, 0, 100, to.data()}})), Statuses{Status::kRefused});
    EXPECT_TRUE(session.Alive(1));
  }
  EXPECT_EQ(Connect(0), "");
  EXPECT_EQ(Get(Read(0, {{1, 0, 0, 100, to.data()}})), Statuses{Status::kOk});
}

// Whose reads neither end the process that exposed it, nor its connections.
TEST_P(UcxTest, MemoryThatIsGoneIsRefused) {
  Side& side = sides_[1];
  side.session->Close();
  void* const pages = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(pages, MAP_FAILED);
  Start(1, {pages, kBytes});
  ASSERT_EQ(Connect(0), "");
  std::vector<uint8_t> to(kBytes);
  ASSERT_EQ(Get(Read(0, {{1, 1, 0, kBytes, to.data()}})), Statuses{Status::kOk});
  munmap(pages, kBytes);
  Session& session = *sides_[0].session;
  for (const uint64_t bytes : {uint64_t{1}, uint64_t{5000}, uint64_t{kBytes}}) {
    const std::vector<Piece> pieces(3, {1, 1, 0, bytes, to.data()});
    EXPECT_FALSE(session.ReadHere(pieces));
    EXPECT_EQ(Get(Read(0, pieces)), Statuses(3, Status::kRefused));
  }
  EXPECT_EQ(Get(Read(0, {{1, 0, 0, kBytes, to.data()}})), Statuses{Status::kOk});
  EXPECT_TRUE(session.Alive(1));
  EXPECT_EQ(session.counters().refused, 9u);
  EXPECT_EQ(session.counters().lost, 0u);
}

INSTANTIATE_TEST_SUITE_P(Ways, UcxTest, ::testing::Values("tcp,self", "tcp,self,cma", "tcp,posix,self"),
                         [](const auto& way) {
                           return std::string(way.index == 0 ? "Tcp" : way.index == 1 ? "SameHost" : "SharedMemory");
                         });

TEST(Transports, AreMadeByName) {
  std::string error;
  EXPECT_EQ(MakeTransport("pigeon", {}, &error), nullptr);
  EXPECT_NE(error.find("pigeon"), std::string::npos);
}

}  // namespace
}  // namespace gear_jax::transport
