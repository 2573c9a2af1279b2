#include <cstring>
#include <memory>
#include <sstream>

#include "ffi/cpu.h"
#include "ffi/gather.h"
#include "ffi/handlers.h"

namespace gear_jax {
namespace {

namespace ffi = xla::ffi;
using Int64s = ffi::Span<const int64_t>;

std::string Mismatch(const char* what, size_t i) {
  return std::string("gear_gather: ") + what + " " + std::to_string(i);
}

constexpr char kInternal[] = "Call gear_jax.ops.gather, which prepares the operands.";

// Operands: slot, anchor, length, ticket, columns..., then buffers that are only waited for or written over.
// Results: one for each column, a mask for each (if `masks`), the ticket. `lead`: the dimensions of a column before a
// step's own.
ffi::Future GatherCpu(ffi::ThreadPool pool, ffi::Buffer<ffi::S32> slot, ffi::Buffer<ffi::S32> anchor,
                      ffi::Buffer<ffi::S32> length, ffi::Buffer<ffi::S32> ticket, ffi::RemainingArgs args,
                      ffi::RemainingRets rets, int64_t slots, int64_t steps, Int64s offsets, Int64s lengths,
                      Int64s anchored, Int64s pads, Int64s pad_values, int64_t lead, bool masks, bool checks) {
  auto gather = std::make_shared<Gather>();
  gather->rows = slot.element_count();
  gather->slots = slots;
  gather->steps = steps;
  gather->slot = slot.typed_data();
  gather->anchor = anchor.typed_data();
  gather->length = length.typed_data();

  const size_t columns = offsets.size();
  const auto window = [&](size_t k) {
    return Window{offsets[k], lengths[k], anchored[k] != 0, static_cast<Pad>(pads[k])};
  };
  const size_t mask_count = masks ? columns : 0;
  if (args.size() < columns || rets.size() != columns + mask_count + 1) {
    return Failed(InvalidArgument("gear_gather: operands", args.size(), columns, kInternal));
  }
  for (size_t k = 0; k < columns; ++k) {
    auto table = args.get<ffi::AnyBuffer>(k);
    auto out = rets.get<ffi::AnyBuffer>(k);
    if (!table) return Failed(table.error());
    if (!out) return Failed(out.error());
    GatherColumn column;
    const int64_t width = ffi::ByteWidth(table->element_type());
    column.step_bytes = width;  // a table without slots still says how wide its padding is
    const auto shape = table->dimensions();
    for (size_t d = lead; d < shape.size(); ++d) column.step_bytes *= shape[d];
    if (static_cast<int64_t>(table->size_bytes()) != slots * steps * column.step_bytes) {
      return Failed(InvalidArgument(Mismatch("bytes of column", k), table->size_bytes(),
                                    slots * steps * column.step_bytes, kInternal));
    }
    const int64_t wanted = gather->rows * lengths[k] * column.step_bytes;
    if (static_cast<int64_t>((*out)->size_bytes()) != wanted) {
      return Failed(InvalidArgument(Mismatch("bytes of result", k), (*out)->size_bytes(), wanted, kInternal));
    }
    column.table = static_cast<const uint8_t*>(table->untyped_data());
    column.out = static_cast<uint8_t*>((*out)->untyped_data());
    column.window = window(k);
    std::memcpy(column.pad_value.data(), &pad_values[2 * k], 16);
    column.value_bytes = width;
    gather->columns.push_back(column);
  }
  for (size_t m = 0; m < mask_count; ++m) {
    auto out = rets.get<ffi::Buffer<ffi::PRED>>(columns + m);
    if (!out) return Failed(out.error());
    gather->masks.push_back({reinterpret_cast<uint8_t*>((*out)->typed_data()), window(m)});
  }
  auto ticket_out = rets.get<ffi::Buffer<ffi::S32>>(columns + mask_count);
  if (!ticket_out) return Failed(ticket_out.error());
  (*ticket_out)->typed_data()[0] = ticket.typed_data()[0];

  if (checks) {
    const int64_t bad = gather->FirstBadRow();
    if (bad >= 0) {
      std::ostringstream wanted;
      wanted << "a slot in [0, " << slots << ")";
      return Failed(InvalidArgument("gather: slots[" + std::to_string(bad) + "]", gather->slot[bad], wanted.str(),
                                    "Pass slots of the table, or unset GEAR_JAX_CHECKS to get padding there."));
    }
  }
  const int64_t bytes = gather->Prepare(pool.num_threads());
  return Spread(pool, std::move(gather), bytes);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(gear_gather_cpu, GatherCpu,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<int64_t>("slots")
                                  .Attr<int64_t>("steps")
                                  .Attr<Int64s>("offsets")
                                  .Attr<Int64s>("lengths")
                                  .Attr<Int64s>("anchored")
                                  .Attr<Int64s>("pads")
                                  .Attr<Int64s>("pad_values")
                                  .Attr<int64_t>("lead")
                                  .Attr<bool>("masks")
                                  .Attr<bool>("checks"));

}  // namespace gear_jax
