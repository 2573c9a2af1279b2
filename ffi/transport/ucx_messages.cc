#include <algorithm>
#include <cstring>
#include <utility>

#include "ffi/transport/ucx.h"

namespace gear_jax::transport {
namespace {

constexpr uint64_t kSmallBytes = 1 << 16;  // of the pieces that are asked for together
constexpr size_t kPiecesInRequest = 64;
static_assert(kPiecesInRequest <= kMaxVmReads);
constexpr size_t kSpare = 64;  // buffers of answers that are kept: new memory costs as much as the copy

// A request: this, then its pieces. Both ends are of one byte order, as UCX's own addresses are.
struct RequestHead {
  std::array<uint8_t, 16> key;
  uint64_t request;
  uint32_t count;
  uint32_t zero;
};

struct RequestPiece {
  uint32_t region, bytes;
  uint64_t offset;
};

}  // namespace

ucs_status_t UcxTransport::OnRequest(void* transport, const void*, size_t, void* data, size_t length,
                                     const ucp_am_recv_param_t* param) {
  if ((param->recv_attr & UCP_AM_RECV_ATTR_FIELD_REPLY_EP) && !(param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV)) {
    static_cast<UcxTransport*>(transport)->Answer(param->reply_ep, static_cast<const uint8_t*>(data), length);
  }
  return UCS_OK;
}

// Nothing in a request is trusted: anybody who reaches this worker may send one.
void UcxTransport::Answer(ucp_ep_h endpoint, const uint8_t* data, size_t length) {
  RequestHead head;
  if (length < sizeof(head)) return;
  std::memcpy(&head, data, sizeof(head));
  uint8_t differs = 0;
  for (size_t i = 0; i < key_.size(); ++i) differs |= static_cast<uint8_t>(head.key[i] ^ key_[i]);
  const bool whole =
      head.count > 0 && head.count <= kPiecesInRequest && length == sizeof(head) + head.count * sizeof(RequestPiece);
  bool refused = differs != 0 || !whole;
  RequestPiece pieces[kPiecesInRequest];
  uint64_t bytes = 0;
  if (!refused) std::memcpy(pieces, data + sizeof(head), head.count * sizeof(RequestPiece));
  for (uint32_t i = 0; i < head.count && !refused; ++i) {
    const RequestPiece& piece = pieces[i];
    refused = piece.region >= exposed_.size() || piece.offset > exposed_[piece.region].bytes ||
              piece.bytes > exposed_[piece.region].bytes - piece.offset;
    bytes += piece.bytes;
  }
  refused = refused || bytes > kMaxRead;
  auto message = std::make_unique<Message>();
  message->transport = this;
  if (!refused) {
    // The memory may be gone by now. The kernel then says so, where a memcpy, or UCX, would end the process.
    if (!spare_.empty()) {
      message->data = std::move(spare_.back());
      spare_.pop_back();
    }
    if (message->data.size() < bytes) message->data.resize(bytes);
    VmRead reads[kPiecesInRequest];
    uint64_t at = 0;
    for (uint32_t i = 0; i < head.count; ++i) {
      const auto from = reinterpret_cast<uintptr_t>(exposed_[pieces[i].region].data) + pieces[i].offset;
      reads[i] = {from, message->data.data() + at, pieces[i].bytes};
      at += pieces[i].bytes;
    }
    refused = !ReadOwn(reads, head.count);
  }
  message->header = {head.request, refused ? uint64_t{1} : uint64_t{0}};
  const uint8_t* const from = message->data.data();
  Send(endpoint, kAnswer, 0, from, refused ? 0 : bytes, std::move(message));
}

void UcxTransport::Send(ucp_ep_h endpoint, unsigned id, uint32_t flags, const void* data, size_t bytes,
                        std::unique_ptr<Message> message) {
  ucp_request_param_t params{};
  params.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS |
                        UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  params.flags = UCP_AM_SEND_FLAG_EAGER | flags;
  params.cb.send = &UcxTransport::Sent;
  params.user_data = message.get();
  params.memory_type = UCS_MEMORY_TYPE_HOST;
  const bool answer = id == kAnswer;
  const ucs_status_ptr_t request = api_->ucp_am_send_nbx(endpoint, id, answer ? message->header.data() : nullptr,
                                                         answer ? sizeof(message->header) : 0, data, bytes, &params);
  if (UCS_PTR_IS_PTR(request)) {
    message.release();  // Sent frees it
    return;
  }
  if (UCS_PTR_IS_ERR(request)) EndRequest(message->request, Status::kLost);
  Recycle(*message);
}

void UcxTransport::Recycle(Message& message) {
  const bool answer = message.request == 0 && !message.data.empty();
  if (answer && spare_.size() < kSpare) spare_.push_back(std::move(message.data));
}

void UcxTransport::Sent(void* request, ucs_status_t status, void* data) {
  const std::unique_ptr<Message> message(static_cast<Message*>(data));
  message->transport->api_->ucp_request_free(request);
  if (status != UCS_OK) message->transport->EndRequest(message->request, Status::kLost);
  message->transport->Recycle(*message);
}

// Asks for all that is posted: small pieces together, for a message costs more than their bytes.
void UcxTransport::Ask(int32_t peer, Connection* connection) {
  std::vector<Piece> posted;
  posted.swap(connection->posted);
  posted_ -= posted.size();
  for (size_t first = 0, last; first < posted.size(); first = last) {
    uint64_t bytes = posted[first].bytes;
    for (last = first + 1; last < posted.size() && last - first < kPiecesInRequest; ++last) {
      bytes += posted[last].bytes;
      if (bytes > kSmallBytes) break;
    }
    auto message = std::make_unique<Message>();
    message->transport = this;
    message->request = ++last_request_;
    const RequestHead head{connection->key, message->request, static_cast<uint32_t>(last - first), 0};
    message->data.resize(sizeof(head) + (last - first) * sizeof(RequestPiece));
    std::memcpy(message->data.data(), &head, sizeof(head));
    for (size_t i = first; i < last; ++i) {
      const RequestPiece piece{posted[i].region, posted[i].bytes, posted[i].offset};
      std::memcpy(message->data.data() + sizeof(head) + (i - first) * sizeof(piece), &piece, sizeof(piece));
    }
    asked_[message->request] = {
        peer,
        {posted.begin() + static_cast<std::ptrdiff_t>(first), posted.begin() + static_cast<std::ptrdiff_t>(last)}};
    const uint8_t* const data = message->data.data();
    const size_t size = message->data.size();
    Send(connection->endpoint, kRequest, UCP_AM_SEND_FLAG_REPLY, data, size, std::move(message));
  }
}

ucs_status_t UcxTransport::OnAnswer(void* arg, const void* header, size_t header_length, void* data, size_t length,
                                    const ucp_am_recv_param_t* param) {
  auto* const transport = static_cast<UcxTransport*>(arg);
  std::array<uint64_t, 2> head;
  if (header_length != sizeof(head) || (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV)) return UCS_OK;
  std::memcpy(&head, header, sizeof(head));
  const auto asked = transport->asked_.find(head[0]);
  if (asked == transport->asked_.end()) return UCS_OK;  // too late
  uint64_t bytes = 0;
  for (const Piece& piece : asked->second.pieces) bytes += piece.bytes;
  if (head[1] == 0 && length == bytes) {
    const auto* from = static_cast<const uint8_t*>(data);
    for (const Piece& piece : asked->second.pieces) {
      std::memcpy(piece.to, from, piece.bytes);
      from += piece.bytes;
    }
    transport->EndRequest(head[0], Status::kOk);
  } else {
    transport->EndRequest(head[0], Status::kRefused);
  }
  return UCS_OK;
}

void UcxTransport::EndRequest(uint64_t request, Status status) {
  const auto asked = asked_.find(request);
  if (asked == asked_.end()) return;
  for (const Piece& piece : asked->second.pieces) ended_.push_back({piece.cookie, status});
  asked_.erase(asked);
}

}  // namespace gear_jax::transport
