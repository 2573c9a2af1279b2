// UCX as a transport: TCP, and what processes of one host share.
//
// UCX reads memory that it has not allocated in software, whatever lies below: two copies through shared memory or a
// socket, the second process taking part. Where the peer is on this host and lets itself be read (same_host.h), its
// memory is read directly instead; UCX_TLS rules that too (it counts as "cma").
//
// One worker exposes this process's memory and reads its peers'; the session's progress thread serves both, and sleeps
// on the worker's event file where nothing moves. UCX answers a get over TCP in software and checks neither keys nor
// bounds there: the reader checks the bounds, and addresses and keys are handed out over the job's own connections.
#ifndef GEAR_JAX_FFI_TRANSPORT_UCX_H_
#define GEAR_JAX_FFI_TRANSPORT_UCX_H_

#include <ucp/api/ucp.h>

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

 private:
  // What UCX holds for one peer. It outlives its Disconnect until all of its reads have ended.
  struct Connection {
    ucp_ep_h endpoint = nullptr;
    std::vector<ucp_rkey_h> keys;  // null where a region is empty
    std::vector<uint64_t> addresses;
    void* closing = nullptr;  // the request of its end
    uint32_t under_way = 0;   // in UCX
    bool same_host = false;
    HostProcess process{};
  };

  struct Read {
    UcxTransport* transport;
    Connection* connection;
    uint64_t cookie;
  };

  // A read by process_vm_readv, not done yet.
  struct Near {
    int32_t peer;
    VmRead read;
    uint64_t cookie;
  };

  explicit UcxTransport(const UcxApi* api) : api_(api) {}

  std::string Start(const Options& options);
  std::string Failed(const char* call, ucs_status_t status) const;
  static void ReadEnded(void* request, ucs_status_t status, void* user_data);
  static void EndpointFailed(void*, ucp_ep_h, ucs_status_t) {}  // its reads end with an error by themselves
  void End(Read* read, ucs_status_t status);
  void ReadNear();
  void Free(Connection* connection);
  void FreeEnded();

  const UcxApi* const api_;
  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  int worker_fd_ = -1;  // the worker's own
  int wake_fd_ = -1;
  bool reads_near_ = false;
  Mark mark_;
  std::vector<uint8_t> address_;  // sealed: HostProcess, then the worker's address
  std::vector<ucp_mem_h> exposed_;
  std::map<int32_t, std::unique_ptr<Connection>> connections_;
  std::vector<std::unique_ptr<Connection>> ending_;
  std::deque<Near> near_;
  std::deque<Read> reads_;  // a pool: they do not move
  std::vector<Read*> free_reads_;
  std::vector<Completion> ended_;
  size_t handed_out_ = 0;  // of ended_
};

}  // namespace gear_jax::transport

#endif  // GEAR_JAX_FFI_TRANSPORT_UCX_H_
