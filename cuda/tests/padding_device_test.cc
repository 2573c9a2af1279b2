// The work of the kernel of padding, run on the CPU.
#include "cuda/padding_device.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

namespace gear_jax {
namespace {

TEST(Padding, ChunksTogetherFillARangeAndNothingElse) {
  GatherColumn column;
  column.value_bytes = 4;
  column.pad_value = {1, 2, 3, 4};
  Chunk16 chunk;
  std::memcpy(&chunk, column.PadChunk().data(), 16);
  for (const int64_t bytes : {0, 1, 3, 4, 15, 16, 17, 31, 48, 1000}) {
    for (int64_t shift = 0; shift < 16; ++shift) {
      std::vector<uint8_t> memory(bytes + 96, 0xAB);
      const auto base = reinterpret_cast<uintptr_t>(memory.data());
      uint8_t* const begin = memory.data() + (16 - base % 16) + 16 + shift;
      const PadRange range{begin, bytes};
      for (int64_t k = 0; k < PadChunks(range); ++k) {
        const ChunkPlan plan = PlanPadding(range, k);
        EXPECT_FALSE(plan.empty() || plan.needs_low() || plan.needs_high());
        StoreBytes(plan.out, chunk, plan.out_begin, plan.out_end);
      }
      for (uint8_t& b : memory) {
        const bool inside = &b >= begin && &b < begin + bytes;
        ASSERT_EQ(b, inside ? 1 + reinterpret_cast<uintptr_t>(&b) % 4 : 0xAB) << bytes << " bytes, shifted " << shift;
      }
    }
  }
}

}  // namespace
}  // namespace gear_jax
