// Marks functions that a CUDA kernel and the CPU share.
#ifndef GEAR_JAX_FFI_HOST_DEVICE_H_
#define GEAR_JAX_FFI_HOST_DEVICE_H_

#if defined(__CUDACC__)
#define GEAR_JAX_HD __host__ __device__
#else
#define GEAR_JAX_HD
#endif

#endif  // GEAR_JAX_FFI_HOST_DEVICE_H_
