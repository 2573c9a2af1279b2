// The kernels' work on chunks, run on the CPU and compared with the CPU's own gather and scatter.
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

#include "cuda/gather_device.h"
#include "cuda/scatter_device.h"

namespace gear_jax {
namespace {

using Bytes = std::vector<uint8_t>;

// Memory that begins `shift` bytes behind a multiple of 16, with a margin that chunks may read but never write.
class Memory {
 public:
  Memory(int64_t bytes, int64_t shift, uint8_t fill) : bytes_(bytes), all_(bytes + 64, fill) {
    const auto base = reinterpret_cast<uintptr_t>(all_.data());
    begin_ = all_.data() + (16 - base % 16) + 16 + shift % 16;
  }
  uint8_t* data() { return begin_; }
  Bytes Content() const { return Bytes(begin_, begin_ + bytes_); }
  bool MarginIs(uint8_t fill) const {
    for (const uint8_t* p = all_.data(); p < all_.data() + all_.size(); ++p) {
      if ((p < begin_ || p >= begin_ + bytes_) && *p != fill) return false;
    }
    return true;
  }
  void CheckRead(const uint8_t* chunk) const {
    // A chunk that is read holds at least one byte of the memory.
    EXPECT_GT(chunk + 16, begin_);
    EXPECT_LT(chunk, begin_ + bytes_);
  }

 private:
  int64_t bytes_;
  Bytes all_;
  uint8_t* begin_;
};

void Copy(const ChunkPlan& plan, const Chunk16& pad, const Memory& source) {
  if (plan.empty()) return;
  Chunk16 low{}, high{};
  if (plan.needs_low()) source.CheckRead(plan.source), std::memcpy(&low, plan.source, 16);
  if (plan.needs_high()) source.CheckRead(plan.source + 16), std::memcpy(&high, plan.source + 16, 16);
  Chunk16 value = plan.shift == 0 ? low : Shifted(low, high, plan.shift);
  value = Blend(value, pad, plan.data_begin, plan.data_end);
  StoreBytes(plan.out, value, plan.out_begin, plan.out_end);
}

struct Ids {
  std::vector<int32_t> slot, at, length;
  Ids(std::mt19937& rng, int64_t rows, int64_t slots, int64_t steps) {
    const auto draw = [&](int64_t low, int64_t high) {
      return static_cast<int32_t>(std::uniform_int_distribution<int64_t>(low, high)(rng));
    };
    for (int64_t i = 0; i < rows; ++i) {
      slot.push_back(draw(-1, slots));
      at.push_back(draw(-3, steps + 3));
      length.push_back(draw(-1, steps + 2));
    }
  }
};

TEST(Copy, GatherAgreesWithTheCpu) {
  std::mt19937 rng(0);
  const int64_t widths[] = {1, 2, 3, 4, 8, 11, 12, 16, 17, 44, 64, 352, 1040};
  for (int trial = 0; trial < 600; ++trial) {
    const int64_t step_bytes = widths[trial % 13], rows = trial % 7 * (trial % 3), slots = 1 + trial % 5;
    const int64_t steps = 1 + trial % 23;
    const int64_t value_bytes = step_bytes % 8 == 0 ? 8 : step_bytes % 4 == 0 ? 4 : step_bytes % 2 == 0 ? 2 : 1;
    Memory table(slots * steps * step_bytes, trial % 4 == 0 ? 0 : rng(), 0);
    for (int64_t i = 0; i < slots * steps * step_bytes; ++i) table.data()[i] = static_cast<uint8_t>(rng());
    Ids ids(rng, rows, slots, steps);
    GatherColumn column;
    column.window = {static_cast<int64_t>(rng() % 9) - 4, static_cast<int64_t>(rng() % 13), trial % 2 == 0,
                     static_cast<Pad>(trial % 3)};
    column.table = table.data();
    column.step_bytes = step_bytes;
    column.value_bytes = value_bytes;
    for (uint8_t& b : column.pad_value) b = static_cast<uint8_t>(rng());
    const int64_t width = column.window.length;
    Memory out(rows * width * step_bytes, 0, 0xAA), want(rows * width * step_bytes, 0, 0xAA);
    Memory mask(rows * width, 0, 0xAA), want_mask(rows * width, 0, 0xAA);
    column.out = out.data();

    GatherCall call{rows,          slots,
                    steps,         ids.slot.data(),
                    ids.at.data(), ids.length.data(),
                    {column},      {{mask.data(), column.window}}};
    if (trial % 5 == 4) call.anchor = call.length = nullptr;
    const GatherRows where{rows, slots, steps, call.slot, call.anchor, call.length};
    GatherEntry entry = MakeEntry(call, call.columns[0]);
    for (int64_t unit = 0; unit < Units(call, entry); ++unit) {
      const auto row = static_cast<int64_t>(entry.units.Quotient(unit));
      const RowRead read = where.Read(static_cast<int32_t>(row));
      const int64_t k = unit - row * entry.units.d;
      const ChunkPlan plan = PlanGather(where, entry, read, k);
      Copy(plan, entry.pad, table);
      if (!IsAligned(entry)) continue;
      int64_t offset;
      const uint8_t* from = AlignedSource(where, entry, read, k, &offset);
      ASSERT_EQ(offset < 0, plan.empty());
      if (plan.empty()) continue;
      ASSERT_EQ(entry.out + row * entry.row_bytes + offset, plan.out);
      ASSERT_EQ(from, plan.data_begin < plan.data_end ? plan.source : nullptr);
      ASSERT_TRUE(plan.shift == 0 || from == nullptr);
    }
    entry = MakeEntry(call, call.masks[0]);
    for (int64_t unit = 0; unit < Units(call, entry); ++unit) {
      int32_t count;
      const Chunk16 value = MaskChunk(where, entry, unit, &count);
      StoreBytes(entry.out + 16 * unit, value, 0, count);
    }

    call.columns[0].out = want.data();
    call.masks[0].out = want_mask.data();
    Gather reference(call);
    reference.Prepare(1);
    reference.Drain();
    ASSERT_EQ(out.Content(), want.Content()) << trial;
    ASSERT_EQ(mask.Content(), want_mask.Content()) << trial;
    ASSERT_TRUE(out.MarginIs(0xAA) && mask.MarginIs(0xAA)) << trial;
  }
}

TEST(Copy, ScatterAgreesWithTheCpu) {
  std::mt19937 rng(1);
  const int64_t widths[] = {1, 2, 3, 4, 8, 11, 12, 16, 17, 44, 64, 352, 1040};
  for (int trial = 0; trial < 600; ++trial) {
    const int64_t step_bytes = widths[trial % 13], rows = trial % 5, slots = 5 + trial % 5, steps = 1 + trial % 23;
    const int64_t value_steps = rng() % (steps + 1), bytes = slots * steps * step_bytes;
    Ids ids(rng, rows, slots, steps);
    for (int64_t i = 0; i < rows; ++i) {
      if (ids.slot[i] >= 0) ids.slot[i] = static_cast<int32_t>((ids.slot[0] + 7 + i) % slots);  // no slot twice
    }
    const int64_t shift = rng() % 16;
    // Every second time the rows are picked out of others.
    const int64_t value_rows = trial % 2 ? 1 + trial % 7 : rows;
    std::vector<int32_t> from(rows);
    for (int32_t& x : from) x = static_cast<int32_t>(rng() % (value_rows + 2)) - 1;
    const int64_t value_bytes = value_rows * value_steps * step_bytes;
    Memory table(bytes, shift, 0xAA), want(bytes, shift, 0xAA), values(value_bytes, rng(), 0);
    for (int64_t i = 0; i < value_bytes; ++i) values.data()[i] = static_cast<uint8_t>(rng());
    ScatterCall call{rows, slots, steps, ids.slot.data(), ids.at.data(), ids.length.data(), {}};
    call.columns.push_back({table.data(), values.data(), step_bytes, value_steps});
    if (trial % 2) call.from = from.data(), call.value_rows = value_rows;
    if (trial % 3 == 2) call.start = nullptr;
    if (trial % 7 == 6) call.length = nullptr;
    const ScatterRows where{rows, slots, steps, call.slot, call.start, call.length, call.from, call.value_rows};
    const ScatterEntry entry = MakeEntry(call, call.columns[0]);
    for (int64_t unit = 0; unit < Units(call, entry); ++unit) {
      const auto row = static_cast<int64_t>(entry.units.Quotient(unit));
      Copy(PlanScatter(where, entry, row, unit - row * entry.units.d), Chunk16{}, values);
    }
    call.columns[0].table = want.data();
    Scatter reference(call);
    reference.Prepare(1);
    reference.Drain();
    ASSERT_EQ(table.Content(), want.Content()) << trial;
    ASSERT_TRUE(table.MarginIs(0xAA)) << trial;
  }
}

TEST(Copy, Divisor) {
  std::mt19937_64 rng(2);
  for (const uint32_t d : {1u, 2u, 3u, 5u, 55u, 128u, 786433u, 4294967295u}) {
    for (int shift = 0; shift < 64; shift += 3) {
      const uint64_t n_max = ~uint64_t{0} >> shift;
      const Divisor divisor(d, n_max);
      for (int i = 0; i < 100; ++i) {
        const uint64_t n = i == 0 ? n_max : rng() >> shift;
        ASSERT_EQ(divisor.Quotient(n), n / d) << n << " / " << d;
      }
      ASSERT_EQ(divisor.Quotient(n_max / d * d), n_max / d);
    }
  }
}

TEST(Copy, StoreBytesWritesTheRangeAndNothingElse) {
  alignas(16) uint8_t out[16];
  Chunk16 value;
  for (int i = 0; i < 16; ++i) reinterpret_cast<uint8_t*>(&value)[i] = static_cast<uint8_t>(i + 1);
  for (int begin = 0; begin <= 16; ++begin) {
    for (int end = 0; end <= 16; ++end) {
      std::memset(out, 0, 16);
      StoreBytes(out, value, begin, end);
      for (int i = 0; i < 16; ++i) ASSERT_EQ(out[i], i >= begin && i < end ? i + 1 : 0) << begin << " " << end;
    }
  }
}

}  // namespace
}  // namespace gear_jax
