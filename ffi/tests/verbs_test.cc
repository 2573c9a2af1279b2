// The verbs transport on a device: both sides in this process, over one port. Skipped where there is no RDMA device;
// tools/softroce has one.
#include <gtest/gtest.h>

#if __has_include(<infiniband/verbs.h>)

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "ffi/transport/transports.h"
#include "ffi/transport/verbs_blob.h"
#include "ffi/transport/verbs_device.h"
#include "ffi/transport/verbs_library.h"

namespace gear_jax::transport {
namespace {

using Clock = std::chrono::steady_clock;

uint8_t Pattern(size_t i) { return static_cast<uint8_t>(i * 7 + i / 251 + 3); }

// The least exposing side: one region, the queue pairs of one reader.
class Responder {
 public:
  Responder(const Options& options, size_t bytes) : memory_(bytes) {
    std::string error;
    library_ = OpenVerbsLibrary(&error);
    EXPECT_EQ(error, "");
    EXPECT_EQ(OpenVerbsDevice(*library_, options, &device_), "");
    for (size_t i = 0; i < bytes; ++i) memory_[i] = Pattern(i);
    domain_ = library_->alloc_pd(device_.context);
    queue_ = library_->create_cq(device_.context, 1, nullptr, nullptr, 0);
    registration_ = library_->reg_mr(domain_, memory_.data(), bytes, IBV_ACCESS_REMOTE_READ);
    EXPECT_NE(registration_, nullptr);
  }

  ~Responder() {
    Drop();
    library_->dereg_mr(registration_);
    library_->destroy_cq(queue_);
    library_->dealloc_pd(domain_);
    library_->close_device(device_.context);
  }

  std::vector<uint8_t> Answer(const std::vector<uint8_t>& offer) {
    VerbsEnd theirs, mine;
    EXPECT_EQ(DecodeVerbsEnd(offer.data(), offer.size(), &theirs), "");
    mine = theirs;
    mine.queue_pairs.clear();
    for (const QueuePairEnd& end : theirs.queue_pairs) mine.queue_pairs.push_back({Add(theirs, end), 5});
    return EncodeVerbsEnd(mine);
  }

  void Drop() {
    for (ibv_qp* qp : pairs_) library_->destroy_qp(qp);
    pairs_.clear();
  }

  RemoteRegion region() const {
    const uint32_t key = registration_->rkey;
    const auto byte = [key](int i) { return static_cast<uint8_t>(key >> 8 * i); };
    return {reinterpret_cast<uint64_t>(memory_.data()), memory_.size(), {byte(0), byte(1), byte(2), byte(3)}};
  }

 private:
  uint32_t Add(const VerbsEnd& theirs, const QueuePairEnd& end) {
    ibv_qp_init_attr init = {};
    init.send_cq = init.recv_cq = queue_;
    init.qp_type = IBV_QPT_RC;
    init.cap.max_send_wr = init.cap.max_recv_wr = init.cap.max_send_sge = init.cap.max_recv_sge = 1;
    ibv_qp* qp = library_->create_qp(domain_, &init);
    ibv_qp_attr a = {};
    a.qp_state = IBV_QPS_INIT;
    a.port_num = device_.port;
    a.qp_access_flags = IBV_ACCESS_REMOTE_READ;
    EXPECT_EQ(library_->modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS), 0);
    a.qp_state = IBV_QPS_RTR;
    a.path_mtu = MtuValue(theirs.mtu);
    a.dest_qp_num = end.number;
    a.rq_psn = end.psn;
    a.max_dest_rd_atomic = theirs.reads;
    a.min_rnr_timer = 12;
    a.ah_attr.is_global = 1;
    a.ah_attr.port_num = device_.port;
    std::copy(theirs.gid.begin(), theirs.gid.end(), a.ah_attr.grh.dgid.raw);
    a.ah_attr.grh.sgid_index = static_cast<uint8_t>(device_.gid_index);
    a.ah_attr.grh.hop_limit = 64;
    EXPECT_EQ(library_->modify_qp(qp, &a,
                                  IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                      IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER),
              0);
    pairs_.push_back(qp);
    return qp->qp_num;
  }

  const VerbsLibrary* library_;
  VerbsDevice device_;
  std::vector<uint8_t> memory_;
  ibv_pd* domain_;
  ibv_cq* queue_;
  ibv_mr* registration_;
  std::vector<ibv_qp*> pairs_;
};

class Verbs : public testing::Test {
 protected:
  void SetUp() override {
    if (const std::string problem = Problem(); !problem.empty()) GTEST_SKIP() << problem;
  }

  std::string Problem() const {
    std::string error;
    MakeVerbs(options_, &error);
    return error;
  }

  // One reader, one responder, connected.
  void Start(size_t bytes) {
    std::string error;
    responder_ = std::make_unique<Responder>(options_, bytes);
    reader_ = MakeVerbs(options_, &error);
    ASSERT_NE(reader_, nullptr) << error;
    ASSERT_EQ(Connect(0), "");
  }

  std::string Connect(int32_t peer, RemoteRegion region = {}) {
    std::string error;
    const std::vector<uint8_t> offer = reader_->Offer(peer, &error);
    if (!error.empty()) return error;
    const std::vector<uint8_t> answer = responder_->Answer(offer);
    return reader_->Connect(peer, answer.data(), answer.size(), {region.key.empty() ? responder_->region() : region});
  }

  // Posts as soon as there is room; false at the deadline.
  bool PostSoon(int32_t peer, uint64_t offset, uint32_t bytes, void* to, uint64_t cookie) {
    const auto end = Clock::now() + std::chrono::seconds(20);
    while (!reader_->Post(peer, 0, offset, bytes, to, cookie)) {
      if (Clock::now() > end) return false;
      Take(0.01);
    }
    return true;
  }

  void Take(double seconds) {
    Completion completions[3];  // fewer than there may be
    size_t count = reader_->Poll(completions, 3);
    if (count == 0) {
      reader_->Wait(seconds);
      count = reader_->Poll(completions, 3);
    }
    for (size_t i = 0; i < count; ++i) {
      ASSERT_EQ(ended_.count(completions[i].cookie), 0u) << "a cookie came twice";
      ended_[completions[i].cookie] = completions[i].status;
    }
  }

  // Waits until `count` reads have ended in all.
  bool Await(size_t count, double seconds = 20) {
    const auto end = Clock::now() + std::chrono::duration<double>(seconds);
    while (ended_.size() < count && Clock::now() < end) Take(0.05);
    return ended_.size() == count;
  }

  Status ReadOne(uint64_t cookie, uint64_t offset, uint32_t bytes) {
    std::vector<uint8_t> to(bytes);
    EXPECT_TRUE(PostSoon(0, offset, bytes, to.data(), cookie));
    EXPECT_TRUE(Await(ended_.size() + 1));
    if (ended_[cookie] == Status::kOk) {
      for (uint32_t i = 0; i < bytes; ++i) {
        if (to[i] != Pattern(offset + i)) ADD_FAILURE() << "byte " << i << " of " << bytes, i = bytes;
      }
    }
    return ended_[cookie];
  }

  Options options_;
  std::unique_ptr<Responder> responder_;  // outlives the reader
  std::unique_ptr<Transport> reader_;
  std::map<uint64_t, Status> ended_;
};

TEST_F(Verbs, ReadsAnySizeAtAnyPlace) {
  Start(1 << 20);
  EXPECT_EQ(reader_->name(), "verbs");
  EXPECT_TRUE(reader_->capabilities().checks_keys);
  uint64_t cookie = 0;
  for (uint32_t bytes : {1u, 2u, 63u, 64u, 65u, 1023u, 4096u, 4097u, 99999u, 256u << 10}) {
    EXPECT_EQ(ReadOne(cookie++, 0, bytes), Status::kOk);
    EXPECT_EQ(ReadOne(cookie++, (1 << 20) - bytes, bytes), Status::kOk);
    EXPECT_EQ(ReadOne(cookie++, 12345, bytes), Status::kOk);
  }
  EXPECT_EQ(reader_->capabilities().max_read, 256u << 10);
}

TEST_F(Verbs, ManyReadsBeyondTheWindowGoRoundTheStagingMemory) {
  options_.chunk = 1000;
  options_.window = 5;
  Start(64 << 10);
  std::vector<std::vector<uint8_t>> to(3000);
  const auto files = [] { return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {}); };
  const auto before = files();
  for (size_t i = 0; i < to.size(); ++i) {
    to[i].resize(1 + i * 37 % 1000);
    ASSERT_TRUE(PostSoon(0, i * 13 % 60000, static_cast<uint32_t>(to[i].size()), to[i].data(), i));
  }
  ASSERT_TRUE(Await(to.size()));
  for (size_t i = 0; i < to.size(); ++i) {
    ASSERT_EQ(ended_[i], Status::kOk);
    for (size_t k = 0; k < to[i].size(); ++k) ASSERT_EQ(to[i][k], Pattern(i * 13 % 60000 + k)) << i;
  }
  EXPECT_EQ(files(), before);
}

TEST_F(Verbs, TheWindowBoundsWhatIsUnderWay) {
  options_.window = 3;
  Start(1 << 20);
  std::vector<uint8_t> to(256 << 10);
  int posted = 0;
  while (posted < 100 && reader_->Post(0, 0, 0, 1, to.data(), posted)) ++posted;
  EXPECT_LE(posted, 3);  // nothing was polled
  EXPECT_GT(posted, 0);
  ASSERT_TRUE(Await(posted));
  EXPECT_EQ(ReadOne(1000, 0, 1), Status::kOk);
}

TEST_F(Verbs, AWrongKeyIsRefusedByThePeerAndSpendsTheQueuePairs) {
  Start(1 << 16);
  RemoteRegion wrong = responder_->region();
  wrong.key[1] ^= 0x5a;
  ASSERT_EQ(Connect(0, wrong), "");
  EXPECT_EQ(ReadOne(0, 0, 100), Status::kRefused);
  EXPECT_EQ(ReadOne(1, 0, 100), Status::kLost) << "spent";
  EXPECT_EQ(ReadOne(2, 0, 100), Status::kLost);
  ASSERT_EQ(Connect(0), "");
  EXPECT_EQ(ReadOne(3, 0, 100), Status::kOk) << "a new connection is as good as the first";
}

TEST_F(Verbs, WhatLiesPastTheRegionIsRefusedByThePeer) {
  Start(10000);
  EXPECT_EQ(ReadOne(0, 9000, 1001), Status::kRefused);
  ASSERT_EQ(Connect(0), "");
  EXPECT_EQ(ReadOne(1, 9000, 1000), Status::kOk);
}

TEST_F(Verbs, ReadsThatAnErrorTakesAlongEnd) {
  options_.queue_pairs = 1;
  Start(1 << 20);
  std::vector<uint8_t> to(4 * 4096);
  ASSERT_TRUE(reader_->Post(0, 0, 1 << 20, 4096, to.data(), 0));  // past the end
  for (uint64_t i = 1; i < 4; ++i) ASSERT_TRUE(reader_->Post(0, 0, 0, 4096, to.data() + i * 4096, i));
  ASSERT_TRUE(Await(4));
  EXPECT_EQ(ended_[0], Status::kRefused);
  for (uint64_t i = 1; i < 4; ++i) EXPECT_EQ(ended_[i], Status::kLost);
}

TEST_F(Verbs, APeerThatIsGoneEndsNothingUntilItIsDisconnected) {
  Start(1 << 20);
  responder_->Drop();
  std::vector<uint8_t> to(3 * 4096, 9);
  for (uint64_t i = 0; i < 3; ++i) ASSERT_TRUE(reader_->Post(0, 0, 0, 4096, to.data() + i * 4096, i));
  EXPECT_FALSE(Await(1, 0.5));
  reader_->Disconnect(0);
  ASSERT_TRUE(Await(3, 1));
  for (const auto& [cookie, status] : ended_) EXPECT_EQ(status, Status::kLost) << cookie;
  EXPECT_EQ(std::count(to.begin(), to.end(), 9), 3 * 4096);
  reader_->Disconnect(0);  // once more does nothing
  EXPECT_EQ(ReadOne(10, 0, 1), Status::kLost);
  ASSERT_EQ(Connect(0), "");
  EXPECT_EQ(ReadOne(11, 0, 4096), Status::kOk);
}

TEST_F(Verbs, FewRetriesTellByThemselvesThatAPeerIsGone) {
  options_.retries = 1;
  options_.ack_timeout = 14;  // 67 ms
  Start(1 << 20);
  responder_->Drop();
  EXPECT_EQ(ReadOne(0, 0, 4096), Status::kLost);
}

TEST_F(Verbs, PeersAreApart) {
  Start(1 << 20);
  ASSERT_EQ(Connect(2), "");
  std::vector<uint8_t> to(100);
  ASSERT_TRUE(PostSoon(1, 0, 100, to.data(), 0));  // was never connected
  ASSERT_TRUE(PostSoon(2, 0, 100, to.data(), 1));
  ASSERT_TRUE(Await(2));
  EXPECT_EQ(ended_[0], Status::kLost);
  EXPECT_EQ(ended_[1], Status::kOk);
  reader_->Disconnect(2);
  EXPECT_EQ(ReadOne(2, 5, 100), Status::kOk) << "of peer 0";
  ASSERT_TRUE(reader_->Post(7, 0, 0, 1, to.data(), 3)) << "no such peer";
  ASSERT_TRUE(reader_->Post(0, 9, 0, 1, to.data(), 4)) << "no such region";
  ASSERT_TRUE(Await(5));
  EXPECT_EQ(ended_[3], Status::kLost);
  EXPECT_EQ(ended_[4], Status::kRefused);
}

TEST_F(Verbs, HostileAnswersAreRefused) {
  Start(1 << 16);
  reader_->Disconnect(0);
  std::string error;
  for (int i = 0; i < 5; ++i) {
    const std::vector<uint8_t> offer = reader_->Offer(0, &error);
    ASSERT_EQ(error, "");
    std::vector<uint8_t> answer = responder_->Answer(offer);
    std::vector<RemoteRegion> regions = {responder_->region()};
    if (i == 0) answer.resize(answer.size() - 1);
    if (i == 1)
      answer = EncodeVerbsEnd([&] {
        VerbsEnd end;
        EXPECT_EQ(DecodeVerbsEnd(answer.data(), answer.size(), &end), "");
        end.queue_pairs.pop_back();
        return end;
      }());
    if (i == 2) regions[0].key.push_back(0);
    if (i == 3) regions[0].bytes = ~uint64_t{0};
    if (i == 4) answer.clear();
    const std::string refusal = reader_->Connect(0, answer.data(), answer.size(), regions);
    EXPECT_NE(refusal.find("wanted"), std::string::npos) << i << refusal;
    EXPECT_EQ(ReadOne(100 + i, 0, 1), Status::kLost) << i;
  }
  const std::vector<uint8_t> none;
  EXPECT_NE(reader_->Connect(0, none.data(), 0, {}), "");
  EXPECT_NE(reader_->Connect(5, none.data(), 0, {}), "");
  EXPECT_TRUE(reader_->Offer(-1, &error).empty());
  EXPECT_NE(error, "");
  ASSERT_EQ(Connect(0), "");
  EXPECT_EQ(ReadOne(200, 0, 100), Status::kOk);
}

// Until the answer is there, the last connection goes on.
TEST_F(Verbs, AnOfferDisturbsNothing) {
  Start(1 << 16);
  std::string error;
  const std::vector<uint8_t> given_up = reader_->Offer(0, &error);
  EXPECT_EQ(ReadOne(0, 0, 100), Status::kOk);
  const std::vector<uint8_t> offer = reader_->Offer(0, &error);
  EXPECT_EQ(ReadOne(1, 0, 100), Status::kOk);
  const std::vector<uint8_t> answer = responder_->Answer(offer);
  EXPECT_EQ(ReadOne(2, 0, 100), Status::kOk);
  std::vector<uint8_t> to(100);
  ASSERT_TRUE(reader_->Post(0, 0, 0, 100, to.data(), 3));  // ends, one way or the other
  ASSERT_EQ(reader_->Connect(0, answer.data(), answer.size(), {responder_->region()}), "");
  ASSERT_TRUE(Await(4));
  EXPECT_EQ(ReadOne(4, 0, 100), Status::kOk);
  EXPECT_NE(reader_->Connect(0, answer.data(), answer.size(), {responder_->region()}), "") << "an answer is taken once";
}

TEST_F(Verbs, EveryMtuOfThePortWorks) {
  for (uint32_t mtu : {256u, 512u, 1024u, 2048u, 4096u}) {
    options_.mtu = mtu;
    if (!Problem().empty()) continue;  // more than the port has
    ended_.clear();
    reader_.reset();
    Start(1 << 16);
    EXPECT_EQ(ReadOne(0, 1, 5000), Status::kOk) << mtu;
  }
  ASSERT_FALSE(ended_.empty());
}

TEST_F(Verbs, TheGidIsNotLinkLocal) {
  std::string error;
  VerbsDevice device;
  const VerbsLibrary* library = OpenVerbsLibrary(&error);
  ASSERT_EQ(OpenVerbsDevice(*library, options_, &device), "");
  EXPECT_FALSE(IsLinkLocal(device.gid.data()));
  EXPECT_GT(device.gid_index, 0) << "index 0 is the link-local one";
  library->close_device(device.context);
  options_.gid_index = 255;
  EXPECT_NE(Problem().find("no GID at index 255"), std::string::npos) << Problem();
  options_ = Options();
  options_.port = 9;
  EXPECT_NE(Problem().find("no port 9"), std::string::npos) << Problem();
}

TEST_F(Verbs, WakeEndsAWait) {
  Start(1 << 16);
  const auto start = Clock::now();
  std::thread waker([this] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    reader_->Wake();
  });
  reader_->Wait(30);
  waker.join();
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(20));
  reader_->Wake();
  reader_->Wait(30);  // a Wake before the Wait counts
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(20));
}

TEST_F(Verbs, EndsWithReadsUnderWay) {
  Start(1 << 20);
  std::vector<uint8_t> to(256 << 10);
  for (uint64_t i = 0; i < 2; ++i) ASSERT_TRUE(reader_->Post(0, 0, 0, 256 << 10, to.data(), i));
  reader_.reset();
  responder_->Drop();
}

TEST_F(Verbs, ManyConnectionsLeaveNothing) {
  options_.chunk = 4096;
  Start(1 << 16);
  const auto files = [] { return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {}); };
  const auto before = files();
  for (uint64_t i = 0; i < 100; ++i) {
    responder_->Drop();
    ASSERT_EQ(Connect(0), "");
    ASSERT_EQ(ReadOne(i, i, 100), Status::kOk);
  }
  EXPECT_EQ(files(), before);
}

}  // namespace
}  // namespace gear_jax::transport

#endif  // __has_include(<infiniband/verbs.h>)
