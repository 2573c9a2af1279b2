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
                                          ffi::RemainingRets rets, int64_t slots, int64_t steps, int64_t value_rows,
                                          bool stamped) {
  ScatterOperands read;
  ScatterCall& call = read.call;
  call.rows = slot.element_count();
  call.slots = slots;
  call.steps = steps;
  call.slot = slot.typed_data();
  // Numbers that are not there need no kernel to make them.
  call.start = start.element_count() > 0 ? start.typed_data() : nullptr;
  call.length = length.element_count() > 0 ? length.typed_data() : nullptr;

  const size_t columns = rets.size() - (stamped && rets.size() > 0 ? 1 : 0);
  const bool picked = value_rows >= 0;
  const size_t wanted = 2 * columns + (picked ? 1 : 0) + (stamped ? 2 : 0);
  if (args.size() != wanted || rets.size() != columns + (stamped ? 1 : 0)) {
    return ffi::Unexpected(InvalidArgument("gear_scatter: operands", args.size(), wanted, kInternal));
  }
  if (picked) {
    auto from = args.get<ffi::Buffer<ffi::S32>>(2 * columns);
    if (!from) return ffi::Unexpected(from.error());
    if (static_cast<int64_t>(from->element_count()) != call.rows) {
      return ffi::Unexpected(InvalidArgument("gear_scatter: rows", from->element_count(), call.rows, kInternal));
    }
    call.from = from->typed_data();
    call.value_rows = value_rows;
  }
  if (stamped) {
    auto stamp = args.get<ffi::Buffer<ffi::U32>>(wanted - 2);
    auto value = args.get<ffi::Buffer<ffi::U32>>(wanted - 1);
    auto out = rets.get<ffi::Buffer<ffi::U32>>(columns);
    if (!stamp) return ffi::Unexpected(stamp.error());
    if (!value) return ffi::Unexpected(value.error());
    if (!out) return ffi::Unexpected(out.error());
    if (static_cast<int64_t>(stamp->element_count()) != slots ||
        static_cast<int64_t>(value->element_count()) != call.rows) {
      return ffi::Unexpected(InvalidArgument("gear_scatter: stamps", stamp->element_count(), slots, kInternal));
    }
    if ((*out)->typed_data() != stamp->typed_data()) {
      read.moved.push_back({(*out)->untyped_data(), stamp->untyped_data(), static_cast<int64_t>(stamp->size_bytes())});
    }
    call.stamp = (*out)->typed_data();
    call.stamp_value = value->typed_data();
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
    const int64_t row_bytes = (picked ? value_rows : call.rows) * column.step_bytes;
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
  got << "slot " << call.slot[bad] << ", start " << call.Start(bad) << ", length " << call.Length(bad, call.columns[0]);
  if (call.from != nullptr) got << ", row " << call.from[bad] << " of the values";
  wanted << "slot -1 or in [0, " << call.slots << ") and steps in [0, " << call.steps << ")";
  if (call.from != nullptr) wanted << " and rows in [0, " << call.value_rows << ")";
  return InvalidArgument("scatter: row " + std::to_string(bad), got.str(), wanted.str(),
                         "Pass rows of the table, or unset GEAR_JAX_CHECKS to have the rest cut off.");
}

}  // namespace gear_jax
