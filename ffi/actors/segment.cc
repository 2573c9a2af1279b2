#include "ffi/actors/segment.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "ffi/actors/process.h"

namespace gear_jax {
namespace actors {
namespace {

std::string Bytes(uint64_t n) { return std::to_string(n) + " bytes"; }

Error System(const std::string& what, int error) {
  return Error("foreign", what + ": got \"" + std::strerror(error) +
                              "\", wanted a file of shared memory. Look at the path's permissions.");
}

Error NoRoom(const std::string& directory, uint64_t bytes, const std::string& got) {
  return Error("space", "the ring's shared memory: got " + got + " in " + directory + ", wanted " + Bytes(bytes) +
                            ". Use fewer slots or actors, remove rings of dead processes with `python -m gear_jax "
                            "doctor --clean-shm`, or make it larger: `mount -o remount,size=... " +
                            directory + "`.");
}

}  // namespace

uint64_t OwnerOfThis() {
  const uint64_t owner = OwnerOf(0);
  if (owner == 0) {
    throw Error("foreign",
                "/proc/self/stat: got nothing, wanted this process. Mount /proc: leases are held by processes.");
  }
  return owner;
}

std::unique_ptr<Segment> Segment::Create(const std::string& directory, const std::string& name, uint64_t bytes) {
  std::unique_ptr<Segment> segment(new Segment);
  segment->path_ = directory + "/" + name;
  // Whose it is stands in the name, for doctor --clean-shm, until it can be read in the header.
  segment->unpublished_ = segment->path_ + ".new-" + std::to_string(OwnerOfThis());
  struct statvfs room;
  if (statvfs(directory.c_str(), &room) != 0) throw System(directory, errno);
  const uint64_t free_bytes = static_cast<uint64_t>(room.f_bavail) * room.f_frsize;
  // fallocate takes what there is before it finds that there is too little.
  if (free_bytes < bytes) throw NoRoom(directory, bytes, Bytes(free_bytes) + " free");
  do {
    unlink(segment->unpublished_.c_str());
    segment->Reopen(segment->unpublished_, O_CREAT | O_EXCL);
    if (segment->file_ < 0) {
      const int error = errno;
      segment->unpublished_.clear();
      throw System(segment->path_, error);
    }
  } while (!segment->Hold());
  const int error = posix_fallocate(segment->file_, 0, static_cast<off_t>(bytes));
  if (error != 0) throw NoRoom(directory, bytes, std::string("\"") + std::strerror(error) + "\"");
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, segment->file_, 0);
  if (data == MAP_FAILED) throw System(segment->path_, errno);
  segment->data_ = static_cast<uint8_t*>(data);
  segment->bytes_ = bytes;
  return segment;
}

std::unique_ptr<Segment> Segment::Open(const std::string& directory, const std::string& name, uint64_t least) {
  std::unique_ptr<Segment> segment(new Segment);
  segment->path_ = directory + "/" + name;
  do {
    segment->Reopen(segment->path_, O_NOFOLLOW);
    if (segment->file_ < 0) {
      if (errno != ENOENT) throw System(segment->path_, errno);
      throw Error("missing", "ring: got no file " + segment->path_ +
                                 ", wanted the ring of a learner. Start the learner first, or correct the name.");
    }
  } while (!segment->Hold());
  struct stat found;
  if (fstat(segment->file_, &found) != 0) throw System(segment->path_, errno);
  const uint64_t bytes = static_cast<uint64_t>(found.st_size);
  if (!S_ISREG(found.st_mode) || bytes < least) {
    throw Error("foreign", "ring " + segment->path_ + ": got " + Bytes(bytes) + ", wanted " + Bytes(least) +
                               " or more: it is cut short, or no ring. Remove it and start the learner anew.");
  }
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, segment->file_, 0);
  if (data == MAP_FAILED) throw System(segment->path_, errno);
  segment->data_ = static_cast<uint8_t*>(data);
  segment->bytes_ = bytes;
  return segment;
}

void Segment::Reopen(const std::string& path, int flags) {
  if (file_ >= 0) close(file_);
  file_ = open(path.c_str(), O_RDWR | O_CLOEXEC | flags, 0600);
}

bool Segment::Hold() const {
  // Who cleans up holds a file for a moment; somebody else's lock is not waited for.
  constexpr int kTries = 2000;
  for (int tried = 0; flock(file_, LOCK_SH | LOCK_NB) != 0; ++tried) {
    if (errno != EINTR && (errno != EWOULDBLOCK || tried >= kTries)) throw System(path_, errno);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  struct stat found;
  return fstat(file_, &found) == 0 && found.st_nlink > 0;
}

void Segment::Publish() {
  // Other than rename, link refuses a name that is taken.
  if (link(unpublished_.c_str(), path_.c_str()) != 0) {
    const int error = errno;
    if (error != EEXIST) throw System(path_, error);
    throw Error("exists", "ring: got the name of a file that is there, " + path_ +
                              ", wanted a new one. Take another name; or, if its owner is dead, go on with it or "
                              "remove it with `python -m gear_jax doctor --clean-shm`.");
  }
  unlink(unpublished_.c_str());
  unpublished_.clear();
}

bool Segment::Unlink() {
  struct stat named, mine;
  if (stat(path_.c_str(), &named) != 0 || fstat(file_, &mine) != 0) return false;
  if (named.st_ino != mine.st_ino || named.st_dev != mine.st_dev) return false;
  return unlink(path_.c_str()) == 0;
}

bool Segment::Whole() const {
  struct stat found;
  return fstat(file_, &found) == 0 && static_cast<uint64_t>(found.st_size) >= bytes_;
}

Segment::~Segment() {
  if (data_ != nullptr) munmap(data_, bytes_);
  if (!unpublished_.empty()) unlink(unpublished_.c_str());
  if (file_ >= 0) close(file_);
}

}  // namespace actors
}  // namespace gear_jax
