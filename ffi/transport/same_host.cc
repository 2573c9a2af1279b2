#include "ffi/transport/same_host.h"

#include <sys/random.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <string>

namespace gear_jax::transport {
namespace {

bool Here(const HostProcess& process) {
  const HostProcess here = Mark().Describe();
  return here.boot[0] != 0 && process.boot == here.boot && process.pid_namespace == here.pid_namespace &&
         here.pid_namespace != 0;
}

bool ReadAll(pid_t pid, const VmRead* reads, size_t count) {
  iovec here[kMaxVmReads + 1], there[kMaxVmReads + 1];
  size_t bytes = 0;
  for (size_t i = 0; i < count; ++i) {
    here[i] = {reads[i].to, reads[i].bytes};
    there[i] = {reinterpret_cast<void*>(reads[i].from), reads[i].bytes};
    bytes += reads[i].bytes;
  }
  return process_vm_readv(pid, here, count, there, count, 0) == static_cast<ssize_t>(bytes);
}

}  // namespace

Mark::Mark() : mark_(std::make_unique<std::array<uint8_t, 16>>()) {
  if (getrandom(mark_->data(), mark_->size(), 0) != static_cast<ssize_t>(mark_->size())) mark_->fill(0);
}

void Mark::Clear() {
  // Others see it: before what follows, and whatever the compiler thinks of memory that nobody here reads.
  for (uint8_t& byte : *mark_) __atomic_store_n(&byte, 0, __ATOMIC_SEQ_CST);
}

HostProcess Mark::Describe() const {
  HostProcess process{};
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  std::memcpy(process.boot.data(), boot.data(), std::min(boot.size(), process.boot.size() - 1));
  struct stat info;
  if (stat("/proc/self/ns/pid", &info) == 0) process.pid_namespace = info.st_ino;
  process.pid = getpid();
  process.mark_address = reinterpret_cast<uintptr_t>(mark_->data());
  process.mark = *mark_;
  return process;
}

bool CanRead(const HostProcess& process) {
  const bool marked = process.mark != std::array<uint8_t, 16>{};
  return marked && process.pid > 0 && Here(process) && ReadProcess(process, nullptr, 0) == Status::kOk;
}

Status ReadProcess(const HostProcess& process, const VmRead* reads, size_t count) {
  if (count > kMaxVmReads) return Status::kRefused;
  // The mark is read last: if it is still there, what was read before it was too.
  std::array<uint8_t, 16> mark{};
  VmRead all[kMaxVmReads + 1];
  std::copy_n(reads, count, all);
  all[count] = {process.mark_address, mark.data(), mark.size()};
  const bool whole = ReadAll(static_cast<pid_t>(process.pid), all, count + 1);
  if (whole) return mark == process.mark ? Status::kOk : Status::kLost;
  const bool there = count > 0 && ReadProcess(process, nullptr, 0) == Status::kOk;
  return there ? Status::kRefused : Status::kLost;
}

bool ReadOwn(const VmRead* reads, size_t count) { return count <= kMaxVmReads && ReadAll(getpid(), reads, count); }

}  // namespace gear_jax::transport
