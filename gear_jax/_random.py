"""Random words for draws.

`jax.random.bits` walks through Threefry's rounds in a loop, a pass over the batch for each; here they are unrolled, so
that XLA makes one pass of them. Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011),
Threefry-2x32 with 20 rounds.
"""

import jax
import jax.numpy as jnp
import numpy as np

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)
# The high counter word: no counter that jax.random uses itself, so that a key split elsewhere gives other words.
_DOMAIN = 0x67656172


def fold(key: jax.Array) -> jax.Array:
    """A key, typed or legacy, of any implementation, as `uint32[2]`."""
    data = jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key
    folded = data[:2]
    for i in range(2, data.shape[0], 2):  # not by xor: the halves of an "rbg" key are the same
        folded = jnp.stack(threefry(folded[0], folded[1], data[i], data[i + 1]))
    return folded


def words(key: jax.Array, stream: int, n: int) -> jax.Array:
    """`uint32[n, 2]`, random words of a key; each `stream` (a small number) has words of its own.

    Args:
      key: one `jax.random` key, typed or legacy, of any implementation.
      stream: which words; stream 0 is what `ops.sumtree_sample` makes of `fold(key)`.
      n: how many pairs.
    """
    k0, k1 = fold(key)
    counters = jnp.full((n,), _DOMAIN + stream, jnp.uint32), jnp.arange(n, dtype=jnp.uint32)
    return jnp.stack(threefry(k0, k1, *counters), -1)


def threefry(k0: jax.Array, k1: jax.Array, x0: jax.Array, x1: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32-20 of counters `uint32[n]` under a key of two `uint32[]`."""
    keys = (k0, k1, k0 ^ k1 ^ _PARITY)
    x0, x1 = x0 + keys[0], x1 + keys[1]
    for i in range(5):
        for r in _ROTATIONS[i % 2]:
            x0 = x0 + x1
            x1 = (x1 << np.uint32(r)) | (x1 >> np.uint32(32 - r))
            x1 = x1 ^ x0
        x0 = x0 + keys[(i + 1) % 3]
        x1 = x1 + keys[(i + 2) % 3] + np.uint32(i + 1)
    return x0, x1


def below(word: jax.Array, limit: jax.Array) -> jax.Array:
    """Integers in [0, limit): `uint32[...]` random words and `int32[...]` limits, at least 1, to `int32[...]`.

    The high half of the 64-bit product; no number is likelier than another by more than limit / 2**32.
    """
    limit = limit.astype(jnp.uint32)
    low, high = word & np.uint32(0xFFFF), word >> np.uint32(16)
    limit_low, limit_high = limit & np.uint32(0xFFFF), limit >> np.uint32(16)
    middle = high * limit_low + ((low * limit_low) >> np.uint32(16))
    carry = low * limit_high + (middle & np.uint32(0xFFFF))
    product = high * limit_high + (middle >> np.uint32(16)) + (carry >> np.uint32(16))
    return product.astype(jnp.int32)
