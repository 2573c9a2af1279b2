// The operands and results of `gear_pointers`, the same on every platform.
#ifndef GEAR_JAX_FFI_POINTERS_CALL_H_
#define GEAR_JAX_FFI_POINTERS_CALL_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "ffi/errors.h"
#include "xla/ffi/api/ffi.h"

namespace gear_jax {

// Binds the call, behind what a platform's handler takes first: the ticket and the arrays; the words, uint32[k, 2], and
// the ticket.
template <typename Binding>
auto BindPointers(Binding&& binding) {
  namespace ffi = xla::ffi;
  return std::forward<Binding>(binding)
      .template Arg<ffi::Buffer<ffi::S32>>()
      .RemainingArgs()
      .template Ret<ffi::Buffer<ffi::U32>>()
      .template Ret<ffi::Buffer<ffi::S32>>();
}

// The pointers of the arrays; null where one is empty.
inline xla::ffi::ErrorOr<std::vector<const void*>> ReadPointers(const xla::ffi::RemainingArgs& args, size_t words) {
  namespace ffi = xla::ffi;
  if (words != 2 * args.size()) {
    return ffi::Unexpected(InvalidArgument("gear_pointers: words of the result", words, 2 * args.size(),
                                           "Call gear_jax.ops.pointers, which prepares the operands."));
  }
  std::vector<const void*> pointers;
  for (size_t k = 0; k < args.size(); ++k) {
    auto array = args.get<ffi::AnyBuffer>(k);
    if (!array) return ffi::Unexpected(array.error());
    pointers.push_back(array->size_bytes() == 0 ? nullptr : array->untyped_data());
  }
  return pointers;
}

}  // namespace gear_jax

#endif  // GEAR_JAX_FFI_POINTERS_CALL_H_
