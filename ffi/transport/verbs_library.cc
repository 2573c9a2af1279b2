#if __has_include(<infiniband/verbs.h>)

#include "ffi/transport/verbs_library.h"

#include <dlfcn.h>

#include "ffi/transport/error_text.h"

namespace gear_jax::transport {
namespace {

constexpr char kName[] = "libibverbs.so.1";

struct Opened {
  VerbsLibrary library = {};
  std::string error;
};

template <typename Function>
void Find(void* handle, const char* name, const char* version, Function** function, std::string* error) {
  // The plain name may give an older ABI: libibverbs keeps the one of 2006 beside today's.
  *function = reinterpret_cast<Function*>(dlvsym(handle, name, version));
  if (*function == nullptr && error->empty()) {
    *error = ErrorText(kName, "one without " + std::string(name) + "@" + version, "rdma-core 28 or newer",
                       "Debian, Ubuntu: apt-get install libibverbs1 ibverbs-providers.");
  }
}

Opened Open() {
  Opened opened;
  void* handle = dlopen(kName, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* why = dlerror();
    opened.error = ErrorText(kName, why == nullptr ? "nothing" : why, "a library that loads",
                             "Debian, Ubuntu: apt-get install libibverbs1 ibverbs-providers.");
    return opened;
  }
  VerbsLibrary& l = opened.library;
  std::string* error = &opened.error;
  Find(handle, "ibv_get_device_list", "IBVERBS_1.1", &l.get_device_list, error);
  Find(handle, "ibv_free_device_list", "IBVERBS_1.1", &l.free_device_list, error);
  Find(handle, "ibv_get_device_name", "IBVERBS_1.1", &l.get_device_name, error);
  Find(handle, "ibv_open_device", "IBVERBS_1.1", &l.open_device, error);
  Find(handle, "ibv_close_device", "IBVERBS_1.1", &l.close_device, error);
  Find(handle, "ibv_query_device", "IBVERBS_1.1", &l.query_device, error);
  Find(handle, "ibv_query_port", "IBVERBS_1.1", &l.query_port_compat, error);
  Find(handle, "_ibv_query_gid_ex", "IBVERBS_1.11", &l.query_gid_ex, error);
  Find(handle, "ibv_alloc_pd", "IBVERBS_1.1", &l.alloc_pd, error);
  Find(handle, "ibv_dealloc_pd", "IBVERBS_1.1", &l.dealloc_pd, error);
  Find(handle, "ibv_reg_mr", "IBVERBS_1.1", &l.reg_mr, error);
  Find(handle, "ibv_dereg_mr", "IBVERBS_1.1", &l.dereg_mr, error);
  Find(handle, "ibv_create_comp_channel", "IBVERBS_1.0", &l.create_comp_channel, error);
  Find(handle, "ibv_destroy_comp_channel", "IBVERBS_1.0", &l.destroy_comp_channel, error);
  Find(handle, "ibv_create_cq", "IBVERBS_1.1", &l.create_cq, error);
  Find(handle, "ibv_destroy_cq", "IBVERBS_1.1", &l.destroy_cq, error);
  Find(handle, "ibv_get_cq_event", "IBVERBS_1.1", &l.get_cq_event, error);
  Find(handle, "ibv_ack_cq_events", "IBVERBS_1.1", &l.ack_cq_events, error);
  Find(handle, "ibv_create_qp", "IBVERBS_1.1", &l.create_qp, error);
  Find(handle, "ibv_modify_qp", "IBVERBS_1.1", &l.modify_qp, error);
  Find(handle, "ibv_destroy_qp", "IBVERBS_1.1", &l.destroy_qp, error);
  return opened;
}

}  // namespace

const VerbsLibrary* OpenVerbsLibrary(std::string* error) {
  static const Opened* const opened = new Opened(Open());  // never destroyed: transports may outlive static objects
  *error = opened->error;
  return error->empty() ? &opened->library : nullptr;
}

}  // namespace gear_jax::transport

#endif  // __has_include(<infiniband/verbs.h>)
