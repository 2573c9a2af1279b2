#include <algorithm>

#include "cuda/load_kernels.h"
#include "cuda/pointers_kernels.h"
#include "ffi/pointers.h"

namespace gear_jax {
namespace {

constexpr int kPointers = 500;  // of a launch
constexpr int kThreads = 128;

struct PointersParams {
  uint32_t* out;
  const int32_t* ticket;
  int32_t* ticket_out;
  int32_t count;
  const void* pointer[kPointers];
};
static_assert(sizeof(PointersParams) <= 4096, "kernel parameters of CUDA 12.0");

__global__ void __launch_bounds__(kThreads) PointersKernel(const __grid_constant__ PointersParams params) {
  // What this device has written to host memory must be there before another one learns of it: a collective moves the
  // words over another link, and need not wait for the one to the host.
  __threadfence_system();
  if (threadIdx.x == 0 && params.ticket_out != nullptr) params.ticket_out[0] = params.ticket[0];
  for (int32_t k = threadIdx.x; k < params.count; k += kThreads) WritePointer(params.pointer[k], params.out + 2 * k);
}

}  // namespace

cudaError_t IsReadByAll(const void* pointer, bool* is) {
  cudaPointerAttributes attributes{};
  const cudaError_t error = cudaPointerGetAttributes(&attributes, pointer);
  if (error != cudaSuccess) {
    cudaGetLastError();  // else it would show up as another call's
    return error;
  }
  *is = attributes.type == cudaMemoryTypeHost && attributes.devicePointer == pointer;
  return cudaSuccess;
}

cudaError_t LaunchPointers(const std::vector<const void*>& pointers, uint32_t* out, const int32_t* ticket,
                           int32_t* ticket_out, cudaStream_t stream) {
  for (size_t first = 0; first == 0 || first < pointers.size(); first += kPointers) {
    PointersParams params{};
    params.out = out + 2 * first;
    if (first == 0) params.ticket = ticket, params.ticket_out = ticket_out;
    params.count = static_cast<int32_t>(std::min<size_t>(kPointers, pointers.size() - first));
    std::copy_n(pointers.begin() + static_cast<int64_t>(first), params.count, params.pointer);
    PointersKernel<<<1, kThreads, 0, stream>>>(params);
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t LoadPointersKernels() { return LoadKernels({reinterpret_cast<const void*>(PointersKernel)}); }

}  // namespace gear_jax
