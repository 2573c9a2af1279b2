// What tests on a GPU share: memory of the device or mapped host memory, and errors that stop a test.
#ifndef GEAR_JAX_CUDA_TESTS_DEVICE_H_
#define GEAR_JAX_CUDA_TESTS_DEVICE_H_

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

namespace gear_jax {

#define ASSERT_CUDA(call)                                                          \
  do {                                                                             \
    const cudaError_t error_ = (call);                                             \
    ASSERT_EQ(error_, cudaSuccess) << #call << ": " << cudaGetErrorString(error_); \
  } while (0)

// An array on the device, or in mapped host memory.
template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(const std::vector<T>& content, bool host = false) : size_(content.size()), host_(host) {
    const size_t bytes = sizeof(T) * size_ + 16;  // never empty; compute-sanitizer knows the true end of each
    const cudaError_t error = host ? cudaMallocHost(&data_, bytes) : cudaMalloc(&data_, bytes);
    EXPECT_EQ(error, cudaSuccess) << cudaGetErrorString(error);
    // A chunk that holds the last byte of an array is read whole.
    EXPECT_EQ(cudaMemset(data_, 0, bytes), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(data_, content.data(), sizeof(T) * size_, cudaMemcpyDefault), cudaSuccess);
  }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  ~DeviceArray() { host_ ? cudaFreeHost(data_) : cudaFree(data_); }

  T* data() const { return static_cast<T*>(data_); }
  std::vector<T> Content() const {
    std::vector<T> content(size_);
    EXPECT_EQ(cudaMemcpy(content.data(), data_, sizeof(T) * size_, cudaMemcpyDefault), cudaSuccess);
    return content;
  }

 private:
  void* data_ = nullptr;
  size_t size_;
  bool host_;
};

inline bool HasDevice() {
  int devices = 0;
  return cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0;
}

}  // namespace gear_jax

#endif  // GEAR_JAX_CUDA_TESTS_DEVICE_H_
