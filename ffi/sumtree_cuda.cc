#include <string>
#include <vector>

#include "cuda/sumtree_kernels.h"
#include "ffi/cuda.h"
#include "ffi/handlers.h"
#include "ffi/sumtree_call.h"

namespace gear_jax {
namespace {

namespace ffi = xla::ffi;

std::string Sizes(const DeviceTree& tree, int64_t rows, const char* what) {
  return std::to_string(rows) + " " + what + ", " + std::to_string(tree.partitions) + " partitions of " +
         std::to_string(tree.leaves) + " slots";
}

ffi::Error SumTreeSampleCuda(cudaStream_t stream, FfiF32 roots, FfiS32 first, FfiF32 mass, FfiF32 sums, FfiS32 length,
                             FfiU32 generation, FfiU32 bits, FfiS32 ticket, ffi::Result<FfiS32> slot,
                             ffi::Result<FfiS32> partition, ffi::Result<FfiF32> probability,
                             ffi::Result<FfiS32> drawn_length, ffi::Result<FfiU32> drawn_generation,
                             ffi::Result<FfiF32> least, ffi::Result<FfiF32> total, ffi::Result<FfiS32> ticket_out,
                             bool stratified) {
  const SumTreeLayout layout(LastDimension(mass.dimensions()));
  DeviceDraws draws;
  draws.draws = static_cast<int64_t>(slot->element_count());
  const ffi::Error error = CheckSample(layout, roots, mass, sums, length, generation, *least, draws.draws);
  if (error.failure()) return error;
  draws.tree = DeviceTree(layout, static_cast<int64_t>(sums.element_count()) / layout.width);
  draws.tree.mass = mass.typed_data();
  draws.tree.sums = sums.typed_data();
  draws.all_partitions = PartitionsOf(roots);
  draws.first = first.typed_data();
  draws.roots = RootsOf(roots, layout);
  draws.length = length.typed_data();
  draws.generation = generation.typed_data();
  (bits.dimensions().size() == 1 ? draws.key : draws.bits) = bits.typed_data();
  draws.stratified = stratified;
  draws.rows = RowsOf(slot, partition, probability, drawn_length, drawn_generation, least);
  draws.total = total->typed_data();
  draws.ticket = ticket.typed_data();
  draws.ticket_out = ticket_out->typed_data();
  draws.level = StartLevel(draws.tree.nodes, draws.tree.levels, draws.all_partitions, draws.draws);

  int64_t limit = 0;
  cudaError_t status = SharedMemoryLimit(&limit);
  if (status == cudaSuccess && draws.MemoryBytes() > limit) {
    return InvalidArgument("sumtree_sample: partitions of the table", draws.all_partitions,
                           "so many that their prefix sums, " + std::to_string(draws.MemoryBytes()) +
                               " bytes, fit into the " + std::to_string(limit) + " bytes of shared memory of a block",
                           "Make fewer, larger partitions: make_replay(partitions=...).");
  }
  if (status == cudaSuccess) status = LaunchSumTreeSample(draws, stream);
  if (status == cudaSuccess) return ffi::Error::Success();
  return CudaFailed("sumtree_sample", Sizes(draws.tree, draws.draws, "draws"), status);
}

ffi::Error SumTreeUpdateCuda(cudaStream_t stream, FfiF32 priority, FfiF32 mass, FfiF32 sums, FfiS32 slot,
                             FfiF32 new_priority, FfiF32 new_mass, FfiS32 /*ticket*/, ffi::Result<FfiF32> priority_out,
                             ffi::Result<FfiF32> mass_out, ffi::Result<FfiF32> sums_out) {
  const SumTreeLayout layout(LastDimension(mass.dimensions()));
  ffi::Error error = CheckSums("gear_sumtree_update", sums, layout);
  if (error.failure()) return error;
  std::vector<MovedArray> moved;
  const auto note = [&](FfiF32& operand, ffi::Result<FfiF32>& result) {
    if (operand.untyped_data() == result->untyped_data()) return;
    moved.push_back({result->untyped_data(), operand.untyped_data(), static_cast<int64_t>(operand.size_bytes())});
  };
  note(priority, priority_out);
  note(mass, mass_out);
  note(sums, sums_out);
  DeviceTree tree(layout, static_cast<int64_t>(sums.element_count()) / layout.width);
  tree.priority = priority_out->typed_data();
  tree.mass = mass_out->typed_data();
  tree.sums = sums_out->typed_data();
  DeviceWrites writes;
  writes.count = static_cast<int64_t>(slot.element_count());
  writes.slot = slot.typed_data();
  writes.priority = new_priority.typed_data();
  writes.mass = new_mass.typed_data();
  cudaError_t status = CopyMoved(moved, stream);
  if (status == cudaSuccess) status = LaunchSumTreeUpdate(tree, writes, stream);
  if (status == cudaSuccess) return ffi::Error::Success();
  return CudaFailed("sumtree_update", Sizes(tree, writes.count, "writes"), status);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(gear_sumtree_sample_cuda, SumTreeSampleCuda,
                              BindSumTreeSample(ffi::Ffi::Bind().Ctx<CudaStream>()),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(gear_sumtree_update_cuda, SumTreeUpdateCuda,
                              BindSumTreeUpdate(ffi::Ffi::Bind().Ctx<CudaStream>()),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace gear_jax
