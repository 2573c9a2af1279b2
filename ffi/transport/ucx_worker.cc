#include "ffi/transport/ucx_worker.h"

#include <algorithm>

namespace gear_jax::transport {
namespace {

constexpr size_t kSlack = 4096;  // zeros behind what UCX unpacks without being told its size

}  // namespace

std::string UcxFailed(const UcxApi& api, const char* call, ucs_status_t status) {
  return std::string(call) + ": got \"" + api.ucs_status_string(status) +
         "\", wanted success. Look at UCX_TLS and UCX_NET_DEVICES, and run with UCX_LOG_LEVEL=diag to see why.";
}

std::unique_ptr<UcxWorker> UcxWorker::Make(const UcxApi* api, ucp_context_h context, unsigned message,
                                           ucp_am_recv_callback_t handler, void* arg, std::string* error) {
  std::unique_ptr<UcxWorker> made(new UcxWorker(api));
  const auto failed = [&](const char* call, ucs_status_t status) {
    *error = UcxFailed(*api, call, status);
    return nullptr;
  };
  ucp_worker_params_t params{};
  params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  params.thread_mode = UCS_THREAD_MODE_SERIALIZED;  // some are made before the progress thread uses them
  ucs_status_t status = api->ucp_worker_create(context, &params, &made->worker_);
  if (status != UCS_OK) return failed("ucp_worker_create", status);
  status = api->ucp_worker_get_efd(made->worker_, &made->fd_);
  if (status != UCS_OK) return failed("ucp_worker_get_efd", status);
  ucp_am_handler_param_t param{};
  param.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
  param.id = message;
  param.cb = handler;
  param.arg = arg;
  status = api->ucp_worker_set_am_recv_handler(made->worker_, &param);
  if (status != UCS_OK) return failed("ucp_worker_set_am_recv_handler", status);
  return made;
}

UcxWorker::~UcxWorker() {
  if (worker_ != nullptr) api_->ucp_worker_destroy(worker_);
}

std::string UcxWorker::Address(std::vector<uint8_t>* address) const {
  ucp_address_t* packed;
  size_t bytes;
  const ucs_status_t status = api_->ucp_worker_get_address(worker_, &packed, &bytes);
  if (status != UCS_OK) return UcxFailed(*api_, "ucp_worker_get_address", status);
  const auto* const from = reinterpret_cast<const uint8_t*>(packed);
  address->assign(from, from + bytes);
  api_->ucp_worker_release_address(worker_, packed);
  return "";
}

std::string UcxWorker::Connect(const std::vector<uint8_t>& address, ucp_err_handler_cb_t failed,
                               ucp_ep_h* endpoint) const {
  std::vector<uint8_t> packed(address);
  packed.resize(packed.size() + kSlack);
  ucp_ep_params_t params{};
  params.field_mask =
      UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<const ucp_address_t*>(packed.data());
  // With it, reads of a dead peer end, and answers that come after a read has ended are dropped.
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler = {failed, nullptr};
  const ucs_status_t status = api_->ucp_ep_create(worker_, &params, endpoint);
  return status == UCS_OK ? "" : UcxFailed(*api_, "ucp_ep_create", status);
}

void UcxWorker::Close(ucp_ep_h endpoint) {
  ucp_request_param_t params{};
  params.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  params.flags = UCP_EP_CLOSE_FLAG_FORCE;
  const ucs_status_ptr_t closing = api_->ucp_ep_close_nbx(endpoint, &params);
  if (UCS_PTR_IS_PTR(closing)) closing_.push_back(closing);
}

bool UcxWorker::Progress() {
  const bool any = api_->ucp_worker_progress(worker_) != 0;
  const auto ended = [&](void* request) {
    if (api_->ucp_request_check_status(request) == UCS_INPROGRESS) return false;
    api_->ucp_request_free(request);
    return true;
  };
  if (!closing_.empty()) closing_.erase(std::remove_if(closing_.begin(), closing_.end(), ended), closing_.end());
  return any;
}

bool UcxWorker::Arm() const { return api_->ucp_worker_arm(worker_) == UCS_OK; }

}  // namespace gear_jax::transport
