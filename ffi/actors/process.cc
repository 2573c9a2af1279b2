#include "ffi/actors/process.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace gear_jax {
namespace actors {
namespace {

constexpr int kStartBits = 40;
constexpr uint64_t kStartMask = (uint64_t{1} << kStartBits) - 1;

enum class Stat { kRead, kGone, kUnknown };

// State and start time out of /proc/<pid>/stat. Unknown: this process may have no file left to read it by, say; it must
// not take a living one for dead.
Stat ReadStat(int64_t pid, char* state, uint64_t* start) {
  char path[64];
  std::snprintf(path, sizeof(path), "/proc/%lld/stat", static_cast<long long>(pid));
  std::FILE* file = std::fopen(path, "re");
  if (file == nullptr) return errno == ENOENT || errno == ESRCH ? Stat::kGone : Stat::kUnknown;
  char text[1024];
  errno = 0;
  const size_t n = std::fread(text, 1, sizeof(text) - 1, file);
  // One that ends meanwhile reads as nothing, with ESRCH.
  const bool gone = n == 0 && errno == ESRCH;
  std::fclose(file);
  if (gone) return Stat::kGone;
  text[n] = 0;
  // The name, in parentheses, may hold anything; what follows its last ')' does not.
  char* at = std::strrchr(text, ')');
  if (at == nullptr || at[1] != ' ') return Stat::kUnknown;
  *state = at[2];
  at += 2;
  for (int field = 3; field < 22; ++field) {
    at = std::strchr(at, ' ');
    if (at == nullptr) return Stat::kUnknown;
    ++at;
  }
  *start = std::strtoull(at, nullptr, 10);
  return Stat::kRead;
}

}  // namespace

uint64_t OwnerWord(int64_t pid, uint64_t start) {
  return static_cast<uint64_t>(pid) << kStartBits | (start & kStartMask);
}

int64_t OwnerPid(uint64_t owner) { return static_cast<int64_t>(owner >> kStartBits); }

uint64_t OwnerOf(int64_t pid) {
  if (pid == 0) pid = getpid();
  char state;
  uint64_t start;
  if (ReadStat(pid, &state, &start) != Stat::kRead || state == 'Z' || state == 'X') return 0;
  return OwnerWord(pid, start);
}

Life LifeOf(uint64_t owner) {
  if (owner == 0) return Life::kNone;
  char state;
  uint64_t start;
  const Stat found = ReadStat(OwnerPid(owner), &state, &start);
  if (found != Stat::kRead) return found == Stat::kGone ? Life::kDead : Life::kRunning;
  if (OwnerWord(OwnerPid(owner), start) != owner || state == 'Z' || state == 'X') return Life::kDead;
  return state == 'T' || state == 't' ? Life::kStopped : Life::kRunning;
}

uint64_t PidNamespace() {
  struct stat found;
  return stat("/proc/self/ns/pid", &found) == 0 ? static_cast<uint64_t>(found.st_ino) : 0;
}

}  // namespace actors
}  // namespace gear_jax
