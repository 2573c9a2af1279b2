"""Selectors: one interface, one file for each strategy. They decide which trajectories a sample takes (and, as
`make_replay(eviction=...)`, which an insertion displaces)."""

from gear_jax.selectors._base import Index, Ranked, Selection, Selector
from gear_jax.selectors._fifo import Fifo
from gear_jax.selectors._lifo import Lifo
from gear_jax.selectors._lowest_priority import LowestPriority
from gear_jax.selectors._permutation import Permutation
from gear_jax.selectors._prioritized import Prioritized
from gear_jax.selectors._queue import Queue
from gear_jax.selectors._stack import Stack
from gear_jax.selectors._topk import TopK
from gear_jax.selectors._uniform import Uniform

__all__ = [
    "Fifo",
    "Index",
    "Lifo",
    "LowestPriority",
    "Permutation",
    "Prioritized",
    "Queue",
    "Ranked",
    "Selection",
    "Selector",
    "Stack",
    "TopK",
    "Uniform",
]
