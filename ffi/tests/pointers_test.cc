#include "ffi/pointers.h"

#include <gtest/gtest.h>

#include <cstdint>

namespace gear_jax {
namespace {

TEST(Pointers, AreTheHighAndTheLowWord) {
  uint32_t words[3] = {7, 7, 7};
  for (const uint64_t bits : {uint64_t{0}, uint64_t{1}, uint64_t{0xFFFFFFFF}, uint64_t{0x7FFF123489ABCDEF}}) {
    const auto* const pointer = reinterpret_cast<const uint8_t*>(static_cast<uintptr_t>(bits));
    WritePointer(pointer, words);
    EXPECT_EQ(words[0], bits >> 32);
    EXPECT_EQ(words[1], bits & 0xFFFFFFFF);
    EXPECT_EQ(ReadPointer(words), pointer);
  }
  EXPECT_EQ(words[2], 7u);
}

}  // namespace
}  // namespace gear_jax
