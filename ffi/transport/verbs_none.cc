// What a build without <infiniband/verbs.h> has instead of verbs.cc.
#if !__has_include(<infiniband/verbs.h>)

#include "ffi/transport/error_text.h"
#include "ffi/transport/verbs.h"

namespace gear_jax::transport {

std::unique_ptr<Transport> MakeVerbs(const Options&, std::string* error) {
  *error = ErrorText("verbs", "a build of gear_jax without them", "one with <infiniband/verbs.h>",
                     "Build again after `apt-get install libibverbs-dev`, or use transport=\"ucx\".");
  return nullptr;
}

}  // namespace gear_jax::transport

#endif  // !__has_include(<infiniband/verbs.h>)
