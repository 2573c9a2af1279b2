#include "ffi/rdma_read.h"

#include <algorithm>
#include <cstring>
#include <sstream>
#include <utility>

namespace gear_jax {

using transport::Piece;
using transport::Reader;
using transport::Status;

ReadRegions::ReadRegions(RegionsCall call, std::shared_ptr<Reader> reader)
    : call_(std::move(call)), reader_(std::move(reader)) {}

std::string CheckRegions(const RegionsCall& call, const Reader& reader) {
  for (const RdmaShard& shard : call.shards) {
    for (size_t i = 0; i < call.fields.size(); ++i) {
      const auto wanted = static_cast<uint64_t>(call.fields[i].bytes);
      const std::string fault = CheckRegion(reader, shard.peer, shard.region + static_cast<int32_t>(i), wanted);
      if (!fault.empty()) return fault;
    }
  }
  return "";
}

bool ReadRegions::Start(std::function<void()> ended) {
  std::vector<Piece> pieces;
  std::vector<size_t> of;  // shard of each piece
  for (size_t d = 0; d < call_.shards.size(); ++d) {
    const RdmaShard& shard = call_.shards[d];
    call_.here[d] = true;
    for (size_t i = 0; i < call_.fields.size(); ++i) {
      const RegionsCall::Field& field = call_.fields[i];
      const int32_t region = shard.region + static_cast<int32_t>(i);
      if (field.bytes == 0) continue;
      uint8_t* to = field.out + static_cast<int64_t>(d) * field.bytes;
      if (shard.peer == reader_->self()) {
        std::memcpy(to, reader_->OwnRegion(region), field.bytes);
      } else {
        pieces.push_back({shard.peer, region, 0, static_cast<uint64_t>(field.bytes), to});
        of.push_back(d);
      }
    }
  }
  if (pieces.empty()) {
    ended();
    return false;
  }
  reader_->Read(std::move(pieces), [self = shared_from_this(), of = std::move(of),
                                    ended = std::move(ended)](const std::vector<Status>& status) {
    for (size_t i = 0; i < status.size(); ++i) {
      if (status[i] == Status::kOk) continue;
      self->closed_ = self->closed_ || status[i] == Status::kClosed;
      if (!self->call_.here[of[i]]) continue;
      self->call_.here[of[i]] = false;
      const int32_t peer = self->call_.shards[of[i]].peer;
      auto& lost = self->lost_peers_;
      if (std::find(lost.begin(), lost.end(), peer) == lost.end()) lost.push_back(peer);
      for (const RegionsCall::Field& field : self->call_.fields) {
        if (field.bytes > 0) std::memset(field.out + static_cast<int64_t>(of[i]) * field.bytes, 0, field.bytes);
      }
    }
    ended();
  });
  return true;
}

std::string CheckOwnRegion(const Reader& reader, const std::vector<RdmaShard>& shards, int32_t field,
                           const void* data) {
  for (const RdmaShard& shard : shards) {
    if (shard.peer == reader.self() && reader.OwnRegion(shard.region + field) == data) return "";
  }
  std::ostringstream text;
  text << "operand " << field << ": got an array at " << data
       << ", wanted the memory that the session exposes. Call replay.connect(state), which exposes the state's arrays "
          "again; and donate the state, so that they stay where they are.";
  return text.str();
}

}  // namespace gear_jax
