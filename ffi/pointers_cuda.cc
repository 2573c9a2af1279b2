#include <cstdint>
#include <string>

#include "cuda/pointers_kernels.h"
#include "ffi/cuda.h"
#include "ffi/handlers.h"
#include "ffi/pointers_call.h"

namespace gear_jax {
namespace {

namespace ffi = xla::ffi;

// Whether other GPUs of the process can read array k through its pointer.
ffi::Error CheckPointer(size_t k, const void* pointer) {
  const std::string what = "pointers: columns[" + std::to_string(k) + "]";
  bool is = false;
  const cudaError_t error = IsReadByAll(pointer, &is);
  if (error != cudaSuccess) return CudaFailed("pointers, looking at the memory", what, error);
  if (!is) {
    return InvalidArgument(what, "memory that other GPUs do not read", "page-locked memory of the host",
                           "Place the column in memory kind \"pinned_host\"; if it is there, something in the program "
                           "copies it before the call.");
  }
  if (const auto rest = reinterpret_cast<uintptr_t>(pointer) % kPointerAlignment; rest != 0) {
    return InvalidArgument(what,
                           "memory that begins " + std::to_string(rest) + " bytes behind a multiple of " +
                               std::to_string(kPointerAlignment),
                           "a multiple", "Pass an array that JAX allocated, not a part of other memory.");
  }
  return ffi::Error::Success();
}

ffi::Error PointersCuda(cudaStream_t stream, ffi::Buffer<ffi::S32> ticket, ffi::RemainingArgs args,
                        ffi::Result<ffi::Buffer<ffi::U32>> out, ffi::Result<ffi::Buffer<ffi::S32>> ticket_out) {
  const auto pointers = ReadPointers(args, out->element_count());
  if (!pointers) return pointers.error();
  for (size_t k = 0; k < pointers->size(); ++k) {
    if ((*pointers)[k] == nullptr) continue;
    ffi::Error error = CheckPointer(k, (*pointers)[k]);
    if (error.failure()) return error;
  }
  const cudaError_t error =
      LaunchPointers(*pointers, out->typed_data(), ticket.typed_data(), ticket_out->typed_data(), stream);
  if (error == cudaSuccess) return ffi::Error::Success();
  return CudaFailed("pointers", std::to_string(pointers->size()) + " columns", error);
}

}  // namespace

// Not for CUDA graphs: a graph holds the pointers it was recorded with. XLA records it again where its own buffers have
// moved, but the checks above would run only then.
XLA_FFI_DEFINE_HANDLER_SYMBOL(gear_pointers_cuda, PointersCuda, BindPointers(ffi::Ffi::Bind().Ctx<CudaStream>()));

}  // namespace gear_jax
