#include "ffi/transport/transports.h"

namespace gear_jax::transport {

std::unique_ptr<Transport> MakeTransport(const std::string& name, const Options& options, std::string* error) {
  error->clear();
  if (name == "ucx") return MakeUcx(options, error);
  if (name == "verbs") return MakeVerbs(options, error);
  *error = "transport: got \"" + name + "\", wanted \"ucx\" or \"verbs\". Leave it out to have one chosen.";
  return nullptr;
}

#ifndef GEAR_JAX_HAS_UCX
std::string UcxVersion() { return ""; }

std::unique_ptr<Transport> MakeUcx(const Options&, std::string* error) {
  *error =
      "transport \"ucx\": got a build without UCX's headers, wanted one with them. Build again with libucx-cu12>=1.22 "
      "installed.";
  return nullptr;
}
#endif

#ifndef GEAR_JAX_HAS_VERBS
std::unique_ptr<Transport> MakeVerbs(const Options&, std::string* error) {
  *error =
      "transport \"verbs\": got a build without libibverbs' headers, wanted one with them. Build again with "
      "libibverbs-dev installed.";
  return nullptr;
}
#endif

}  // namespace gear_jax::transport
