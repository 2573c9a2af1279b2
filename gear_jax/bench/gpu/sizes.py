"""How large tables and batches are, and how long a row is timed."""

import dataclasses

MIB = 1 << 20
GIB = 1 << 30
SPAN_BYTES = 16 * GIB
"""A table of this size at least is asked for where the translation of addresses is what limits a gather."""

BATCH_BYTES = 64 * MIB
"""A batch of this size at least is asked for where the speed of the link is what is measured."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """One of "full", "quick" and "tiny".

    Attributes:
      name: its name.
      limit: seconds after which no further row is begun.
      rounds: repetitions; the median counts.
      seconds: length of a repetition, about.
      copy_bytes, copies: of `cudaMemcpy`, and how many in a repetition.
      main, cell_bytes: slots and steps of the main table, and the bytes of a step.
      row_steps, batch_bytes: steps of the windows that are gathered from it, and bytes of a batch.
      engine_steps: steps of the windows that the kernel and the copy engines gather from it.
      beside: width of the matmul that runs beside them, and how many in a row.
      small: slots and steps of the table with steps of 256 bytes.
      windows, context, window_batch: slots and steps of a Decision Transformer's table, K, and B of its windows.
      short_batches, long_batches: B of whole trajectories, of that table and of the main one.
      scan_batches, scan, scan_slots: B of whole trajectories in a scan, its length, and slots of the replay.
      odd_bytes, odd_windows: bytes of each table with steps of 17, 16 and 3 bytes, and of a window, about.
      inserted: trajectories of a batch, of the main table and of the Decision Transformer's.
      guard_slots: slots of `cell_bytes` in the column that must not be copied.
      latency: slots of `cell_bytes`, B, and calls.
      hbm_bytes, hbm_rows: bytes of a table in the GPU's memory, and of its rows.
      priorities, priority_batch: numbers of trajectories, and B.
      mesh_devices: numbers of devices, where there are so many.
      mesh: slots and steps of `cell_bytes` of each device's shard, and its B.
      mesh_selection: capacity of a device, and B, where selection alone is timed.
      remote: rows of the table that each of two processes has, their bytes, B, and width of the matmul beside a fetch.
      peer_bytes: what a peer holds in the GPU's memory.
      train: slots of the replay, width and layers of the model, B, and steps of a repetition.
    """

    name: str
    limit: float
    rounds: int
    seconds: float
    copy_bytes: int
    copies: int
    cell_bytes: int
    main: tuple[int, int]
    row_steps: tuple[int, ...]
    batch_bytes: tuple[int, ...]
    engine_steps: tuple[int, ...]
    beside: tuple[int, int]
    small: tuple[int, int]
    windows: tuple[int, int]
    context: int
    window_batch: int
    short_batches: tuple[int, ...]
    long_batches: tuple[int, ...]
    scan_batches: tuple[int, ...]
    scan: int
    scan_slots: int
    odd_bytes: int
    odd_windows: tuple[int, ...]
    inserted: tuple[int, int]
    guard_slots: int
    latency: tuple[int, int, int]
    hbm_bytes: int
    hbm_rows: tuple[int, ...]
    priorities: tuple[int, ...]
    priority_batch: int
    mesh_devices: tuple[int, ...]
    mesh: tuple[int, int, int]
    mesh_selection: tuple[int, int]
    remote: tuple[int, int, int, int]
    peer_bytes: int
    train: tuple[int, int, int, int, int]


FULL = Sizes(
    name="full",
    limit=240.0,
    rounds=5,
    seconds=0.08,
    copy_bytes=256 * MIB,
    copies=4,
    cell_bytes=4096,
    main=(512, 3072),  # 12.6 MB a trajectory, 6 GiB
    row_steps=(1, 4, 16, 256),
    batch_bytes=(BATCH_BYTES, 4 * BATCH_BYTES),
    engine_steps=(1, 16, 64, 128, 256, 1024, 3072),  # 4 KiB to 12.6 MB
    beside=(8192, 8),
    small=(1 << 24, 4),  # 16 GiB
    windows=(270_000, 1000),  # 64 KB a trajectory, 16.1 GiB
    context=20,
    window_batch=65_536,
    short_batches=(32, 64, 128, 256, 512, 1024),
    long_batches=(32, 64, 128, 256, 512, 1024),
    scan_batches=(32, 128),
    scan=64,
    scan_slots=8192,
    odd_bytes=GIB,
    odd_windows=(4096, 65_536),
    inserted=(8, 1120),  # 101 MB and 67 MB
    guard_slots=1 << 18,  # 1 GiB
    latency=(1 << 17, 256, 2000),
    hbm_bytes=4 * GIB,
    hbm_rows=(4096, 256),
    priorities=(1_000_000, 10_000_000),
    priority_batch=65_536,
    mesh_devices=(1, 2, 4, 8),
    mesh=(1 << 16, 16, 1024),  # 64 KiB a trajectory, 4 GiB and 64 MiB a batch each
    mesh_selection=(250_000, 4096),
    remote=(8192, 40_960, 256, 4096),  # 336 MB each, 10 MB a fetch
    peer_bytes=GIB,
    train=(1 << 17, 4096, 2, 16_384, 12),
)
QUICK = dataclasses.replace(
    FULL,
    name="quick",
    limit=40.0,
    rounds=3,
    seconds=0.03,
    copies=2,
    main=(64, 3072),
    row_steps=(1, 16),
    batch_bytes=(BATCH_BYTES,),
    engine_steps=(16, 256, 3072),
    small=(1 << 20, 4),
    windows=(16_000, 1000),
    short_batches=(64, 1024),
    long_batches=(32,),
    scan_batches=(32,),
    scan_slots=1024,
    odd_bytes=GIB // 4,
    odd_windows=(4096,),
    guard_slots=1 << 16,
    latency=(1 << 14, 256, 500),
    hbm_bytes=GIB,
    priorities=(1_000_000,),
    mesh=(1 << 14, 16, 1024),
    remote=(4096, 10_240, 64, 2048),
    peer_bytes=GIB // 4,
    train=(1 << 15, 4096, 2, 16_384, 6),
)
TINY = Sizes(
    name="tiny",
    limit=600.0,
    rounds=2,
    seconds=0.0,
    copy_bytes=MIB,
    copies=1,
    cell_bytes=64,
    main=(8, 48),
    row_steps=(1, 4),
    batch_bytes=(4096,),
    engine_steps=(1, 48),
    beside=(32, 1),
    small=(512, 4),
    windows=(32, 40),
    context=5,
    window_batch=64,
    short_batches=(4, 8),
    long_batches=(2,),
    scan_batches=(4,),
    scan=3,
    scan_slots=16,
    odd_bytes=1 << 15,
    odd_windows=(256,),
    inserted=(2, 3),
    guard_slots=64,
    latency=(64, 8, 5),
    hbm_bytes=1 << 16,
    hbm_rows=(64, 16),
    priorities=(3000,),
    priority_batch=512,
    mesh_devices=(1, 2),
    mesh=(64, 4, 8),
    mesh_selection=(64, 16),
    remote=(64, 128, 4, 32),
    peer_bytes=1 << 14,
    train=(64, 32, 2, 16, 2),
)
