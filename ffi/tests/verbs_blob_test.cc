// The parts of the verbs transport that need no device: blobs, the staging ring, options.
#include "ffi/transport/verbs_blob.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "ffi/transport/sealed.h"
#include "ffi/transport/staging_ring.h"
#include "ffi/transport/transports.h"

namespace gear_jax::transport {
namespace {

VerbsEnd Sound() {
  VerbsEnd end;
  end.mtu = 1024;
  end.gid = {0x20, 0x01, 0x0d, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7};
  end.reads = 16;
  end.queue_pairs = {{17, 0}, {0xffffff, 0xffffff}};
  return end;
}

// Changed bytes with a checksum that fits them, as a hostile peer would send.
void Reseal(std::vector<uint8_t>* blob) {
  const uint64_t check = Checksum(blob->data(), blob->size() - 8);
  for (int i = 0; i < 8; ++i) (*blob)[blob->size() - 8 + i] = static_cast<uint8_t>(check >> 8 * i);
}

std::string Decode(const std::vector<uint8_t>& blob, VerbsEnd* end) {
  return DecodeVerbsEnd(blob.data(), blob.size(), end);
}

TEST(VerbsBlob, ReadsWhatItWrites) {
  VerbsEnd end = Sound();
  for (uint32_t pairs : {1u, 2u, kMaxQueuePairs}) {
    end.queue_pairs.resize(pairs);
    for (uint32_t i = 0; i < pairs; ++i) end.queue_pairs[i] = {i + 2, 3 * i};
    VerbsEnd read;
    ASSERT_EQ(Decode(EncodeVerbsEnd(end), &read), "");
    EXPECT_EQ(EncodeVerbsEnd(read), EncodeVerbsEnd(end));
    EXPECT_EQ(read.gid, end.gid);
    EXPECT_EQ(read.mtu, 1024u);
    EXPECT_EQ(read.queue_pairs.size(), pairs);
    EXPECT_EQ(read.queue_pairs.back().psn, 3 * (pairs - 1));
  }
}

// The layout is a promise to the exposing side, which is written in another language.
TEST(VerbsBlob, HasTheDocumentedLayout) {
  VerbsEnd end = Sound();
  end.queue_pairs = {{0x010203, 0x040506}};
  const std::vector<uint8_t> want = {'G', 'J', 'V', 'B', 1, 2, 0x00, 0x04, 0, 0, 16, 1, 0x20, 0x01, 0x0d, 0xb8, 0, 0,
                                     0,   0,   0,   0,   0, 0, 0,    0,    0, 7, 3,  2, 1,    0,    6,    5,    4, 0};
  std::vector<uint8_t> got = EncodeVerbsEnd(end);
  ASSERT_EQ(got.size(), want.size() + 8);
  uint64_t check = 0;
  for (int i = 8; i > 0; --i, got.pop_back()) check = check << 8 | got.back();
  EXPECT_EQ(got, want);
  EXPECT_EQ(check, 0xC5F327927C28196Au);
}

TEST(VerbsBlob, RefusesEachFieldThatIsWrong) {
  const std::vector<std::pair<const char*, std::function<void(VerbsEnd*)>>> cases = {
      {"MTU", [](VerbsEnd* e) { e->mtu = 1000; }},
      {"MTU", [](VerbsEnd* e) { e->mtu = 8192; }},
      {"MTU", [](VerbsEnd* e) { e->mtu = 0; }},
      {"link", [](VerbsEnd* e) { e->link = static_cast<Link>(3); }},
      {"reads", [](VerbsEnd* e) { e->reads = 0; }},
      {"queue pairs", [](VerbsEnd* e) { e->queue_pairs.clear(); }},
      {"queue pairs", [](VerbsEnd* e) { e->queue_pairs.resize(kMaxQueuePairs + 1, {17, 0}); }},
      {"queue pair number", [](VerbsEnd* e) { e->queue_pairs[0].number = 1; }},
      {"queue pair number", [](VerbsEnd* e) { e->queue_pairs[0].number = 1 << 24; }},
      {"twice", [](VerbsEnd* e) { e->queue_pairs[0].number = e->queue_pairs[1].number; }},
      {"sequence", [](VerbsEnd* e) { e->queue_pairs[1].psn = 1 << 24; }},
      {"GID", [](VerbsEnd* e) { e->gid = {}; }},
      {"GID", [](VerbsEnd* e) { e->gid[0] = 0xff; }},
      {"LID", [](VerbsEnd* e) { e->lid = 4; }},
      {"LID", [](VerbsEnd* e) { e->link = Link::kInfiniBand; }},
      {"LID", [](VerbsEnd* e) { e->link = Link::kInfiniBand, e->lid = 0xC000; }},
  };
  for (const auto& [what, change] : cases) {
    VerbsEnd end = Sound(), read;
    read.mtu = 77;
    change(&end);
    const std::string error = Decode(EncodeVerbsEnd(end), &read);
    EXPECT_NE(error.find(what), std::string::npos) << what << ": " << error;
    EXPECT_EQ(read.mtu, 77u) << "something was taken from a refused blob";
  }
  VerbsEnd end = Sound();
  end.link = Link::kInfiniBand, end.lid = 0xBFFF, end.gid = {};
  EXPECT_EQ(Decode(EncodeVerbsEnd(end), &end), "") << "InfiniBand needs no GID";
}

TEST(VerbsBlob, RefusesOtherSizesAndVersions) {
  const std::vector<uint8_t> sound = EncodeVerbsEnd(Sound());
  VerbsEnd end;
  for (size_t size = 0; size < sound.size(); ++size) {
    EXPECT_NE(DecodeVerbsEnd(sound.data(), size, &end), "") << size;
  }
  std::vector<uint8_t> longer = sound;
  longer.push_back(0);
  EXPECT_NE(Decode(longer, &end), "");
  EXPECT_NE(DecodeVerbsEnd(nullptr, 0, &end), "");
  for (size_t at : {0, 3, 4}) {
    std::vector<uint8_t> other = sound;
    other[at] ^= 0x80;
    Reseal(&other);
    EXPECT_NE(Decode(other, &end), "") << at;
  }
  for (size_t at = 0; at < sound.size(); ++at) {
    std::vector<uint8_t> other = sound;
    other[at] ^= 0x10;
    EXPECT_NE(Decode(other, &end), "") << "byte " << at << " may change unseen";
  }
}

// Whatever arrives is refused, or sound all through.
TEST(VerbsBlob, SurvivesHostileBytes) {
  std::mt19937 random(7);
  int accepted = 0;
  for (int round = 0; round < 20000; ++round) {
    std::vector<uint8_t> blob = EncodeVerbsEnd(Sound());
    for (uint32_t changes = 1 + random() % 4; changes > 0; --changes) blob[random() % blob.size()] = random();
    if (round % 5 != 0) Reseal(&blob);
    if (round % 3 == 0) blob.resize(random() % 64);
    VerbsEnd end;
    if (!Decode(blob, &end).empty()) continue;
    ++accepted;
    ASSERT_TRUE(IsMtu(end.mtu));
    ASSERT_GT(end.reads, 0);
    ASSERT_EQ(end.queue_pairs.size(), 2u);
    ASSERT_EQ(EncodeVerbsEnd(end), blob);
  }
  EXPECT_GT(accepted, 100);
}

TEST(VerbsBlob, KnowsLinkLocalAddressesAndKeys) {
  uint8_t gid[16] = {0xfe, 0x80};
  EXPECT_TRUE(IsLinkLocal(gid));
  gid[1] = 0xbf;
  EXPECT_TRUE(IsLinkLocal(gid));
  gid[1] = 0xc0;
  EXPECT_FALSE(IsLinkLocal(gid));
  uint32_t key = 0;
  EXPECT_TRUE(DecodeRemoteKey({1, 2, 3, 4}, &key));
  EXPECT_EQ(key, 0x04030201u);
  EXPECT_FALSE(DecodeRemoteKey({1, 2, 3}, &key));
  EXPECT_FALSE(DecodeRemoteKey({1, 2, 3, 4, 5}, &key));
}

TEST(StagingRing, GivesDisjointPiecesInTurn) {
  std::mt19937 random(11);
  for (uint64_t capacity : {64u, 128u, 640u, 4096u}) {
    StagingRing ring(capacity);
    std::deque<std::pair<uint64_t, uint64_t>> taken;  // [begin, end)
    int refused = 0;
    for (int round = 0; round < 5000; ++round) {
      if (random() % 5 < 3) {
        const uint64_t bytes = 1 + random() % (capacity / 2 + 1);
        const uint64_t at = ring.Take(bytes);
        if (at == StagingRing::kNone) {
          ASSERT_FALSE(taken.empty()) << "an empty ring has room for " << bytes;
          ++refused;
          continue;
        }
        ASSERT_EQ(at % StagingRing::kAlign, 0u);
        ASSERT_LE(at + bytes, capacity);
        for (const auto& [begin, end] : taken) ASSERT_TRUE(at + bytes <= begin || at >= end);
        taken.push_back({at, at + bytes});
      } else if (!taken.empty()) {
        ring.Give();
        taken.pop_front();
      }
      ASSERT_EQ(ring.taken(), taken.size());
    }
    EXPECT_GT(refused, 0);
  }
}

TEST(StagingRing, HoldsItsCapacityAndNoMore) {
  StagingRing ring(4 * 256 + 63);
  EXPECT_EQ(ring.capacity(), 4u * 256);
  EXPECT_EQ(ring.Take(0), StagingRing::kNone);
  EXPECT_EQ(ring.Take(4 * 256 + 1), StagingRing::kNone);
  for (uint64_t i = 0; i < 4; ++i) EXPECT_EQ(ring.Take(256), i * 256);
  EXPECT_EQ(ring.Take(1), StagingRing::kNone);
  for (uint64_t i = 0; i < 9; ++i) {  // round and round
    ring.Give();
    EXPECT_EQ(ring.Take(255), i % 4 * 256);
    EXPECT_EQ(ring.Take(1), StagingRing::kNone);
  }
  ring.Clear();
  EXPECT_EQ(ring.Take(4 * 256), 0u);
}

TEST(VerbsOptions, RefusesWhatIsOutOfRange) {
  const std::vector<std::pair<const char*, std::function<void(Options*)>>> cases = {
      {"queue_pairs", [](Options* o) { o->queue_pairs = 0; }},
      {"queue_pairs", [](Options* o) { o->queue_pairs = 65; }},
      {"port", [](Options* o) { o->port = 0; }},
      {"gid_index", [](Options* o) { o->gid_index = -2; }},
      {"mtu", [](Options* o) { o->mtu = 1500; }},
      {"traffic_class", [](Options* o) { o->traffic_class = 256; }},
      {"retries", [](Options* o) { o->retries = 8; }},
      {"ack_timeout", [](Options* o) { o->ack_timeout = 32; }},
      {"ack_timeout", [](Options* o) { o->ack_timeout = 0; }},  // would wait for ever
      {"chunk", [](Options* o) { o->chunk = (1u << 30) + 1; }},
      {"window", [](Options* o) { o->window = 4097; }},
  };
  for (const auto& [what, change] : cases) {
    Options options;
    change(&options);
    std::string error;
    EXPECT_EQ(MakeVerbs(options, &error), nullptr);
    EXPECT_NE(error, "");
#if __has_include(<infiniband/verbs.h>)  // else the error is that
    EXPECT_NE(error.find(what), std::string::npos) << error;
#endif
  }
}

TEST(VerbsOptions, ADeviceThatIsNotThereIsNamed) {
  Options options;
  options.device = "no_such_device";
  std::string error;
  EXPECT_EQ(MakeVerbs(options, &error), nullptr);
  EXPECT_NE(error.find("verbs"), std::string::npos) << error;
  EXPECT_NE(error.find("wanted"), std::string::npos) << error;
}

}  // namespace
}  // namespace gear_jax::transport
