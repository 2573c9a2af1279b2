#include "ffi/gather_start_call.h"

#include <cstring>
#include <sstream>
#include <string>

namespace gear_jax {
namespace {

namespace ffi = xla::ffi;

ffi::Error Mismatch(const std::string& op, const std::string& what, size_t got, size_t wanted) {
  return InvalidArgument("gear_" + op + ": " + what, got, wanted,
                         "Call gear_jax.ops." + op + ", which prepares the operands.");
}

}  // namespace

ffi::ErrorOr<GatherDoneOperands> ReadGatherDone(ffi::Buffer<ffi::S32> handle, ffi::RemainingRets rets,
                                                Int64s pad_values, const char* op, size_t more) {
  const size_t columns = pad_values.size() / 2, parts = 2 * columns + more;
  if (handle.element_count() != 4) {
    return ffi::Unexpected(Mismatch(op, "elements of the handle", handle.element_count(), 4));
  }
  if (rets.size() != parts + 1) return ffi::Unexpected(Mismatch(op, "results", rets.size(), parts + 1));
  GatherDoneOperands read;
  read.handle = handle.typed_data();
  for (size_t i = 0; i < parts; ++i) {
    auto out = rets.get<ffi::AnyBuffer>(i);
    if (!out) return ffi::Unexpected(out.error());
    StagedPart part;
    part.out = static_cast<uint8_t*>((*out)->untyped_data());
    part.bytes = static_cast<int64_t>((*out)->size_bytes());
    if (i < columns) {
      part.value_bytes = ffi::ByteWidth((*out)->element_type());
      std::memcpy(part.pad_value.data(), &pad_values[2 * i], 16);
    }
    read.parts.push_back(part);
  }
  auto ok = rets.get<ffi::Buffer<ffi::PRED>>(parts);
  if (!ok) return ffi::Unexpected(ok.error());
  read.ok = (*ok)->typed_data();
  return read;
}

ffi::Error CheckDepth(const char* op, int64_t depth) {
  if (depth >= 1) return ffi::Error::Success();
  return InvalidArgument(std::string("gear_") + op + ": depth", depth, "at least 1",
                         std::string("Call gear_jax.ops.") + op + ", which checks it.");
}

ffi::Error NoStagingMemory(const char* op, int64_t bytes, const char* where, int64_t queue, int64_t depth,
                           const char* why, const char* fix) {
  std::ostringstream text;
  text << op << ": staging memory: got none (" << why << "), wanted " << bytes << " bytes of " << where;
  if (queue >= 0) {
    text << " for one of " << depth << " in flight of queue " << queue << ", to hold its data until its end";
  }
  text << ". " << fix;
  return ffi::Error(ffi::ErrorCode::kResourceExhausted, text.str());
}

}  // namespace gear_jax
