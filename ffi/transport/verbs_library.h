// libibverbs, opened at run time. Only sources that have <infiniband/verbs.h> include this.
#ifndef GEAR_JAX_FFI_TRANSPORT_VERBS_LIBRARY_H_
#define GEAR_JAX_FFI_TRANSPORT_VERBS_LIBRARY_H_

#include <infiniband/verbs.h>

#include <string>

namespace gear_jax::transport {

// The functions that the transport calls. What verbs.h defines inline (ibv_post_send, ibv_poll_cq, ibv_req_notify_cq)
// goes through the context's own table and needs no symbol.
struct VerbsLibrary {
  ibv_device** (*get_device_list)(int*);
  void (*free_device_list)(ibv_device**);
  const char* (*get_device_name)(ibv_device*);
  ibv_context* (*open_device)(ibv_device*);
  int (*close_device)(ibv_context*);
  int (*query_device)(ibv_context*, ibv_device_attr*);
  int (*query_port_compat)(ibv_context*, uint8_t, ibv_port_attr*);
  int (*query_gid_ex)(ibv_context*, uint32_t, uint32_t, ibv_gid_entry*, uint32_t, size_t);
  ibv_pd* (*alloc_pd)(ibv_context*);
  int (*dealloc_pd)(ibv_pd*);
  ibv_mr* (*reg_mr)(ibv_pd*, void*, size_t, int);
  int (*dereg_mr)(ibv_mr*);
  ibv_comp_channel* (*create_comp_channel)(ibv_context*);
  int (*destroy_comp_channel)(ibv_comp_channel*);
  ibv_cq* (*create_cq)(ibv_context*, int, void*, ibv_comp_channel*, int);
  int (*destroy_cq)(ibv_cq*);
  int (*get_cq_event)(ibv_comp_channel*, ibv_cq**, void**);
  void (*ack_cq_events)(ibv_cq*, unsigned int);
  ibv_qp* (*create_qp)(ibv_pd*, ibv_qp_init_attr*);
  int (*modify_qp)(ibv_qp*, ibv_qp_attr*, int);
  int (*destroy_qp)(ibv_qp*);
};

// The library, opened on the first call and never closed; null and `error` where it is missing or too old. Thread-safe.
const VerbsLibrary* OpenVerbsLibrary(std::string* error);

}  // namespace gear_jax::transport

#endif  // GEAR_JAX_FFI_TRANSPORT_VERBS_LIBRARY_H_
