#include "cuda/host_wait.h"

#include <cuda.h>

namespace gear_jax {
namespace {

using WaitValue = CUresult(CUDAAPI*)(CUstream, CUdeviceptr, cuuint32_t, unsigned int);

// The driver's function. libcuda is not linked, so that the library loads where there is no driver.
WaitValue Find() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuStreamWaitValue32", &function, 12000, cudaEnableDefault, &found);
#else
  const cudaError_t error = cudaGetDriverEntryPoint("cuStreamWaitValue32", &function, cudaEnableDefault, &found);
#endif
  if (error == cudaSuccess && found == cudaDriverEntryPointSuccess) return reinterpret_cast<WaitValue>(function);
  cudaGetLastError();  // else it would show up as another call's
  return nullptr;
}

}  // namespace

cudaError_t EnqueueHostWait(const uint32_t* word, uint32_t value, cudaStream_t stream) {
  static const WaitValue wait = Find();
  if (wait == nullptr) return cudaErrorNotSupported;  // drivers before CUDA 12
  const auto address = reinterpret_cast<CUdeviceptr>(word);
  return wait(stream, address, value, CU_STREAM_WAIT_VALUE_GEQ) == CUDA_SUCCESS ? cudaSuccess : cudaErrorUnknown;
}

}  // namespace gear_jax
