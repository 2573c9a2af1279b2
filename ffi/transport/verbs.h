// Remote reads with verbs (InfiniBand, RoCE): the reading side. No XLA, no Python.
//
// libibverbs is opened at run time (verbs_library.h), so what is built with this loads where there is none. Each peer
// has several queue pairs of the kind RC. A read goes into registered memory of the transport's own, and its
// completion copies it to the caller's: nothing is ever registered for a read. A queue pair is spent after an error
// completion, and its peer with it: what is posted to the peer then ends as kLost until it is disconnected and
// connected anew.
#ifndef GEAR_JAX_FFI_TRANSPORT_VERBS_H_
#define GEAR_JAX_FFI_TRANSPORT_VERBS_H_

#include <memory>
#include <string>

#include "ffi/transport/transport.h"

namespace gear_jax::transport {

// The transport. Null and `error` (what, got, wanted, fix) where options are out of range, libibverbs is not there, or
// no device has an active port with an address that others can reach. Threads: as transport.h says.
std::unique_ptr<Transport> MakeVerbs(const Options& options, std::string* error);

}  // namespace gear_jax::transport

#endif  // GEAR_JAX_FFI_TRANSPORT_VERBS_H_
