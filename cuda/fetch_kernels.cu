#include <algorithm>

#include "cuda/fetch_kernels.h"
#include "cuda/load_kernels.h"
#include "cuda/warp_copy.cuh"

namespace gear_jax {
namespace {

constexpr int kRowThreads = 256;

int RowBlocks(int64_t rows) {
  return static_cast<int>(std::clamp<int64_t>((rows + kRowThreads - 1) / kRowThreads, 1, 256));
}

__device__ uint32_t LoadOfHost(const uint32_t* from) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(__cvta_generic_to_global(from)) : "memory");
  return value;
}

__global__ void IdsKernel(const __grid_constant__ FetchIds ids) {
  const int64_t step = gridDim.x * static_cast<int64_t>(blockDim.x);
  for (int64_t row = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; row < ids.rows; row += step) {
    const int32_t own = OwnSlot(ids, row);
    ids.own_slot[row] = own;
    ids.before[row] = own < 0 ? 0 : LoadOfHost(OwnStamp(ids, own));
#pragma unroll
    for (int i = 0; i < 4; ++i) ids.id_out[i][row] = ids.id[i][row];
    if (ids.generation != nullptr) ids.generation_out[row] = ids.generation[row];
  }
}

__global__ void StampsKernel(const __grid_constant__ FetchIds ids) {
  const int64_t step = gridDim.x * static_cast<int64_t>(blockDim.x);
  for (int64_t row = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; row < ids.rows; row += step) {
    const int32_t own = ids.own_slot[row];
    ids.after[row] = own < 0 ? 0 : LoadOfHost(OwnStamp(ids, own));
  }
}

constexpr int kParts = 32;  // of a launch

struct RowsParams {
  const uint8_t* take;
  int64_t rows;
  int32_t count;
  int64_t first_tile[kParts + 1];
  TakenPart part[kParts];
};
static_assert(sizeof(RowsParams) <= 4096, "kernel parameters of CUDA 12.0");

__global__ void __launch_bounds__(kThreads) RowsKernel(const __grid_constant__ RowsParams params) {
  const int64_t warps = static_cast<int64_t>(gridDim.x) * (kThreads / 32);
  int p = 0;
  for (int64_t tile = (blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x) / 32;
       tile < params.first_tile[params.count]; tile += warps) {
    while (tile >= params.first_tile[p + 1]) ++p;
    const TakenPart& part = params.part[p];
    const int64_t first_unit = (tile - params.first_tile[p]) * kTileUnits + threadIdx.x % 32;
    const auto plan = [&](int j) {
      const int64_t unit = first_unit + j * 32;
      const int64_t row = part.units.Quotient(unit);
      if (row >= params.rows || params.take[row] == 0) return ChunkPlan{};
      return PlanTaken(part, row, unit - row * part.units.d);
    };
    CopyTile(plan, [] {}, Chunk16{});
  }
}

}  // namespace

cudaError_t LaunchFetchIds(const FetchIds& ids, cudaStream_t stream) {
  IdsKernel<<<RowBlocks(ids.rows), kRowThreads, 0, stream>>>(ids);
  return cudaGetLastError();
}

cudaError_t LaunchFetchStamps(const FetchIds& ids, cudaStream_t stream) {
  StampsKernel<<<RowBlocks(ids.rows), kRowThreads, 0, stream>>>(ids);
  return cudaGetLastError();
}

cudaError_t LaunchFetchRows(const std::vector<TakenPart>& parts, const uint8_t* take, int64_t rows, int blocks,
                            cudaStream_t stream) {
  for (size_t first = 0; first < parts.size(); first += kParts) {
    RowsParams params{};
    params.take = take;
    params.rows = rows;
    for (size_t i = first; i < std::min(parts.size(), first + kParts); ++i) {
      const int64_t units = parts[i].row_bytes > 0 ? rows * parts[i].units.d : 0;
      params.part[params.count] = parts[i];
      params.first_tile[params.count + 1] = params.first_tile[params.count] + (units + kTileUnits - 1) / kTileUnits;
      ++params.count;
    }
    const int64_t tiles = params.first_tile[params.count];
    if (tiles == 0) continue;
    RowsKernel<<<Blocks(blocks, tiles, kThreads / 32, 2), kThreads, 0, stream>>>(params);
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t LoadFetchKernels() {
  return LoadKernels({reinterpret_cast<const void*>(IdsKernel), reinterpret_cast<const void*>(StampsKernel),
                      reinterpret_cast<const void*>(RowsKernel)});
}

}  // namespace gear_jax
