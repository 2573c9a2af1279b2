// A file of shared memory.
#ifndef GEAR_JAX_FFI_ACTORS_SEGMENT_H_
#define GEAR_JAX_FFI_ACTORS_SEGMENT_H_

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

namespace gear_jax {
namespace actors {

// What is wrong, for the user: "<what>: got ..., wanted .... <fix>".
class Error : public std::runtime_error {
 public:
  // missing: there is no such ring. exists: there is one already. space: the memory is not there. foreign: no ring of
  // this version, or a damaged one. elsewhere: of processes that cannot be told from here. busy: another process holds
  // it. layout: the description cannot be stored.
  Error(const char* kind, const std::string& text) : std::runtime_error(text), kind(kind) {}
  const char* kind;
};

// The word of this process (process.h). Throws Error "foreign" where /proc does not tell.
uint64_t OwnerOfThis();

// Mapped, and kept mapped as long as this lives; the file's name may be gone before. As long, the file has a shared
// lock (flock): whoever removes files of the dead takes an exclusive one first, and so removes none that a process has
// open or is making, in whatever PID namespace.
class Segment {
 public:
  // Makes a file of `bytes` bytes of zeros, under a name that nobody opens until Publish. All its memory is
  // allocated here: a full file system is an Error of kind "space", not a signal at the first write.
  static std::unique_ptr<Segment> Create(const std::string& directory, const std::string& name, uint64_t bytes);

  // Maps the whole of a file. Errors: "missing", "foreign" if it is smaller than `least` bytes or not a file.
  static std::unique_ptr<Segment> Open(const std::string& directory, const std::string& name, uint64_t least);

  // Gives the file its name, at once and only if no file has it; Error of kind "exists".
  void Publish();

  // Removes the name, if it is still this file's. False: it is not.
  bool Unlink();

  // Whether the file still has its size. One that was cut short must not be touched any more; one that has only lost
  // its name is as good as before to those who have it open.
  bool Whole() const;

  uint8_t* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }
  const std::string& path() const { return path_; }

  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;
  ~Segment();

 private:
  Segment() = default;
  void Reopen(const std::string& path, int flags);
  // Takes the lock. False: the file was removed before.
  bool Hold() const;

  int file_ = -1;
  uint8_t* data_ = nullptr;
  uint64_t bytes_ = 0;
  std::string path_;
  std::string unpublished_;  // the name until Publish
};

}  // namespace actors
}  // namespace gear_jax

#endif  // GEAR_JAX_FFI_ACTORS_SEGMENT_H_
