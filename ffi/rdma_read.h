// rdma_read: whole small regions of all processes of a job. The core, without XLA.
#ifndef GEAR_JAX_FFI_RDMA_READ_H_
#define GEAR_JAX_FFI_RDMA_READ_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ffi/rdma_fetch.h"
#include "ffi/transport/reader.h"

namespace gear_jax {

// Field i of shard d is region shards[d].region + i, of `bytes` bytes, and goes to out + d * bytes. Where a shard
// cannot be read all its fields are zero and here[d] is false.
struct RegionsCall {
  struct Field {
    uint8_t* out;
    int64_t bytes;
  };
  std::vector<Field> fields;
  std::vector<RdmaShard> shards;
  bool* here = nullptr;  // [shards]
};

// "" or what regions do not fit the call.
std::string CheckRegions(const RegionsCall& call, const transport::Reader& reader);

class ReadRegions : public std::enable_shared_from_this<ReadRegions> {
 public:
  ReadRegions(RegionsCall call, std::shared_ptr<transport::Reader> reader);

  // Copies this process's own regions at once and asks for the others. `ended` runs once, when all is there or lost,
  // here or on the reader's thread; it must not block. Returns whether something travels.
  bool Start(std::function<void()> ended);

  const std::vector<int32_t>& lost_peers() const { return lost_peers_; }
  bool closed() const { return closed_; }

 private:
  RegionsCall call_;
  std::shared_ptr<transport::Reader> reader_;
  std::vector<int32_t> lost_peers_;
  bool closed_ = false;
};

// Where the fields of an operand must lie: the error's text if `data` is no region of this process's own shards, as
// field `field` of one of them; "" if it is one.
std::string CheckOwnRegion(const transport::Reader& reader, const std::vector<RdmaShard>& shards, int32_t field,
                           const void* data);

}  // namespace gear_jax

#endif  // GEAR_JAX_FFI_RDMA_READ_H_
