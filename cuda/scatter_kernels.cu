#include <algorithm>

#include "cuda/load_kernels.h"
#include "cuda/scatter_device.h"
#include "cuda/scatter_kernels.h"
#include "cuda/warp_copy.cuh"

namespace gear_jax {
namespace {

constexpr int kEntries = 32;  // of a launch

struct ScatterParams {
  ScatterRows rows;
  int32_t count;
  int64_t first_tile[kEntries + 1];
  ScatterEntry entry[kEntries];
};
static_assert(sizeof(ScatterParams) <= 4096, "kernel parameters of CUDA 12.0");

__global__ void __launch_bounds__(kThreads) ScatterKernel(const __grid_constant__ ScatterParams params) {
  const int64_t warps = static_cast<int64_t>(gridDim.x) * (kThreads / 32);
  int e = 0;
  for (int64_t tile = (blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x) / 32;
       tile < params.first_tile[params.count]; tile += warps) {
    while (tile >= params.first_tile[e + 1]) ++e;
    const ScatterEntry& entry = params.entry[e];
    const int64_t first_unit = (tile - params.first_tile[e]) * kTileUnits + threadIdx.x % 32;
    const auto plan = [&](int j) {
      const int64_t unit = first_unit + j * 32;
      const int64_t row = entry.units.Quotient(unit);
      if (row >= params.rows.rows) return ChunkPlan{};
      return PlanScatter(params.rows, entry, row, unit - row * entry.units.d);
    };
    CopyTile(plan, [] {}, Chunk16{});
  }
}

}  // namespace

cudaError_t LaunchScatter(const ScatterCall& call, int blocks, cudaStream_t stream) {
  for (size_t first = 0; first < call.columns.size(); first += kEntries) {
    ScatterParams params{};
    params.rows = RowsOf(call);
    for (size_t i = first; i < std::min(call.columns.size(), first + kEntries); ++i) {
      const ScatterEntry entry = MakeEntry(call, call.columns[i]);
      const int64_t tiles = (Units(call, entry) + kTileUnits - 1) / kTileUnits;
      params.entry[params.count] = entry;
      params.first_tile[params.count + 1] = params.first_tile[params.count] + tiles;
      ++params.count;
    }
    const int64_t tiles = params.first_tile[params.count];
    if (tiles == 0) continue;
    ScatterKernel<<<Blocks(blocks, tiles, kThreads / 32, 2), kThreads, 0, stream>>>(params);
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t LoadScatterKernels() { return LoadKernels({reinterpret_cast<const void*>(ScatterKernel)}); }

}  // namespace gear_jax
