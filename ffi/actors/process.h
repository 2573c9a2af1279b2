// Who holds something in shared memory, and whether that process still lives.
#ifndef GEAR_JAX_FFI_ACTORS_PROCESS_H_
#define GEAR_JAX_FFI_ACTORS_PROCESS_H_

#include <cstdint>

namespace gear_jax {
namespace actors {

enum class Life { kNone, kRunning, kStopped, kDead };

// A process as one word, so that a lease changes hands by one compare-and-swap: its number and, because numbers are
// used again, the time it was started at (clock ticks since the machine's start). 0: nobody.
//   bits 40-63  process number (Linux has at most 2^22)
//   bits 0-39   start time
uint64_t OwnerWord(int64_t pid, uint64_t start);
int64_t OwnerPid(uint64_t owner);

// The word of a process as it is now, 0 if there is none. pid 0: this one.
uint64_t OwnerOf(int64_t pid);

// Whether the process that the word stands for runs, is stopped (SIGSTOP, a debugger), or is gone. One that has ended
// and that nobody has waited for (a zombie) is gone. One that cannot be looked at (no file left to open) counts as
// running.
Life LifeOf(uint64_t owner);

// The number of this process's PID namespace: in another one, process numbers mean other processes. 0: not known.
uint64_t PidNamespace();

}  // namespace actors
}  // namespace gear_jax

#endif  // GEAR_JAX_FFI_ACTORS_PROCESS_H_
