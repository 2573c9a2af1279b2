#include <memory>
#include <sstream>

#include "ffi/cpu.h"
#include "ffi/handlers.h"
#include "ffi/scatter.h"

namespace gear_jax {
namespace {

namespace ffi = xla::ffi;

constexpr char kInternal[] = "Call gear_jax.ops.scatter, which prepares the operands.";

// Operands: slot, start, length, ticket, columns..., values.... Results: the columns, in place.
ffi::Future ScatterCpu(ffi::ThreadPool pool, ffi::Buffer<ffi::S32> slot, ffi::Buffer<ffi::S32> start,
                       ffi::Buffer<ffi::S32> length, ffi::Buffer<ffi::S32> /*ticket*/, ffi::RemainingArgs args,
                       ffi::RemainingRets rets, int64_t slots, int64_t steps, bool checks) {
  auto scatter = std::make_shared<Scatter>();
  scatter->rows = slot.element_count();
  scatter->slots = slots;
  scatter->steps = steps;
  scatter->slot = slot.typed_data();
  scatter->start = start.typed_data();
  scatter->length = length.typed_data();

  const size_t columns = rets.size();
  if (args.size() != 2 * columns) {
    return Failed(InvalidArgument("gear_scatter: operands", args.size(), 2 * columns, kInternal));
  }
  for (size_t k = 0; k < columns; ++k) {
    auto table = args.get<ffi::AnyBuffer>(k);
    auto values = args.get<ffi::AnyBuffer>(columns + k);
    auto out = rets.get<ffi::AnyBuffer>(k);
    if (!table) return Failed(table.error());
    if (!values) return Failed(values.error());
    if (!out) return Failed(out.error());
    if ((*out)->untyped_data() != table->untyped_data()) {
      return Failed(InvalidArgument("gear_scatter: result " + std::to_string(k), "memory of its own",
                                    "the column's own memory", kInternal));
    }
    ScatterColumn column;
    const int64_t rows = slots * steps;
    column.step_bytes = rows ? static_cast<int64_t>(table->size_bytes()) / rows : 0;
    const int64_t row_bytes = scatter->rows * column.step_bytes;
    column.value_steps = row_bytes ? static_cast<int64_t>(values->size_bytes()) / row_bytes : 0;
    column.table = static_cast<uint8_t*>((*out)->untyped_data());
    column.values = static_cast<const uint8_t*>(values->untyped_data());
    scatter->columns.push_back(column);
  }
  if (checks) {
    const int64_t bad = scatter->FirstBadRow();
    if (bad >= 0) {
      std::ostringstream got, wanted;
      got << "slot " << scatter->slot[bad] << ", start " << scatter->start[bad] << ", length " << scatter->length[bad];
      wanted << "slot -1 or in [0, " << slots << ") and steps in [0, " << steps << ")";
      return Failed(InvalidArgument("scatter: row " + std::to_string(bad), got.str(), wanted.str(),
                                    "Pass rows of the table, or unset GEAR_JAX_CHECKS to have the rest cut off."));
    }
  }
  const int64_t bytes = scatter->Prepare(pool.num_threads());
  return Spread(pool, std::move(scatter), bytes);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(gear_scatter_cpu, ScatterCpu,
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
                                  .Attr<bool>("checks"));

}  // namespace gear_jax
