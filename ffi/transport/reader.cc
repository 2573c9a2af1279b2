#include "ffi/transport/reader.h"

#include <mutex>
#include <unordered_map>
#include <utility>

namespace gear_jax::transport {
namespace {

struct Readers {
  std::mutex mutex;
  std::unordered_map<int64_t, std::shared_ptr<Reader>> by_number;
};

Readers& Global() {
  static Readers* readers = new Readers;  // never destroyed: progress threads may outlive main
  return *readers;
}

}  // namespace

void AddReader(int64_t number, std::shared_ptr<Reader> reader) {
  Readers& readers = Global();
  std::shared_ptr<Reader> last = std::move(reader);  // destroyed outside the lock: a session's end waits
  const std::lock_guard<std::mutex> lock(readers.mutex);
  std::swap(readers.by_number[number], last);
}

void RemoveReader(int64_t number) {
  Readers& readers = Global();
  std::shared_ptr<Reader> last;
  const std::lock_guard<std::mutex> lock(readers.mutex);
  const auto found = readers.by_number.find(number);
  if (found == readers.by_number.end()) return;
  last = std::move(found->second);
  readers.by_number.erase(found);
}

std::shared_ptr<Reader> FindReader(int64_t number) {
  Readers& readers = Global();
  const std::lock_guard<std::mutex> lock(readers.mutex);
  const auto found = readers.by_number.find(number);
  return found == readers.by_number.end() ? nullptr : found->second;
}

}  // namespace gear_jax::transport
