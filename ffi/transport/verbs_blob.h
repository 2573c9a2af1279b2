// What the two sides of a verbs connection tell each other about themselves, as bytes. No verbs here.
//
// Little-endian: "GJVB", version u8, link u8, MTU u16, LID u16, reads u8, queue pairs u8, GID 16 bytes, then for each
// queue pair its number u32 and its first packet's u32, then the Checksum (sealed.h) of all that u64.
// gear_jax/transport/_verbs_blob.py reads and writes the same.
#ifndef GEAR_JAX_FFI_TRANSPORT_VERBS_BLOB_H_
#define GEAR_JAX_FFI_TRANSPORT_VERBS_BLOB_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace gear_jax::transport {

enum class Link : uint8_t { kInfiniBand = 1, kEthernet = 2 };

struct QueuePairEnd {
  uint32_t number = 0;  // 24 bits
  uint32_t psn = 0;     // packet sequence number that it starts with; 24 bits
};

struct VerbsEnd {
  Link link = Link::kEthernet;
  uint32_t mtu = 0;                  // bytes
  uint16_t lid = 0;                  // InfiniBand only
  std::array<uint8_t, 16> gid = {};  // all 0: none, addressed by its LID
  uint8_t reads = 0;                 // that one queue pair may have under way: the reader's wish, then the answer to it
  std::vector<QueuePairEnd> queue_pairs;

  bool has_gid() const { return gid != std::array<uint8_t, 16>{}; }
};

constexpr uint32_t kMaxQueuePairs = 64;

std::vector<uint8_t> EncodeVerbsEnd(const VerbsEnd& end);

// "" and `end`, or what is wrong with the bytes (what, got, wanted, fix). Never trusts them.
std::string DecodeVerbsEnd(const uint8_t* data, size_t bytes, VerbsEnd* end);

// Whether `bytes` is an MTU that verbs knows: 256, 512, 1024, 2048 or 4096.
bool IsMtu(uint32_t bytes);

// fe80::/10, which nobody beyond the link can reach, and on a loopback device not even itself.
bool IsLinkLocal(const uint8_t* gid);

// The key of a region as the exposing side gives it, 4 bytes; false where it has another size.
bool DecodeRemoteKey(const std::vector<uint8_t>& key, uint32_t* remote_key);

}  // namespace gear_jax::transport

#endif  // GEAR_JAX_FFI_TRANSPORT_VERBS_BLOB_H_
