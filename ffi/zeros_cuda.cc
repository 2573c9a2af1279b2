#include <string>

#include "cuda/zeros_kernels.h"
#include "ffi/cuda.h"
#include "ffi/handlers.h"

namespace gear_jax {
namespace {

namespace ffi = xla::ffi;

ffi::Error ZerosCuda(cudaStream_t stream, ffi::Result<ffi::AnyBuffer> out) {
  const int64_t bytes = static_cast<int64_t>(out->size_bytes());
  const cudaError_t error = LaunchZeros(out->untyped_data(), bytes, stream);
  return error == cudaSuccess ? ffi::Error::Success() : CudaFailed("zeros", std::to_string(bytes) + " bytes", error);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(gear_zeros_cuda, ZerosCuda, ffi::Ffi::Bind().Ctx<CudaStream>().Ret<ffi::AnyBuffer>(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace gear_jax
