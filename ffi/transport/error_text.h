// The text of the transports' errors, of the same shape as in Python and in the handlers (../errors.h).
#ifndef GEAR_JAX_FFI_TRANSPORT_ERROR_TEXT_H_
#define GEAR_JAX_FFI_TRANSPORT_ERROR_TEXT_H_

#include <sstream>
#include <string>

namespace gear_jax::transport {

// "<what>: got <got>, wanted <wanted>. <fix>"
template <typename Got, typename Wanted>
std::string ErrorText(const std::string& what, const Got& got, const Wanted& wanted, const std::string& fix) {
  std::ostringstream text;
  text << what << ": got " << got << ", wanted " << wanted << ". " << fix;
  return text.str();
}

}  // namespace gear_jax::transport

#endif  // GEAR_JAX_FFI_TRANSPORT_ERROR_TEXT_H_
