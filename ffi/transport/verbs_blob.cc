#include "ffi/transport/verbs_blob.h"

#include <algorithm>
#include <cstring>

#include "ffi/transport/error_text.h"
#include "ffi/transport/sealed.h"

namespace gear_jax::transport {
namespace {

constexpr char kMagic[4] = {'G', 'J', 'V', 'B'};
constexpr uint8_t kVersion = 1;
constexpr size_t kHeaderBytes = 28;
constexpr size_t kQueuePairBytes = 8;
constexpr size_t kChecksumBytes = 8;
constexpr uint32_t kMax24 = (1u << 24) - 1;
constexpr uint32_t kLastUnicastLid = 0xBFFF;

void Put(std::vector<uint8_t>* to, uint32_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) to->push_back(static_cast<uint8_t>(value >> (8 * i)));
}

uint32_t Get(const uint8_t* from, int bytes) {
  uint32_t value = 0;
  for (int i = 0; i < bytes; ++i) value |= static_cast<uint32_t>(from[i]) << (8 * i);
  return value;
}

template <typename Got>
std::string Bad(const std::string& what, const Got& got, const std::string& wanted) {
  return ErrorText("verbs connection: " + what, got, wanted,
                   "The peer must run the same version of gear_jax and belong to this job.");
}

std::string CheckAddress(const VerbsEnd& end) {
  if (end.link == Link::kEthernet) {
    if (!end.has_gid()) return Bad("GID", "none", "one, as the link is Ethernet");
    if (end.lid != 0) return Bad("LID", end.lid, "0, as the link is Ethernet");
  } else if (end.lid < 1 || end.lid > kLastUnicastLid) {
    return Bad("LID", end.lid, "1 ... 49151, as the link is InfiniBand");
  }
  if (end.gid[0] == 0xff) return Bad("GID", "a multicast group's", "one port's");
  return "";
}

}  // namespace

bool IsMtu(uint32_t bytes) { return bytes >= 256 && bytes <= 4096 && (bytes & (bytes - 1)) == 0; }

bool IsLinkLocal(const uint8_t* gid) { return gid[0] == 0xfe && (gid[1] & 0xc0) == 0x80; }

bool DecodeRemoteKey(const std::vector<uint8_t>& key, uint32_t* remote_key) {
  if (key.size() != 4) return false;
  *remote_key = Get(key.data(), 4);
  return true;
}

std::vector<uint8_t> EncodeVerbsEnd(const VerbsEnd& end) {
  std::vector<uint8_t> to(kMagic, kMagic + sizeof(kMagic));
  Put(&to, kVersion, 1);
  Put(&to, static_cast<uint8_t>(end.link), 1);
  Put(&to, end.mtu, 2);
  Put(&to, end.lid, 2);
  Put(&to, end.reads, 1);
  Put(&to, static_cast<uint32_t>(end.queue_pairs.size()), 1);
  to.insert(to.end(), end.gid.begin(), end.gid.end());
  for (const QueuePairEnd& pair : end.queue_pairs) {
    Put(&to, pair.number, 4);
    Put(&to, pair.psn, 4);
  }
  const uint64_t check = Checksum(to.data(), to.size());
  Put(&to, static_cast<uint32_t>(check), 4);
  Put(&to, static_cast<uint32_t>(check >> 32), 4);
  return to;
}

std::string DecodeVerbsEnd(const uint8_t* data, size_t bytes, VerbsEnd* end) {
  constexpr size_t kLeast = kHeaderBytes + kChecksumBytes;
  if (data == nullptr || bytes < kLeast) return Bad("bytes of the blob", bytes, std::to_string(kLeast) + " or more");
  if (std::memcmp(data, kMagic, sizeof(kMagic)) != 0) return Bad("first 4 bytes", "others", "GJVB");
  if (data[4] != kVersion) return Bad("version", int{data[4]}, std::to_string(kVersion));
  if (data[5] != 1 && data[5] != 2) return Bad("link", int{data[5]}, "1 (InfiniBand) or 2 (Ethernet)");
  VerbsEnd read;
  read.link = static_cast<Link>(data[5]);
  read.mtu = Get(data + 6, 2);
  if (!IsMtu(read.mtu)) return Bad("MTU", read.mtu, "256, 512, 1024, 2048 or 4096");
  read.lid = static_cast<uint16_t>(Get(data + 8, 2));
  read.reads = data[10];
  if (read.reads == 0) return Bad("reads of a queue pair", 0, "1 or more");
  const uint32_t count = data[11];
  if (count == 0 || count > kMaxQueuePairs) {
    return Bad("queue pairs", count, "1 ... " + std::to_string(kMaxQueuePairs));
  }
  const size_t wanted = kHeaderBytes + count * kQueuePairBytes + kChecksumBytes;
  if (bytes != wanted) return Bad("bytes of the blob", bytes, std::to_string(wanted));
  const uint8_t* const check = data + wanted - kChecksumBytes;
  if ((uint64_t{Get(check + 4, 4)} << 32 | Get(check, 4)) != Checksum(data, wanted - kChecksumBytes)) {
    return Bad("checksum", "another", "that of the bytes before it");
  }
  std::copy(data + 12, data + 28, read.gid.begin());
  if (std::string error = CheckAddress(read); !error.empty()) return error;
  std::vector<uint32_t> numbers;
  for (uint32_t i = 0; i < count; ++i) {
    const uint8_t* at = data + kHeaderBytes + i * kQueuePairBytes;
    const QueuePairEnd pair = {Get(at, 4), Get(at + 4, 4)};
    // 0 and 1 are the fabric's own.
    if (pair.number < 2 || pair.number > kMax24) return Bad("queue pair number", pair.number, "2 ... 2^24 - 1");
    if (pair.psn > kMax24) return Bad("packet sequence number", pair.psn, "0 ... 2^24 - 1");
    numbers.push_back(pair.number);
    read.queue_pairs.push_back(pair);
  }
  std::sort(numbers.begin(), numbers.end());
  if (std::adjacent_find(numbers.begin(), numbers.end()) != numbers.end()) {
    return Bad("queue pair numbers", "one of them twice", "different ones");
  }
  *end = std::move(read);
  return "";
}

}  // namespace gear_jax::transport
