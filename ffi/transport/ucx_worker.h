// A worker of UCX: what its endpoints share. The sockets of an endpoint that is closed while its peer runs on go with
// the worker alone: over TCP UCX keeps them until the peer closes its end too, and nobody tells it to.
#ifndef GEAR_JAX_FFI_TRANSPORT_UCX_WORKER_H_
#define GEAR_JAX_FFI_TRANSPORT_UCX_WORKER_H_

#include <ucp/api/ucp.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ffi/transport/ucx_api.h"

namespace gear_jax::transport {

// "<call>: got ..., wanted success. ..."
std::string UcxFailed(const UcxApi& api, const char* call, ucs_status_t status);

// Used by one thread at a time.
class UcxWorker {
 public:
  // Takes active messages of one kind. Null and an error where UCX refuses.
  static std::unique_ptr<UcxWorker> Make(const UcxApi* api, ucp_context_h context, unsigned message,
                                         ucp_am_recv_callback_t handler, void* arg, std::string* error);
  // After its endpoints have ended, unless they do not.
  ~UcxWorker();

  // Its address, by which others make endpoints to it; "" or the error.
  std::string Address(std::vector<uint8_t>* address) const;

  // "" or the error. With error handling, `failed` is called when the peer has gone.
  std::string Connect(const std::vector<uint8_t>& address, ucp_err_handler_cb_t failed, ucp_ep_h* endpoint) const;

  // Ends an endpoint at once, without a word to its peer; what it was sending ends with an error in later Progress.
  void Close(ucp_ep_h endpoint);
  // Whether an endpoint has yet to end.
  bool closing() const { return !closing_.empty(); }

  // Returns whether anything has happened.
  bool Progress();
  // Whether `fd` will tell of what happens; false: there is something to progress.
  bool Arm() const;
  int fd() const { return fd_; }

 private:
  explicit UcxWorker(const UcxApi* api) : api_(api) {}

  const UcxApi* const api_;
  ucp_worker_h worker_ = nullptr;
  int fd_ = -1;                 // the worker's own
  std::vector<void*> closing_;  // the requests of ends of endpoints
};

}  // namespace gear_jax::transport

#endif  // GEAR_JAX_FFI_TRANSPORT_UCX_WORKER_H_
