#include "ffi/scatter_call.h"

#include <sstream>
#include <string>

namespace gear_jax {
namespace {

namespace ffi = xla::ffi;

constexpr char kInternal[] = "Call gear_jax.ops.scatter, which prepares the operands.";

}  // namespace

ffi::ErrorOr<ScatterOperands> ReadScatter(ffi::Buffer<ffi::S32> slot, ffi::Buffer<ffi::S32> start,
                                          ffi::Buffer<ffi::S32> length, ffi::RemainingArgs args,
                                          ffi::RemainingRets rets, int64_t slots, int64_t steps) {
  ScatterOperands read;
  ScatterCall& call = read.call;
  call.rows = slot.element_count();
  call.slots = slots;
  call.steps = steps;
  call.slot = slot.typed_data();
  call.start = start.typed_data();
  call.length = length.typed_data();

  const size_t columns = rets.size();
  if (args.size() != 2 * columns) {
    return ffi::Unexpected(InvalidArgument("gear_scatter: operands", args.size(), 2 * columns, kInternal));
  }
  for (size_t k = 0; k < columns; ++k) {
    auto table = args.get<ffi::AnyBuffer>(k);
    auto values = args.get<ffi::AnyBuffer>(columns + k);
    auto out = rets.get<ffi::AnyBuffer>(k);
    if (!table) return ffi::Unexpected(table.error());
    if (!values) return ffi::Unexpected(values.error());
    if (!out) return ffi::Unexpected(out.error());
    if ((*out)->untyped_data() != table->untyped_data()) {
      read.moved.push_back({(*out)->untyped_data(), table->untyped_data(), static_cast<int64_t>(table->size_bytes())});
    }
    ScatterColumn column;
    const int64_t rows = slots * steps;
    column.step_bytes = rows ? static_cast<int64_t>(table->size_bytes()) / rows : 0;
    const int64_t row_bytes = call.rows * column.step_bytes;
    column.value_steps = row_bytes ? static_cast<int64_t>(values->size_bytes()) / row_bytes : 0;
    column.table = static_cast<uint8_t*>((*out)->untyped_data());
    column.values = static_cast<const uint8_t*>(values->untyped_data());
    call.columns.push_back(column);
  }
  return read;
}

ffi::Error CheckScatter(const ScatterCall& call) {
  const int64_t bad = call.FirstBadRow();
  if (bad < 0) return ffi::Error::Success();
  std::ostringstream got, wanted;
  got << "slot " << call.slot[bad] << ", start " << call.start[bad] << ", length " << call.length[bad];
  wanted << "slot -1 or in [0, " << call.slots << ") and steps in [0, " << call.steps << ")";
  return InvalidArgument("scatter: row " + std::to_string(bad), got.str(), wanted.str(),
                         "Pass rows of the table, or unset GEAR_JAX_CHECKS to have the rest cut off.");
}

}  // namespace gear_jax
