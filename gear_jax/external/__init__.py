"""Memory that gathers read by address: shards of JAX's own arrays, and tables that JAX did not allocate.

`addresses(array)` gives the addresses of an array's shards, for programs that cannot take the array itself: `jax.pmap`
takes no array in `pinned_host`, and no program takes another device's shard. `from_buffer(buffer, shape, dtype)` makes
memory of other origin (shared memory, a mapped file) a table: a `jax.Array` over it, and its addresses. Both go where a
column goes in `gear_jax.ops.gather`.

On a GPU the memory must be page-locked host memory. Arrays in `pinned_host` are; other memory is page-locked through
CuPy, which `from_buffer` needs there.

A table may be freed while addresses of it are still about: a gather then fails, and touches nothing. What that needs is
that memory is given up through this module: close what `from_buffer` returned before the memory itself goes.
"""

from gear_jax.external._arrays import addresses, renew
from gear_jax.external._buffer import External, from_buffer
from gear_jax.external._registration import check
from gear_jax.ops import Addresses

__all__ = ["Addresses", "External", "addresses", "check", "from_buffer", "renew"]
