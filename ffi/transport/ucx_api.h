// libucp, opened at run time: nothing links against it.
#ifndef GEAR_JAX_FFI_TRANSPORT_UCX_API_H_
#define GEAR_JAX_FFI_TRANSPORT_UCX_API_H_

#include <ucp/api/ucp.h>

#include <string>

namespace gear_jax::transport {

#define GEAR_JAX_UCX_FUNCTIONS(X)   \
  X(ucp_get_version)                \
  X(ucp_config_read)                \
  X(ucp_config_modify)              \
  X(ucp_config_release)             \
  X(ucp_init_version)               \
  X(ucp_cleanup)                    \
  X(ucp_worker_create)              \
  X(ucp_worker_destroy)             \
  X(ucp_worker_get_address)         \
  X(ucp_worker_release_address)     \
  X(ucp_worker_get_efd)             \
  X(ucp_worker_arm)                 \
  X(ucp_worker_progress)            \
  X(ucp_ep_create)                  \
  X(ucp_ep_close_nbx)               \
  X(ucp_worker_set_am_recv_handler) \
  X(ucp_am_send_nbx)                \
  X(ucp_request_check_status)       \
  X(ucp_request_free)               \
  X(ucs_status_string)

struct UcxApi {
#define GEAR_JAX_UCX_POINTER(name) decltype(&::name) name = nullptr;
  GEAR_JAX_UCX_FUNCTIONS(GEAR_JAX_UCX_POINTER)
#undef GEAR_JAX_UCX_POINTER
  unsigned major = 0, minor = 0, release = 0;

  // The library that this process has loaded, else the system's. Null and an error if there is none, or one too old.
  static const UcxApi* Load(std::string* error);
};

}  // namespace gear_jax::transport

#endif  // GEAR_JAX_FFI_TRANSPORT_UCX_API_H_
