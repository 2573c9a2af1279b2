// Errors of the handlers, written for the user.
#ifndef GEAR_JAX_FFI_ERRORS_H_
#define GEAR_JAX_FFI_ERRORS_H_

#include <cstdint>
#include <sstream>
#include <string>

#include "xla/ffi/api/ffi.h"

namespace gear_jax {

// "<op>: <what>: got <got>, wanted <wanted>. <fix>", the same shape as in Python.
template <typename Got, typename Wanted>
xla::ffi::Error InvalidArgument(const std::string& what, const Got& got, const Wanted& wanted, const std::string& fix) {
  std::ostringstream text;
  text << what << ": got " << got << ", wanted " << wanted << ". " << fix;
  return xla::ffi::Error(xla::ffi::ErrorCode::kInvalidArgument, text.str());
}

// An array that a call should change in place, and whose result lies elsewhere.
struct MovedArray {
  void* to;
  const void* from;
  int64_t bytes;
};

}  // namespace gear_jax

#endif  // GEAR_JAX_FFI_ERRORS_H_
