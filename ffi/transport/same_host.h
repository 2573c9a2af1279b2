// Reads of a process on the same host by process_vm_readv: one copy, and the other process takes no part.
//
// Needs the right to trace the other process (the same user, and no stricter ptrace_scope; in a container
// CAP_SYS_PTRACE or the same user namespace). Whether that holds is tried, not guessed.
#ifndef GEAR_JAX_FFI_TRANSPORT_SAME_HOST_H_
#define GEAR_JAX_FFI_TRANSPORT_SAME_HOST_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "ffi/transport/reader.h"

namespace gear_jax::transport {

// What a reader must know of an exposing process. Plain bytes: it travels as it is.
struct HostProcess {
  std::array<char, 40> boot;  // of the host
  uint64_t pid_namespace;     // inode
  int64_t pid;
  uint64_t mark_address;
  std::array<uint8_t, 16> mark;
};

// A secret in this process's memory that says: still this process, and what it exposes is still there.
class Mark {
 public:
  Mark();
  ~Mark() { Clear(); }

  // Call it before exposed memory may go.
  void Clear();

  HostProcess Describe() const;

 private:
  std::unique_ptr<std::array<uint8_t, 16>> mark_;
};

// The regions of a process that lets itself be read.
struct NearMemory {
  HostProcess process;
  std::vector<uint64_t> addresses;
};

struct VmRead {
  uint64_t from;  // in the process that is read
  void* to;
  size_t bytes;
};

// Whether this process can read that one, so that `ReadProcess` will do.
bool CanRead(const HostProcess& process);

constexpr size_t kMaxVmReads = 64;

// Reads all of them (at most kMaxVmReads). kRefused: the process is there, but some of the memory is not. kLost: the
// process is gone, has ended its session, or does not let itself be read any more. Then what was written is worthless.
Status ReadProcess(const HostProcess& process, const VmRead* reads, size_t count);

// The same of this process's own memory, which may have gone: where a memcpy would end the process, this is false.
bool ReadOwn(const VmRead* reads, size_t count);

}  // namespace gear_jax::transport

#endif  // GEAR_JAX_FFI_TRANSPORT_SAME_HOST_H_
