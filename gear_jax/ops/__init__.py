"""The jittable primitives. They take arrays and integers only: no specs, no mesh.

Each runs from one target name on every platform, has an independent reference in `gear_jax.ops._reference`, and states
what it does under vmap.
"""

from gear_jax.ops._addresses import Addresses
from gear_jax.ops._gather import gather, gather_rows
from gear_jax.ops._gather_engine import stats
from gear_jax.ops._gather_start import Pending, gather_done, gather_start, release_queue
from gear_jax.ops._pointers import Shards, pointers
from gear_jax.ops._rdma import ON_LOSS, Remote, rdma_counters, rdma_fetch, rdma_fetch_done, rdma_fetch_start, rdma_read
from gear_jax.ops._registry import check_platform, new_ticket
from gear_jax.ops._scatter import scatter, scatter_rows, seal
from gear_jax.ops._sumtree import Draws, sumtree_roots, sumtree_sample, sumtree_sums, sumtree_update, sumtree_width
from gear_jax.ops._zeros import zeros

__all__ = [
    "ON_LOSS",
    "Addresses",
    "Draws",
    "Pending",
    "Remote",
    "Shards",
    "check_platform",
    "gather",
    "gather_done",
    "gather_rows",
    "gather_start",
    "new_ticket",
    "pointers",
    "rdma_counters",
    "rdma_fetch",
    "rdma_fetch_done",
    "rdma_fetch_start",
    "rdma_read",
    "release_queue",
    "scatter",
    "scatter_rows",
    "seal",
    "stats",
    "sumtree_roots",
    "sumtree_sample",
    "sumtree_sums",
    "sumtree_update",
    "sumtree_width",
    "zeros",
]
