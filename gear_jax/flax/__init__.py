"""The replay table inside Flax modules: `LinenReplay` (Linen) and `NNXReplay` (NNX).

Both hold a `gear_jax.ReplayState` and have the methods of `gear_jax.Replay` without the state among their
arguments. The table is no parameter: Linen keeps it in a collection of its own (`COLLECTION`, "replay"), NNX in a
`ReplayVariable`, so gradients, optimizers and `nnx.Param` filters pass it by. Methods may be called in a function
that is being differentiated: what they are given (priorities formed from a loss, say) counts as constant.

What a jitted step does to the table is in place only if the step donates it:

    jax.jit(step, donate_argnums=...)    # Linen: the argument that holds variables["replay"]
    nnx.jit(step, donate_argnums=...)    # NNX: the argument that is (or holds) the module
"""

from gear_jax.flax._linen import COLLECTION, LinenReplay
from gear_jax.flax._nnx import NNXReplay, ReplayVariable

__all__ = ["COLLECTION", "LinenReplay", "NNXReplay", "ReplayVariable"]
