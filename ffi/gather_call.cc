#include "ffi/gather_call.h"

#include <cstring>
#include <sstream>
#include <utility>

namespace gear_jax {
namespace {

namespace ffi = xla::ffi;

constexpr char kInternal[] = "Call gear_jax.ops.gather, which prepares the operands.";

template <typename Got, typename Wanted>
ffi::Unexpected<ffi::Error> Mismatch(const char* what, size_t i, const Got& got, const Wanted& wanted) {
  return ffi::Unexpected(
      InvalidArgument(std::string("gear_gather: ") + what + " " + std::to_string(i), got, wanted, kInternal));
}

// A column whose operand is an address, or (`shards` > 0) the pointers of so many shards.
ffi::ErrorOr<GatherColumn> ReadAddress(const ffi::RemainingArgs& args, size_t k, const int64_t* layout,
                                       int64_t shards) {
  auto words = args.get<ffi::Buffer<ffi::U32>>(k);
  if (!words) return ffi::Unexpected(words.error());
  const int64_t count = static_cast<int64_t>(words->element_count()), wanted = shards > 0 ? 2 * shards : 4;
  if (count != wanted) return Mismatch("words of the address of column", k, count, wanted);
  if (layout[1] < 1 || layout[1] > 16) return Mismatch("bytes of an element of column", k, layout[1], "1 to 16");
  if (layout[2] < 1) return Mismatch("alignment of the table of column", k, layout[2], "at least 1");
  GatherColumn column;
  (shards > 0 ? column.shards : column.address) = words->typed_data();
  column.step_bytes = layout[0];
  column.value_bytes = layout[1];
  column.address_alignment = layout[2];
  return column;
}

// A column that has no operand.
ffi::ErrorOr<GatherColumn> ReadLayout(size_t k, const int64_t* layout) {
  if (layout[1] < 1 || layout[1] > 16) return Mismatch("bytes of an element of column", k, layout[1], "1 to 16");
  GatherColumn column;
  column.step_bytes = layout[0];
  column.value_bytes = layout[1];
  return column;
}

// A column whose operand is the table.
ffi::ErrorOr<GatherColumn> ReadTable(const ffi::RemainingArgs& args, size_t k, const GatherAttributes& attributes) {
  auto table = args.get<ffi::AnyBuffer>(k);
  if (!table) return ffi::Unexpected(table.error());
  GatherColumn column;
  column.value_bytes = ffi::ByteWidth(table->element_type());
  column.step_bytes = column.value_bytes;  // a table without slots still says how wide its padding is
  const auto shape = table->dimensions();
  for (size_t d = attributes.lead; d < shape.size(); ++d) column.step_bytes *= shape[d];
  const int64_t bytes = attributes.slots * attributes.steps * column.step_bytes;
  if (static_cast<int64_t>(table->size_bytes()) != bytes) {
    return Mismatch("bytes of column", k, table->size_bytes(), bytes);
  }
  column.table = static_cast<const uint8_t*>(table->untyped_data());
  return column;
}

}  // namespace

ffi::ErrorOr<GatherCall> ReadGatherTables(ffi::Buffer<ffi::S32> slot, ffi::Buffer<ffi::S32> anchor,
                                          ffi::Buffer<ffi::S32> length, ffi::RemainingArgs args,
                                          const GatherAttributes& attributes) {
  GatherCall call;
  call.rows = slot.element_count();
  call.slots = attributes.slots;
  call.steps = attributes.steps;
  call.slot = slot.typed_data();
  // A step has neither where slots are not made of steps: numbers that are not there need no kernel to make them.
  const bool given = attributes.masks || anchor.element_count() + length.element_count() > 0;
  call.anchor = given ? anchor.typed_data() : nullptr;
  call.length = given ? length.typed_data() : nullptr;
  const size_t columns = attributes.offsets.size();
  const Int64s& layouts = attributes.layouts;
  if (layouts.size() != 0 && layouts.size() != 2 * columns) {
    return Mismatch("numbers of layouts, all", 2 * columns, layouts.size(), 2 * columns);
  }
  if (layouts.size() == 0 && args.size() < columns)
    return Mismatch("operands, at least", columns, args.size(), columns);
  const Int64s& addresses = attributes.addresses;
  if (addresses.size() != 0 && addresses.size() != 3 * columns) {
    return Mismatch("numbers of addresses, all", 3 * columns, addresses.size(), 3 * columns);
  }
  const Int64s& shards = attributes.shards;
  if (shards.size() != 0 && shards.size() != columns) {
    return Mismatch("numbers of shards, all", columns, shards.size(), columns);
  }
  for (size_t k = 0; k < columns; ++k) {
    const int64_t parts = shards.size() != 0 ? shards[k] : 0;
    if (parts > 0) {
      if (call.slots % parts != 0) return Mismatch("slots, in shards of column", k, call.slots, "a multiple of them");
      if (call.shards != 1 && call.shards != parts) return Mismatch("shards of column", k, parts, call.shards);
      call.shards = parts;
    }
    const bool by_address = addresses.size() != 0 && addresses[3 * k] >= 0;
    auto read = layouts.size() != 0 ? ReadLayout(k, &layouts[2 * k])
                : by_address        ? ReadAddress(args, k, &addresses[3 * k], parts)
                                    : ReadTable(args, k, attributes);
    if (!read) return ffi::Unexpected(read.error());
    GatherColumn& column = *read;
    column.window = {attributes.offsets[k], attributes.lengths[k], attributes.anchored[k] != 0,
                     static_cast<Pad>(attributes.pads[k])};
    std::memcpy(column.pad_value.data(), &attributes.pad_values[2 * k], 16);
    call.columns.push_back(column);
    if (!attributes.masks) continue;
    call.masks.push_back({nullptr, column.window, column.address, column.address_alignment, column.step_bytes});
  }
  return call;
}

ffi::ErrorOr<GatherOperands> ReadGather(ffi::Buffer<ffi::S32> slot, ffi::Buffer<ffi::S32> anchor,
                                        ffi::Buffer<ffi::S32> length, ffi::Buffer<ffi::S32> ticket,
                                        ffi::RemainingArgs args, ffi::RemainingRets rets,
                                        const GatherAttributes& attributes, bool ordered) {
  auto tables = ReadGatherTables(slot, anchor, length, args, attributes);
  if (!tables) return ffi::Unexpected(tables.error());
  GatherOperands read;
  read.call = std::move(*tables);
  GatherCall& call = read.call;
  const size_t columns = call.columns.size(), masks = call.masks.size();
  const size_t results = columns + masks + 1 + (ordered ? 1 : 0);
  if (rets.size() != results) return Mismatch("results, all", results, rets.size(), results);
  for (size_t k = 0; k < columns; ++k) {
    auto out = rets.get<ffi::AnyBuffer>(k);
    if (!out) return ffi::Unexpected(out.error());
    GatherColumn& column = call.columns[k];
    const int64_t wanted = call.rows * column.window.length * column.step_bytes;
    if (static_cast<int64_t>((*out)->size_bytes()) != wanted) {
      return Mismatch("bytes of result", k, (*out)->size_bytes(), wanted);
    }
    column.out = static_cast<uint8_t*>((*out)->untyped_data());
  }
  for (size_t m = 0; m < masks; ++m) {
    auto out = rets.get<ffi::Buffer<ffi::PRED>>(columns + m);
    if (!out) return ffi::Unexpected(out.error());
    call.masks[m].out = reinterpret_cast<uint8_t*>((*out)->typed_data());
  }
  auto ticket_out = rets.get<ffi::Buffer<ffi::S32>>(columns + masks);
  if (!ticket_out) return ffi::Unexpected(ticket_out.error());
  read.ticket = ticket.typed_data();
  read.ticket_out = (*ticket_out)->typed_data();
  if (ordered) {
    auto order = rets.get<ffi::Buffer<ffi::S32>>(columns + masks + 1);
    if (!order) return ffi::Unexpected(order.error());
    if (static_cast<int64_t>((*order)->element_count()) != call.rows + kOrderScratch) {
      return Mismatch("elements of result", columns + masks + 1, (*order)->element_count(), call.rows + kOrderScratch);
    }
    read.order = (*order)->typed_data();
  }
  return read;
}

ffi::Error CheckGather(const GatherCall& call) {
  const int64_t bad = call.FirstBadRow();
  if (bad < 0) return ffi::Error::Success();
  std::ostringstream wanted;
  wanted << "a slot in [0, " << call.slots << ")";
  return InvalidArgument("gather: slots[" + std::to_string(bad) + "]", call.slot[bad], wanted.str(),
                         "Pass slots of the table, or unset GEAR_JAX_CHECKS to get padding there.");
}

ffi::Error CheckCopied(const GatherCall& call, const Int64s& copied) {
  if (copied.size() == call.columns.size()) return ffi::Error::Success();
  return InvalidArgument("gear_gather_engine: copied", copied.size(), call.columns.size(), kInternal);
}

}  // namespace gear_jax
