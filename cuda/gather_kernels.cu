#include <algorithm>
#include <vector>

#include "cuda/gather_device.h"
#include "cuda/gather_kernels.h"
#include "cuda/load_kernels.h"
#include "cuda/warp_copy.cuh"

namespace gear_jax {
namespace {

constexpr int kEntries = 31;  // of a launch

// Columns come first, then masks; tiles are counted over each kind.
struct GatherParams {
  GatherRows rows;
  const int32_t* order;
  const int32_t* ticket;
  int32_t* ticket_out;
  RegistryView registry;
  int32_t columns, count;
  int64_t first_tile[kEntries + 1];       // of columns
  int64_t first_mask_tile[kEntries + 1];  // of masks
  GatherEntry entry[kEntries];
};
// More takes CUDA 12.1 and a driver to match.
static_assert(sizeof(GatherParams) <= 4096, "kernel parameters of CUDA 12.0");

__device__ void MaskTile(const GatherRows& rows, const GatherEntry& entry, int64_t first_unit) {
  const int64_t units = (rows.rows * entry.row_bytes + 15) / 16;
  for (int j = 0; j < kUnroll; ++j) {
    const int64_t unit = first_unit + j * 32 + threadIdx.x % 32;
    if (unit >= units) return;
    int32_t count;
    const Chunk16 value = MaskChunk(rows, entry, unit, &count);
    Store(entry.out + 16 * unit, value, 0, count);
  }
}

// A warp's tile of a column: which chunks of which rows its lane copies.
struct ColumnTile {
  const GatherEntry* entry;
  RowRead read[kUnroll];
  int32_t chunk[kUnroll];  // of the row
};

// `entries`: those of the launch; `e`: the entry of an earlier tile; moves on to this tile's.
__device__ inline ColumnTile ReadTile(const GatherParams& params, const GatherEntry* entries, int64_t tile, int& e) {
  while (tile >= params.first_tile[e + 1]) ++e;
  ColumnTile found;
  found.entry = &entries[e];
  const Divisor& units = found.entry->units;
  const int64_t first_unit = (tile - params.first_tile[e]) * kTileUnits + threadIdx.x % 32;
  int32_t row[kUnroll];
  bool beyond[kUnroll];
#pragma unroll
  for (int j = 0; j < kUnroll; ++j) {
    const int64_t unit = first_unit + j * 32;
    const int64_t i = units.Quotient(unit);
    found.chunk[j] = static_cast<int32_t>(unit - i * units.d);
    // Beyond the last row the last one is read, and not used: with a branch here, each load would wait for the one
    // before.
    const auto last = static_cast<int32_t>(params.rows.rows - 1);
    const int32_t at = i < last ? static_cast<int32_t>(i) : last;
    row[j] = params.order == nullptr ? at : params.order[at];
    beyond[j] = i > last;
  }
#pragma unroll
  for (int j = 0; j < kUnroll; ++j) {
    found.read[j] = params.rows.Read(row[j]);
    if (beyond[j]) found.read[j].row = -1;
  }
  return found;
}

// The loads are all under way before the first is used. `to`: where each chunk goes; null: nowhere.
template <typename Tables>
__device__ inline void StartAligned(const GatherRows& rows, const Tables& tables, const ColumnTile& tile,
                                    Chunk16 (&value)[kUnroll], uint8_t* (&to)[kUnroll]) {
#pragma unroll
  for (int j = 0; j < kUnroll; ++j) {
    const RowRead& read = tile.read[j];
    int64_t offset;
    const uint8_t* from = AlignedSource(rows, *tile.entry, read, tile.chunk[j], &offset, tables);
    const bool there = read.row >= 0 && offset >= 0;
    to[j] = there ? tile.entry->out + read.row * tile.entry->row_bytes + offset : nullptr;
    value[j] = tile.entry->pad;
    LoadIf(there ? from : nullptr, value[j]);
  }
}

// The entries with their tables found, in memory that the block shares.
__device__ inline const GatherEntry* ResolveAll(const GatherParams& params, GatherEntry* found) {
  if (threadIdx.x < params.count) {
    GatherEntry entry = params.entry[threadIdx.x];
    const AddressFault fault = Resolve(params.registry, params.rows, &entry);
    if (fault != AddressFault::kNone) {
      *static_cast<volatile uint64_t*>(params.registry.fault) = PackFault(fault, entry.column);
    }
    found[threadIdx.x] = entry;
  }
  __syncthreads();
  return found;
}

// The entries of ResolveAll with their tables as lists of shards, which `list` holds.
__device__ inline void ListShards(const GatherParams& params, GatherEntry* entries, const uint8_t** list) {
  const int32_t shards = entries[0].shards;
  for (int32_t i = threadIdx.x; i < params.columns * shards; i += blockDim.x) {
    list[i] = ShardBegin(params.rows, entries[i / shards], i % shards);
  }
  __syncthreads();
  if (threadIdx.x < params.columns) {
    entries[threadIdx.x].table = reinterpret_cast<const uint8_t*>(list + threadIdx.x * shards);
  }
  __syncthreads();
}

// What the columns of a launch are: tables of one piece; some by address, which the block looks up once; some in
// shards, and some perhaps by address.
enum class Columns { kTables, kAddressed, kSharded };

template <Columns kColumns>
__device__ inline auto TablesOf(const GatherRows& rows, const GatherEntry* entries) {
  if constexpr (kColumns == Columns::kSharded) {
    return ShardedTables(rows, entries[0].shards);
  } else {
    return WholeTables{};
  }
}

// A warp takes every warps-th tile. It reads the rows' numbers of the next tile while the bytes of this one are under
// way, and between two tiles it writes a piece of the masks, for which other warps' waiting leaves time.
template <bool kAligned, int kThreads, int kBlocksPerMultiprocessor, Columns kColumns = Columns::kTables>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    GatherKernel(const __grid_constant__ GatherParams params) {
  if (params.ticket_out != nullptr && blockIdx.x == 0 && threadIdx.x == 0) params.ticket_out[0] = params.ticket[0];
  const int64_t warps = static_cast<int64_t>(gridDim.x) * (kThreads / 32);
  const int64_t first = (blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x) / 32;
  const int64_t tiles = params.first_tile[params.columns];
  const int64_t mask_tiles = params.first_mask_tile[params.count - params.columns];
  const GatherEntry* entries = params.entry;
  if constexpr (kColumns != Columns::kTables) {
    __shared__ alignas(GatherEntry) uint8_t memory[kEntries * sizeof(GatherEntry)];
    auto* const found = reinterpret_cast<GatherEntry*>(memory);
    entries = ResolveAll(params, found);
    if constexpr (kColumns == Columns::kSharded) {
      __shared__ const uint8_t* shards[kEntries * kMostShards];
      ListShards(params, found, shards);
    }
  }
  const auto tables = TablesOf<kColumns>(params.rows, entries);
  int e = 0, m = 0;
  ColumnTile tile;
  if (first < tiles) tile = ReadTile(params, entries, first, e);
  for (int64_t at = first; at < tiles || at < mask_tiles; at += warps) {
    if (at < tiles) {
      const int64_t next = at + warps;
      if constexpr (kAligned) {
        Chunk16 value[kUnroll];
        uint8_t* to[kUnroll];
        StartAligned(params.rows, tables, tile, value, to);
        if (next < tiles) tile = ReadTile(params, entries, next, e);
#pragma unroll
        for (int j = 0; j < kUnroll; ++j) {
          if (to[j] != nullptr) Store(to[j], value[j], 0, 16);
        }
      } else {
        const ColumnTile now = tile;
        const auto plan = [&](int j) {
          return now.read[j].row < 0 ? ChunkPlan{}
                                     : PlanGather(params.rows, *now.entry, now.read[j], now.chunk[j], tables);
        };
        CopyTile(
            plan,
            [&] {
              if (next < tiles) tile = ReadTile(params, entries, next, e);
            },
            now.entry->pad);
      }
    }
    if (at < mask_tiles) {
      while (at >= params.first_mask_tile[m + 1]) ++m;
      MaskTile(params.rows, entries[params.columns + m], (at - params.first_mask_tile[m]) * kTileUnits);
    }
  }
}

// Columns, then masks.
std::vector<GatherEntry> MakeEntries(const GatherCall& call) {
  std::vector<GatherEntry> entries;
  const auto add = [&](const auto& list) {
    for (size_t k = 0; k < list.size(); ++k) {
      entries.push_back(MakeEntry(call, list[k]));
      entries.back().column = static_cast<int32_t>(k);
    }
  };
  add(call.columns);
  add(call.masks);
  return entries;
}

}  // namespace

cudaError_t LaunchGather(const GatherCall& call, const GatherLaunch& launch, cudaStream_t stream) {
  const std::vector<GatherEntry> entries = MakeEntries(call);
  for (size_t first = 0; first == 0 || first < entries.size(); first += kEntries) {
    GatherParams params{};
    params.rows = {call.rows, call.slots, call.steps, call.slot, call.anchor, call.length};
    params.order = launch.order;
    params.registry = launch.registry;
    if (first == 0) params.ticket = launch.ticket, params.ticket_out = launch.ticket_out;
    bool aligned = true, addressed = false, sharded = false;
    for (size_t i = first; i < std::min(entries.size(), first + kEntries); ++i) {
      params.entry[params.count++] = entries[i];
      aligned = aligned && IsAligned(entries[i]);
      addressed = addressed || entries[i].given == Given::kAddress;
      sharded = sharded || entries[i].given == Given::kShards;
      const int64_t tiles = (Units(call, entries[i]) + kTileUnits - 1) / kTileUnits;
      int64_t* const ends = entries[i].is_mask ? params.first_mask_tile : params.first_tile;
      const int32_t k = entries[i].is_mask ? params.count - params.columns : ++params.columns;
      ends[k] = ends[k - 1] + tiles;
    }
    const int64_t tiles =
        std::max(params.first_tile[params.columns], params.first_mask_tile[params.count - params.columns]);
    if (tiles == 0 && params.ticket_out == nullptr) continue;
    // Few threads a block let more warps onto a multiprocessor: what fills the device's own memory.
    constexpr int kSmall = 256, kSmallBlocks = 3;
    if (sharded || addressed) {
      constexpr Columns kSharded = Columns::kSharded, kAddressed = Columns::kAddressed;
      const auto kernel =
          sharded
              ? (aligned ? GatherKernel<true, kThreads, 1, kSharded> : GatherKernel<false, kThreads, 1, kSharded>)
              : (aligned ? GatherKernel<true, kThreads, 1, kAddressed> : GatherKernel<false, kThreads, 1, kAddressed>);
      kernel<<<Blocks(launch.blocks, tiles, kThreads / 32, 1), kThreads, 0, stream>>>(params);
    } else if (!aligned) {
      GatherKernel<false, kThreads, 1><<<Blocks(launch.blocks, tiles, kThreads / 32, 1), kThreads, 0, stream>>>(params);
    } else if (launch.blocks != 0) {
      GatherKernel<true, kThreads, 1><<<Blocks(launch.blocks, tiles, kThreads / 32, 1), kThreads, 0, stream>>>(params);
    } else {
      GatherKernel<true, kSmall, kSmallBlocks>
          <<<Blocks(0, tiles, kSmall / 32, kSmallBlocks), kSmall, 0, stream>>>(params);
    }
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t LoadGatherKernels() {
  constexpr Columns kSharded = Columns::kSharded;
  return LoadKernels({reinterpret_cast<const void*>(GatherKernel<true, kThreads, 1>),
                      reinterpret_cast<const void*>(GatherKernel<false, kThreads, 1>),
                      reinterpret_cast<const void*>(GatherKernel<true, kThreads, 1, kSharded>),
                      reinterpret_cast<const void*>(GatherKernel<false, kThreads, 1, kSharded>)});
}

}  // namespace gear_jax
