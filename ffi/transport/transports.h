// The transports by name, and what lets peers read through one that exposes memory by itself.
#ifndef GEAR_JAX_FFI_TRANSPORT_TRANSPORTS_H_
#define GEAR_JAX_FFI_TRANSPORT_TRANSPORTS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ffi/transport/session.h"
#include "ffi/transport/transport.h"

namespace gear_jax::transport {

// A transport that answers its peers' reads too (ucx); called from the thread that calls everything else.
class ExposingTransport : public Transport {
 public:
  // Lets peers read this memory, and only read it; once. Returns "" or the error.
  virtual std::string Expose(const std::vector<OwnMemory>& memory, std::vector<RemoteRegion>* regions) = 0;

  // The blob for the Connect of a peer that has sent this offer. `error` is set and the blob empty if that fails.
  virtual std::vector<uint8_t> Accept(int32_t peer, const uint8_t* offer, size_t bytes, std::string* error) = 0;

  // How a connected peer is read, for people: "its memory directly" or "UCX".
  virtual std::string Way(int32_t peer) const = 0;
};

// A transport that this build does not have, or whose library or devices are not there: null, and the error is set
// (what, got, wanted, fix). To find out whether it can be had, make one.
std::unique_ptr<Transport> MakeUcx(const Options& options, std::string* error);
std::unique_ptr<Transport> MakeVerbs(const Options& options, std::string* error);

// "1.22.0"; "": no library that can be used.
std::string UcxVersion();

// "ucx" or "verbs".
std::unique_ptr<Transport> MakeTransport(const std::string& name, const Options& options, std::string* error);

}  // namespace gear_jax::transport

#endif  // GEAR_JAX_FFI_TRANSPORT_TRANSPORTS_H_
