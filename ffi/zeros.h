// zeros: memory for a column, zeroed by several threads behind huge pages. The core, without XLA.
#ifndef GEAR_JAX_FFI_ZEROS_H_
#define GEAR_JAX_FFI_ZEROS_H_

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "ffi/parallel.h"

namespace gear_jax {

class Zeros : public Work {
 public:
  Zeros(void* data, int64_t bytes) : data_(static_cast<uint8_t*>(data)), bytes_(bytes) {
    if (bytes >= (4 << 20)) AdviseHugePages(data, bytes);
  }
  int64_t size() const override { return (bytes_ + kPiece - 1) / kPiece; }
  void Run(int64_t task) override { std::memset(data_ + task * kPiece, 0, std::min(kPiece, bytes_ - task * kPiece)); }

 private:
  static constexpr int64_t kPiece = 4 << 20;
  uint8_t* data_;
  int64_t bytes_;
};

}  // namespace gear_jax

#endif  // GEAR_JAX_FFI_ZEROS_H_
