#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ffi/actors/chain.h"
#include "ffi/actors/futex.h"
#include "ffi/actors/ring.h"

namespace gear_jax {
namespace actors {
namespace {

constexpr int64_t kSecond = 1000000000;

// A ring in a directory of its own, that is gone when the test ends.
struct Fixture {
  explicit Fixture(uint32_t lanes = 2, uint32_t slots = 3, uint32_t requests = 4) {
    char path[] = "/dev/shm/gear_jax_test.XXXXXX";
    directory = mkdtemp(path);
    spec.steps = 5, spec.lanes = lanes, spec.slots = slots, spec.requests = requests;
    spec.columns = {{ColumnKind::kTrajectory, "observation", "float32", 4, {3}},
                    {ColumnKind::kTrajectory, "action", "int64", 8, {}},
                    {ColumnKind::kRequest, "seen", "uint8", 1, {2, 2}},
                    {ColumnKind::kResponse, "act", "int32", 4, {}}};
    ring = Ring::Create(directory, "ring", spec);
  }
  ~Fixture() {
    unlink((directory + "/ring").c_str());
    EXPECT_EQ(rmdir(directory.c_str()), 0) << "something else is left in " << directory;
  }
  uint64_t* Payload(int64_t slot) {
    const Column& c = ring->layout().columns[1];
    return reinterpret_cast<uint64_t*>(ring->segment().data() + c.offset) + slot * 5;
  }
  std::string directory;
  RingSpec spec;
  std::shared_ptr<Ring> ring;
};

std::string KindOf(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find(": got "), std::string::npos) << e.what();
    EXPECT_NE(std::string(e.what()).find(", wanted "), std::string::npos) << e.what();
    return e.kind;
  }
  return "none";
}

TEST(Layout, GoldenBytes) {
  Fixture f;
  Header header = f.ring->layout().header;
  EXPECT_EQ(header.pid_namespace, PidNamespace());
  const uint8_t golden[] = {
      'G',  'E',  'A',  'R',  'R',  'I',  'N',  'G',
      1,    0,    0,    0,    4,    3,    2,    1,  // magic, version, byte order
      0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
      0,    0x20, 0,    0,    0,    0,    0,    0,  // hash (below), bytes of the segment
      5,    0,    0,    0,    0,    0,    0,    0,
      2,    0,    0,    0,    3,    0,    0,    0,  // T; lanes, slots
      4,    0,    0,    0,    4,    0,    0,    0,
      0x80, 1,    0,    0,    0,    0,    0,    0,  // columns, requests; lanes' offset
      0x80, 2,    0,    0,    0,    0,    0,    0,
      0,    4,    0,    0,    0,    0,    0,    0,  // of slots, of columns
      0,    0x10, 0,    0,    0,    0,    0,    0,  // of the data
  };
  EXPECT_EQ(header.layout_hash, 0xf99569a7d5bd05f1u) << std::hex << header.layout_hash;
  header.layout_hash = 0;
  EXPECT_EQ(std::memcmp(&header, golden, sizeof(golden)), 0);
  const Column& action = f.ring->layout().columns[1];
  EXPECT_STREQ(action.name, "action");
  EXPECT_STREQ(action.dtype, "int64");
  EXPECT_EQ(action.offset, 0x1000u + 384);  // behind 2 * 3 * 5 * 12 bytes, at a multiple of 64
  EXPECT_EQ(action.bytes, 6u * 5 * 8);
  EXPECT_EQ(f.ring->layout().columns[2].bytes, 2u * 4 * 4);
}

TEST(Layout, RefusesWhatItCannotHold) {
  Fixture f;
  RingSpec spec = f.spec;
  spec.slots = 1 << 20;
  EXPECT_EQ(KindOf([&] { MakeLayout(spec); }), "layout");
  spec = f.spec, spec.columns[0].shape.assign(9, 1);
  EXPECT_EQ(KindOf([&] { MakeLayout(spec); }), "layout");
  spec = f.spec, spec.columns[0].name.assign(120, 'x');
  EXPECT_EQ(KindOf([&] { MakeLayout(spec); }), "layout");
  spec = f.spec, spec.columns[0].shape = {int64_t{1} << 40, 1 << 20};
  EXPECT_EQ(KindOf([&] { MakeLayout(spec); }), "layout");
  spec = f.spec, spec.steps = 0;
  EXPECT_EQ(KindOf([&] { MakeLayout(spec); }), "layout");
}

TEST(Segment, NamesWhatIsWrong) {
  Fixture f;
  const std::string path = f.directory + "/ring";
  EXPECT_EQ(KindOf([&] { Ring::Open(f.directory, "no"); }), "missing");
  EXPECT_EQ(KindOf([&] { Ring::Create(f.directory, "ring", f.spec); }), "exists");
  RingSpec large = f.spec;
  large.columns[0].shape = {int64_t{1} << 32};
  EXPECT_EQ(KindOf([&] { Ring::Create(f.directory, "large", large); }), "space");
  EXPECT_TRUE(Ring::Open(f.directory, "ring"));
  EXPECT_TRUE(f.ring->segment().Whole());
  const uint64_t at[] = {0, 8, 44, f.ring->layout().header.columns_offset};  // magic, version, slots, a name
  for (const uint64_t offset : at) {
    f.ring->segment().data()[offset] ^= 0x40;
    EXPECT_EQ(KindOf([&] { Ring::Open(f.directory, "ring"); }), "foreign") << offset;
    f.ring->segment().data()[offset] ^= 0x40;
  }
  for (const uint64_t size : {uint64_t{4096}, uint64_t{100}, uint64_t{0}}) {
    ASSERT_EQ(truncate(path.c_str(), static_cast<off_t>(size)), 0);
    EXPECT_EQ(KindOf([&] { Ring::Open(f.directory, "ring"); }), "foreign");
    EXPECT_FALSE(f.ring->segment().Whole());
  }
}

TEST(Segment, ANameThatBelongsToAnotherFileStays) {
  Fixture f;
  ASSERT_TRUE(f.ring->segment().Unlink());
  auto other = Ring::Create(f.directory, "ring", f.spec);
  EXPECT_FALSE(f.ring->segment().Unlink());
  EXPECT_TRUE(f.ring->segment().Whole());
}

TEST(Segment, IsLockedAsLongAsItIsOpen) {
  Fixture f;
  const std::string path = f.directory + "/ring";
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  EXPECT_NE(flock(file, LOCK_EX | LOCK_NB), 0);
  auto other = Ring::Open(f.directory, "ring");
  f.ring.reset();
  EXPECT_NE(flock(file, LOCK_EX | LOCK_NB), 0);
  other.reset();
  ASSERT_EQ(flock(file, LOCK_EX | LOCK_NB), 0);
  // Who finds the file while it is being removed does not have it.
  auto found = std::async(std::launch::async, [&] { return KindOf([&] { Ring::Open(f.directory, "ring"); }); });
  EXPECT_EQ(found.wait_for(std::chrono::milliseconds(50)), std::future_status::timeout);
  unlink(path.c_str());
  close(file);
  EXPECT_EQ(found.get(), "missing");
}

TEST(Process, TellsTheDeadTheStoppedAndOthersOfTheNumber) {
  EXPECT_EQ(LifeOf(0), Life::kNone);
  const uint64_t me = OwnerOf(0);
  EXPECT_EQ(OwnerPid(me), getpid());
  EXPECT_EQ(LifeOf(me), Life::kRunning);
  EXPECT_EQ(LifeOf(me + 1), Life::kDead);  // the same number, started at another time
  int wait_for[2];
  ASSERT_EQ(pipe(wait_for), 0);
  const pid_t child = fork();
  if (child == 0) {
    char byte;
    close(wait_for[1]);
    _exit(read(wait_for[0], &byte, 1) == 0 ? 0 : 1);
  }
  const uint64_t word = OwnerOf(child);
  EXPECT_NE(word, 0u);
  kill(child, SIGSTOP);
  int status;
  waitpid(child, &status, WUNTRACED);
  EXPECT_EQ(LifeOf(word), Life::kStopped);
  kill(child, SIGKILL);
  siginfo_t info;
  waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT);
  EXPECT_EQ(LifeOf(word), Life::kDead);  // a zombie
  EXPECT_EQ(OwnerOf(child), 0u);
  waitpid(child, &status, 0);
  EXPECT_EQ(LifeOf(word), Life::kDead);
  close(wait_for[0]), close(wait_for[1]);
}

TEST(Ring, KeepsTheOrderOfCommits) {
  Fixture f;
  Actor a(f.ring, 0), b(f.ring, -1);
  EXPECT_EQ(b.lane(), 1u);
  Learner learner(f.ring);
  EXPECT_TRUE(learner.Collect(100).empty());
  EXPECT_FALSE(learner.AwaitCommit(Now()));
  EXPECT_FALSE(learner.AwaitCommits(1, Now() + kSecond / 1000));
  const int64_t a0 = a.Begin(0), b0 = b.Begin(0), a1 = a.Begin(0);
  Trajectory t;
  t.length = 1;
  EXPECT_EQ(b.Commit(b0, t), 1u);
  t.length = 2, t.version = -7, t.flags = 1, t.priority = 0.5f, t.checksum = 9;
  EXPECT_EQ(a.Commit(a1, t), 2u);
  EXPECT_EQ(a.Commit(a0, t), 3u);
  EXPECT_TRUE(learner.AwaitCommits(3, Now()));
  EXPECT_FALSE(learner.AwaitCommits(4, Now() + kSecond / 1000));
  auto two = learner.Collect(2), all = learner.Collect(100);
  ASSERT_EQ(all.size(), 3u);
  ASSERT_EQ(two.size(), 2u);
  EXPECT_EQ(two[1].slot, all[1].slot);
  const int64_t slots[] = {b0, a1, a0};
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(all[i].slot, slots[i]);
    EXPECT_EQ(all[i].number, i + 1u);
  }
  EXPECT_EQ(all[1].trajectory.version, -7);
  EXPECT_EQ(all[1].trajectory.priority, 0.5f);
  EXPECT_EQ(all[1].trajectory.checksum, 9u);
  learner.Consume(two);
  EXPECT_EQ(learner.pending(), 1u);
  learner.Consume(learner.Collect(100));
  EXPECT_EQ(learner.pending(), 0u);
}

TEST(Ring, ABusyLaneAndASecondLearnerAreRefused) {
  Fixture f;
  Learner learner(f.ring);
  EXPECT_EQ(KindOf([&] { Learner second(f.ring); }), "busy");
  Actor a(f.ring, 0);
  EXPECT_EQ(KindOf([&] { Actor second(f.ring, 0); }), "busy");
  Actor b(f.ring, -1);
  EXPECT_EQ(KindOf([&] { Actor third(f.ring, -1); }), "busy");
  EXPECT_EQ(KindOf([&] { Actor fourth(f.ring, 2); }), "busy");
  a.Leave();
  EXPECT_EQ(Actor(f.ring, -1).lane(), 0u);
  learner.Leave();
  Learner next(f.ring);
}

TEST(Ring, AFullLaneWaitsForTheLearner) {
  Fixture f;
  Actor a(f.ring, 0);
  Learner learner(f.ring);
  for (int i = 0; i < 3; ++i) a.Commit(a.Begin(0), {});
  const int64_t start = Now();
  EXPECT_EQ(a.Begin(start + kSecond / 5), kTimedOut);
  EXPECT_GE(Now() - start, kSecond / 5);
  int64_t got = 0;
  std::thread waiting([&] { got = a.Begin(Now() + 20 * kSecond); });
  while (f.ring->lane(0).actor_waits.load() == 0) std::this_thread::yield();
  learner.Consume(learner.Collect(1));
  waiting.join();
  EXPECT_GE(got, 0);
  EXPECT_GT(f.ring->lane(0).waited.load(), 0u);
  std::thread closed([&] { got = a.Begin(Now() + 20 * kSecond); });
  while (f.ring->lane(0).actor_waits.load() == 0) std::this_thread::yield();
  f.ring->Close();
  closed.join();
  EXPECT_EQ(got, kClosed);
}

// A process that has died: its lease is that of a number that nobody has.
void Die(Ring& ring, Actor& actor) { ring.lane(actor.lane()).owner.store(OwnerOf(0) + 1); }

TEST(Ring, AnActorThatDiesLosesWhatItHadOpen) {
  Fixture f;
  Learner learner(f.ring);
  auto a = std::make_unique<Actor>(f.ring, 0);
  a->Commit(a->Begin(0), {});
  a->Begin(0);
  Die(*f.ring, *a);
  a.reset();
  EXPECT_EQ(f.ring->Report()[0].life, Life::kDead);
  Actor next(f.ring, 0);  // before the learner has looked
  EXPECT_EQ(next.incarnation(), 2u);
  const int64_t slot = next.Begin(0);
  EXPECT_EQ(next.Begin(Now()), kTimedOut);
  EXPECT_EQ(learner.Reclaim(), 1u);
  EXPECT_EQ(learner.Reclaim(), 0u);
  EXPECT_GE(next.Begin(0), 0);
  next.Commit(slot, {});
  EXPECT_EQ(learner.Collect(100).size(), 2u);
  EXPECT_EQ(f.ring->lane(0).abandoned.load(), 1u);
}

TEST(Ring, ACommitCountsThoughTheActorDiesInTheMidstOfIt) {
  Fixture f;
  Learner learner(f.ring);
  Actor a(f.ring, 0);
  const int64_t slot = a.Begin(0);
  a.Commit(slot, {});
  // As if it had died between the head and the state.
  f.ring->slot(slot).state.store(StateWord(1, kOpen));
  Die(*f.ring, a);
  EXPECT_EQ(learner.Reclaim(), 0u);
  auto all = learner.Collect(100);
  ASSERT_EQ(all.size(), 1u);
  learner.Consume(all);
  EXPECT_EQ(StateOf(f.ring->slot(slot).state.load()), kFree);
  // And the other way: it had written the number, and the head was another's.
  Actor b(f.ring, 1);
  const int64_t lost = b.Begin(0);
  f.ring->slot(lost).number.store(2);
  Actor c(f.ring, 0);
  c.Commit(c.Begin(0), {});
  Die(*f.ring, b);
  EXPECT_EQ(learner.Reclaim(), 1u);
  EXPECT_EQ(learner.Collect(100).size(), 1u);
}

TEST(Ring, ANewLearnerGoesOnWhereTheLastOneStopped) {
  Fixture f;
  Actor a(f.ring, 0);
  {
    Learner learner(f.ring);
    for (int i = 0; i < 3; ++i) a.Commit(a.Begin(0), {});
    // It dies between the count of what is consumed and the freeing of the slots.
    f.ring->control().consumed.store(2);
    f.ring->control().learner.store(OwnerOf(0) + 1);
  }
  EXPECT_EQ(a.Begin(Now()), kTimedOut);
  Learner next(f.ring);
  auto all = next.Collect(100);
  ASSERT_EQ(all.size(), 1u);
  EXPECT_EQ(all[0].number, 3u);
  EXPECT_GE(a.Begin(0), 0);
  EXPECT_GE(a.Begin(0), 0);
  EXPECT_EQ(a.Begin(Now()), kTimedOut);  // the third is not consumed
}

TEST(Ring, SaysSoIfTheChainIsDamaged) {
  Fixture f;
  Actor a(f.ring, 0);
  Learner learner(f.ring);
  const int64_t slot = a.Begin(0);
  a.Commit(slot, {});
  f.ring->slot(slot).number.store(9);
  EXPECT_EQ(KindOf([&] { learner.Collect(9); }), "foreign");
  f.ring->control().head.store(HeadWord(1, 77));
  EXPECT_EQ(KindOf([&] { learner.Collect(9); }), "foreign");
  f.ring->control().head.store(HeadWord(1000, 0));
  EXPECT_EQ(KindOf([&] { learner.Collect(9); }), "foreign");
  learner.Leave();
  EXPECT_EQ(KindOf([&] { Learner next(f.ring); }), "foreign");
  f.ring->control().head.store(HeadWord(0, 0));
  Learner again(f.ring);  // the one that threw has not kept the ring
}

TEST(Ring, QuestionsAndAnswers) {
  Fixture f;
  Actor a(f.ring, 0), b(f.ring, 1);
  Learner learner(f.ring);
  EXPECT_FALSE(learner.AwaitQuestions(1, Now()));
  EXPECT_EQ(a.AwaitAnswer(a.Ask(3, Now()), Now()), kTimedOut);  // withdrawn by its deadline
  EXPECT_TRUE(learner.Questions().empty());
  int64_t got = -9;
  std::thread asking([&] {
    const int64_t until = Now() + 20 * kSecond;
    got = a.AwaitAnswer(a.Ask(2, until), until);
  });
  EXPECT_TRUE(learner.AwaitQuestions(1, Now() + 20 * kSecond));
  EXPECT_FALSE(learner.AwaitQuestions(2, Now() + kSecond / 20));
  auto all = learner.Questions();
  ASSERT_EQ(all.size(), 1u);
  EXPECT_EQ(all[0].rows, 2u);
  EXPECT_TRUE(learner.Answer(all[0]));
  asking.join();
  EXPECT_EQ(got, 0);
  b.Ask(1, Now() + kSecond);
  all = learner.Questions();
  b.Ask(1, Now() + kSecond);
  EXPECT_FALSE(learner.Answer(all[0]));
  f.ring->Close();
  EXPECT_EQ(b.AwaitAnswer(99, Now() + 20 * kSecond), kClosed);
}

// Many writers and a reader: everything arrives once, in each writer's order, with the bytes that were written.
TEST(Ring, ManyActors) {
  constexpr int kLanes = 4;
  constexpr uint64_t kEach = 3000;
  Fixture f(kLanes, 2);
  std::vector<std::thread> threads;
  for (int i = 0; i < kLanes; ++i) {
    threads.emplace_back([&f, i] {
      for (uint64_t n = 0; n < kEach;) {
        Actor actor(f.ring, i);
        for (uint64_t k = 0; k < 500; ++k, ++n) {
          const int64_t slot = actor.Begin(Now() + 60 * kSecond);
          ASSERT_GE(slot, 0);
          for (uint64_t t = 0; t < 5; ++t) f.Payload(slot)[t] = n * 10 + t;
          Trajectory trajectory;
          trajectory.length = 5, trajectory.checksum = n;
          actor.Commit(static_cast<uint32_t>(slot), trajectory);
        }
      }
    });
  }
  Learner learner(f.ring);
  std::map<uint32_t, uint64_t> next;
  uint64_t number = 0;
  while (number < kLanes * kEach) {
    ASSERT_TRUE(learner.AwaitCommit(Now() + 60 * kSecond));
    if (number % 7 == 0) learner.Reclaim();
    auto all = learner.Collect(number % 3 == 0 ? 3 : 100);
    for (const Committed& c : all) {
      EXPECT_EQ(c.number, ++number);
      EXPECT_EQ(c.trajectory.checksum, next[c.lane]++);
      for (uint64_t t = 0; t < 5; ++t) EXPECT_EQ(f.Payload(c.slot)[t], c.trajectory.checksum * 10 + t);
    }
    learner.Consume(all);
  }
  for (auto& t : threads) t.join();
  EXPECT_EQ(learner.pending(), 0u);
  for (const LaneReport& r : f.ring->Report()) {
    EXPECT_EQ(r.committed, kEach);
    EXPECT_EQ(r.abandoned, 0u);
  }
}

}  // namespace
}  // namespace actors
}  // namespace gear_jax
