// Bytes in an envelope that shows whether they arrived as they were sent: libraries that trust their own blobs get no
// others. It is no protection from someone who makes the envelope; that is what the job's secret is for.
#ifndef GEAR_JAX_FFI_TRANSPORT_SEALED_H_
#define GEAR_JAX_FFI_TRANSPORT_SEALED_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace gear_jax::transport {

inline uint64_t Checksum(const uint8_t* data, size_t bytes) {  // FNV-1a
  uint64_t hash = 14695981039346656037u;
  for (size_t i = 0; i < bytes; ++i) hash = (hash ^ data[i]) * 1099511628211u;
  return hash;
}

// `kind` is four letters and what else both sides must agree on, such as a version.
inline std::vector<uint8_t> Seal(uint64_t kind, const void* data, size_t bytes) {
  std::vector<uint8_t> blob;
  const auto add = [&](const void* from, size_t count) {
    const auto* first = static_cast<const uint8_t*>(from);
    for (size_t i = 0; i < count; ++i) blob.push_back(first[i]);
  };
  const uint64_t size = bytes;
  add(&kind, 8);
  add(&size, 8);
  add(data, bytes);
  const uint64_t check = Checksum(blob.data(), blob.size());
  add(&check, 8);
  return blob;
}

// Whether these bytes are a whole blob of this kind; then what was sealed lies at +16, `bytes` - 24 bytes.
inline bool Unseal(uint64_t kind, const uint8_t* blob, size_t bytes) {
  if (bytes < 24) return false;
  uint64_t is, size, check;
  std::memcpy(&is, blob, 8);
  std::memcpy(&size, blob + 8, 8);
  std::memcpy(&check, blob + bytes - 8, 8);
  return is == kind && size == bytes - 24 && check == Checksum(blob, bytes - 8);
}

}  // namespace gear_jax::transport

#endif  // GEAR_JAX_FFI_TRANSPORT_SEALED_H_
