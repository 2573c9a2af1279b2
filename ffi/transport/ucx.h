// UCX as a transport: TCP, and what processes of one host share.
//
// Reads travel as active messages: a request names pieces of a region, the exposing side's progress thread checks its
// key and bounds and answers with the bytes. The kernel copies them, for a memcpy of memory that its owner has let go
// would end the process; such reads are refused. UCX's own gets are of no use here: over TCP they are the same in
// software, but check nothing, let the other side write too, and abort the exposing process where a reader dies at the
// wrong moment. An answer that comes too late finds no request and is dropped, so that nothing writes after a read has
// ended.
//
// Where the peer is on this host and lets itself be read (same_host.h), its memory is read directly instead; UCX_TLS
// rules that too (it counts as "cma").
#ifndef GEAR_JAX_FFI_TRANSPORT_UCX_H_
#define GEAR_JAX_FFI_TRANSPORT_UCX_H_

#include <ucp/api/ucp.h>

#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "ffi/transport/same_host.h"
#include "ffi/transport/transports.h"
#include "ffi/transport/ucx_api.h"
#include "ffi/transport/ucx_worker.h"

namespace gear_jax::transport {

class UcxTransport final : public ExposingTransport {
 public:
  // Null and an error where UCX does not start.
  static std::unique_ptr<UcxTransport> Make(const Options& options, std::string* error);
  ~UcxTransport() override;

  std::string_view name() const override { return "ucx"; }
  Capabilities capabilities() const override;

  std::vector<uint8_t> Offer(int32_t peer, std::string* error) override;
  std::string Connect(int32_t peer, const uint8_t* blob, size_t bytes, std::vector<RemoteRegion> regions) override;
  void Disconnect(int32_t peer) override;
  bool Post(int32_t peer, int32_t region, uint64_t offset, uint32_t bytes, void* to, uint64_t cookie) override;
  size_t Poll(Completion* completions, size_t max) override;
  void Wait(double seconds) override;
  void Wake() override;

  std::string Expose(const std::vector<OwnMemory>& memory, std::vector<RemoteRegion>* regions) override;
  std::vector<uint8_t> Accept(int32_t peer, const uint8_t* offer, size_t bytes, std::string* error) override;
  std::string Way(int32_t peer) const override;
  std::shared_ptr<const NearMemory> Near(int32_t peer) const override;

 private:
  static constexpr uint64_t kMaxRead = 1 << 18;         // bytes of one answer
  static constexpr unsigned kRequest = 1, kAnswer = 2;  // active messages
  using Key = std::array<uint8_t, 16>;

  struct Piece {
    uint32_t region, bytes;
    uint64_t offset;
    void* to;
    uint64_t cookie;
  };

  // What UCX holds for one peer.
  struct Connection {
    UcxWorker* worker = nullptr;  // reader_, or
    std::unique_ptr<UcxWorker> own;
    ucp_ep_h endpoint = nullptr;
    Key key{};
    std::vector<Piece> posted;               // not asked for yet
    std::shared_ptr<const NearMemory> near;  // null: it is read by messages
  };

  // A request that waits for its answer.
  struct Asked {
    int32_t peer;
    std::vector<Piece> pieces;
  };

  // What a message is sent from, until UCX has done so.
  struct Message {
    UcxTransport* transport;
    uint64_t request = 0;  // of this reader, ended if it cannot be sent; 0: an answer
    std::array<uint64_t, 2> header;
    std::vector<uint8_t> data;
  };

  // A read by process_vm_readv, not done yet.
  struct NearRead {
    int32_t peer;
    VmRead read;
    uint64_t cookie;
  };

  explicit UcxTransport(const UcxApi* api) : api_(api) {}

  std::string Start(const Options& options);
  std::unique_ptr<UcxWorker> MakeReader(std::string* error);
  static void EndpointFailed(void*, ucp_ep_h, ucs_status_t) {}  // its requests end with an error by themselves
  static void Sent(void* request, ucs_status_t status, void* message);
  static ucs_status_t OnRequest(void* transport, const void* header, size_t header_length, void* data, size_t length,
                                const ucp_am_recv_param_t* param);
  static ucs_status_t OnAnswer(void* transport, const void* header, size_t header_length, void* data, size_t length,
                               const ucp_am_recv_param_t* param);
  void Send(ucp_ep_h endpoint, unsigned id, uint32_t flags, const void* data, size_t bytes,
            std::unique_ptr<Message> message);
  void Ask(int32_t peer, Connection* connection);
  void Answer(ucp_ep_h endpoint, const uint8_t* data, size_t length);
  void Recycle(Message& message);
  void EndRequest(uint64_t request, Status status);
  void ReadNear();
  bool Progress();

  const UcxApi* const api_;
  ucp_context_h context_ = nullptr;
  // Requests and answers have workers of their own: UCX takes two endpoints between the same workers for the two ends
  // of one connection, and where this process gave up reading a peer, the peer's reads would end without a word.
  std::unique_ptr<UcxWorker> exposer_, reader_;
  std::map<int32_t, std::vector<uint8_t>> known_;  // peers that reader_ was connected to, by the address they had
  std::vector<std::unique_ptr<UcxWorker>> ended_workers_;  // their last endpoint is closing
  int wake_fd_ = -1;
  bool reads_near_ = false;
  Mark mark_;
  std::vector<uint8_t> address_;  // sealed: HostProcess, then the worker's address
  Key key_{};
  std::vector<OwnMemory> exposed_;
  std::map<int32_t, std::unique_ptr<Connection>> connections_;
  std::map<uint64_t, Asked> asked_;
  std::vector<std::vector<uint8_t>> spare_;  // what answers were sent from
  uint64_t last_request_ = 0;
  size_t posted_ = 0;  // pieces of all connections that are not asked for yet
  std::deque<NearRead> near_;
  std::vector<Completion> ended_;
  size_t handed_out_ = 0;  // of ended_
};

}  // namespace gear_jax::transport

#endif  // GEAR_JAX_FFI_TRANSPORT_UCX_H_
