#include "ffi/transport/same_host.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <memory>
#include <numeric>
#include <vector>

#include "ffi/transport/sealed.h"

namespace gear_jax::transport {
namespace {

// Memory that a child process fills, and its description, at the same address here and there.
struct Child {
  explicit Child(size_t bytes) : memory(bytes) {
    int ready[2];
    EXPECT_EQ(pipe(ready), 0);
    pid = fork();
    if (pid == 0) {
      memory.assign(memory.size(), 7);
      const Mark mark;
      HostProcess process = mark.Describe();
      [[maybe_unused]] const ssize_t put = write(ready[1], &process, sizeof(process));
      for (;;) pause();
    }
    EXPECT_EQ(read(ready[0], &process, sizeof(process)), static_cast<ssize_t>(sizeof(process)));
    close(ready[0]);
    close(ready[1]);
  }
  ~Child() { Kill(); }
  void Kill() {
    if (pid <= 0) return;
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
    pid = 0;
  }
  std::vector<uint8_t> memory;
  HostProcess process{};
  pid_t pid;
};

uint64_t At(const std::vector<uint8_t>& memory, size_t offset) {
  return reinterpret_cast<uintptr_t>(memory.data()) + offset;
}

TEST(SameHost, ReadsAnotherProcess) {
  const size_t bytes = (1 << 20) + 3;
  const Child child(bytes);
  if (!CanRead(child.process)) GTEST_SKIP() << "this process may not trace its children";
  for (const size_t size : {size_t{0}, size_t{1}, size_t{4097}, bytes}) {
    std::vector<uint8_t> to(size + 1);
    const VmRead read{At(child.memory, bytes - size), to.data(), size};
    ASSERT_EQ(ReadProcess(child.process, &read, 1), Status::kOk);
    EXPECT_EQ(std::accumulate(to.begin(), to.end(), size_t{0}), 7 * size);
    EXPECT_EQ(to[size], 0);
  }
}

TEST(SameHost, ReadsManyAtOnce) {
  const Child child(1 << 16);
  if (!CanRead(child.process)) GTEST_SKIP() << "this process may not trace its children";
  std::vector<uint8_t> to(kMaxVmReads * 10);
  std::vector<VmRead> reads;
  for (size_t i = 0; i < kMaxVmReads; ++i) reads.push_back({At(child.memory, i * 100), to.data() + i * 10, 10});
  ASSERT_EQ(ReadProcess(child.process, reads.data(), reads.size()), Status::kOk);
  EXPECT_EQ(to, std::vector<uint8_t>(to.size(), 7));
  reads.push_back(reads.back());
  EXPECT_EQ(ReadProcess(child.process, reads.data(), reads.size()), Status::kRefused);
}

TEST(SameHost, AProcessThatIsGoneIsNotRead) {
  Child child(4096);
  if (!CanRead(child.process)) GTEST_SKIP() << "this process may not trace its children";
  child.Kill();
  uint8_t to;
  const VmRead read{At(child.memory, 0), &to, 1};
  EXPECT_EQ(ReadProcess(child.process, &read, 1), Status::kLost);
  EXPECT_FALSE(CanRead(child.process));
}

TEST(SameHost, MemoryThatIsGoneIsRefused) {
  Mark mark;
  const HostProcess self = mark.Describe();
  if (!CanRead(self)) GTEST_SKIP() << "this process may not read itself";
  constexpr size_t kPage = 4096;
  void* const pages = mmap(nullptr, 2 * kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(pages, MAP_FAILED);
  const auto at = reinterpret_cast<uintptr_t>(pages);
  std::vector<uint8_t> to(2 * kPage);
  const VmRead first{at, to.data(), 16}, both{at, to.data(), 2 * kPage}, second{at + kPage, to.data(), 16};
  const VmRead all[] = {first, both, second};
  EXPECT_EQ(ReadProcess(self, all, 3), Status::kOk);
  EXPECT_TRUE(ReadOwn(all, 3));
  munmap(static_cast<uint8_t*>(pages) + kPage, kPage);
  EXPECT_EQ(ReadProcess(self, &first, 1), Status::kOk);
  for (const VmRead& read : {both, second}) {
    EXPECT_EQ(ReadProcess(self, &read, 1), Status::kRefused);
    EXPECT_FALSE(ReadOwn(&read, 1));
  }
  EXPECT_EQ(ReadProcess(self, all, 3), Status::kRefused);
  EXPECT_FALSE(ReadOwn(all, 3));
  mark.Clear();
  EXPECT_EQ(ReadProcess(self, &both, 1), Status::kLost);
  munmap(pages, kPage);
}

TEST(SameHost, WithoutItsMarkAProcessIsAnother) {
  Mark mark;
  const HostProcess self = mark.Describe();
  if (!CanRead(self)) GTEST_SKIP() << "this process may not read itself";
  HostProcess other = self;
  other.mark[0] ^= 1;
  EXPECT_FALSE(CanRead(other));
  other = self;
  other.boot[0] ^= 1;
  EXPECT_FALSE(CanRead(other));
  other = self;
  ++other.pid_namespace;
  EXPECT_FALSE(CanRead(other));
  other = self;
  other.pid = -1;
  EXPECT_FALSE(CanRead(other));
  other = self;
  other.mark_address = 8;
  EXPECT_FALSE(CanRead(other));
  mark.Clear();
  EXPECT_FALSE(CanRead(self));
  EXPECT_FALSE(CanRead(mark.Describe()));
}

TEST(Sealed, OnlyWhatWasSealedIsUnsealed) {
  const uint8_t data[] = {1, 2, 3, 4, 5};
  for (size_t bytes = 0; bytes <= sizeof(data); ++bytes) {
    const std::vector<uint8_t> blob = Seal(42, data, bytes);
    ASSERT_EQ(blob.size(), bytes + 24);
    ASSERT_TRUE(Unseal(42, blob.data(), blob.size()));
    EXPECT_TRUE(std::equal(data, data + bytes, blob.begin() + 16));
    EXPECT_FALSE(Unseal(43, blob.data(), blob.size()));
    for (size_t cut = 0; cut < blob.size(); ++cut) EXPECT_FALSE(Unseal(42, blob.data(), cut));
    for (size_t i = 0; i < blob.size() * 8; ++i) {
      std::vector<uint8_t> wrong = blob;
      wrong[i / 8] ^= static_cast<uint8_t>(1 << i % 8);
      EXPECT_FALSE(Unseal(42, wrong.data(), wrong.size())) << "bit " << i;
    }
  }
}

}  // namespace
}  // namespace gear_jax::transport
