"""The ops again, in plain jax.numpy: slow, short, and written from the documentation, not from the C++.

Tests compare the two; nothing in the package calls these.
"""

import jax
import jax.numpy as jnp


def window(column, slots, starts, lengths, offset, width, pad="around", pad_value=0, anchored=True):
    """`[B, W, *shape]` and its mask `bool[B, W]`, of one column `[P, S, T, *shape]`."""
    p, s, t = column.shape[:3]
    rows = column.reshape(p * s, t, *column.shape[3:])
    known = (slots >= 0) & (slots < p * s)
    lengths = jnp.where(known, jnp.clip(lengths, 0, t), 0)[:, None]
    step = (starts[:, None] if anchored else 0) + offset + jnp.arange(width)[None]
    mask = (step >= 0) & (step < lengths)
    if pad != "around":
        # Bring the valid steps to one end; a stable sort keeps their order.
        order = jnp.argsort(mask if pad == "head" else ~mask, axis=1, stable=True)
        step, mask = jnp.take_along_axis(step, order, 1), jnp.take_along_axis(mask, order, 1)
    value = rows[jnp.where(known, slots, 0)[:, None], jnp.clip(step, 0, t - 1)]
    shown = mask.reshape(*mask.shape, *[1] * (value.ndim - 2))
    return jnp.where(shown, value, jnp.asarray(pad_value).astype(column.dtype)), mask


def scatter(column, slots, values, lengths, starts, rows=None):
    """One column `[P, S, T, *shape]` after rows `[A, T', *shape]` were written; or `rows` `int32[A]` of `[R, ...]`."""
    p, s, t = column.shape[:3]
    if rows is not None:
        lengths = jnp.where((rows >= 0) & (rows < values.shape[0]), lengths, 0)
        values = jnp.take(values, rows, axis=0, mode="fill", fill_value=0)
    steps = starts[:, None] + jnp.arange(values.shape[1])[None]
    written = (jnp.arange(values.shape[1])[None] < lengths[:, None]) & (steps >= 0) & (steps < t)
    written &= ((slots >= 0) & (slots < p * s))[:, None]
    to = jnp.where(written, slots[:, None], p * s)
    flat = column.reshape(p * s, t, *column.shape[3:]).at[to, steps].set(values, mode="drop")
    return flat.reshape(column.shape)


def stamps(stamp, slots, value):
    """`uint32[P, S]` after rows of `slots` were written, whose values are the same where their slots are."""
    flat = stamp.reshape(-1)
    return flat.at[jnp.where(slots < 0, flat.shape[0], slots)].set(value, mode="drop").reshape(stamp.shape)


def sums(mass):
    """The sum tree's levels over `float32[P, S]`, as `[P, M]`."""
    levels, below = [], mass
    while True:
        below = jnp.pad(below, ((0, 0), (0, -below.shape[1] % 16)))
        child = below.reshape(below.shape[0], -1, 16)
        for half in (8, 4, 2, 1):
            child = child[..., :half] + child[..., half:]
        below = child[..., 0]
        levels.append(jnp.pad(below, ((0, 0), (0, -below.shape[1] % 16))))
        if below.shape[1] == 1:
            return jnp.concatenate(levels, 1)


def probabilities(mass):
    """What `sumtree_sample` draws from: `float32[P * S]`."""
    flat = mass.reshape(-1)
    return flat / jnp.maximum(flat.sum(), jnp.finfo(jnp.float32).tiny)


def drawn_rows(slot, total, mass, length, generation):
    """What `sumtree_sample` says of slots `int32[B]` that it drew from a table of which all is held here.

    Returns partition, probability, length and generation, `[B]` each, and the least probability of each 512 draws. The
    total is less than 2**126.
    """

    def of_slot(x):
        return jnp.where(slot >= 0, x.reshape(-1)[slot], jnp.zeros((), x.dtype))

    probability = of_slot(mass) * (1 / jnp.where(total > 0, total, jnp.ones_like(total)))
    positive = jnp.where(probability > 0, probability, jnp.inf)
    groups = jnp.pad(positive, (0, -positive.shape[0] % 512), constant_values=jnp.inf).reshape(-1, 512)
    partition = jnp.where(slot >= 0, slot // mass.shape[1], jnp.full_like(slot, -1))
    return partition, probability, of_slot(length), of_slot(generation), groups.min(1)


def last_write(values, slots, new):
    """`[C]` after writes in order: of several writes to a slot the last one stays; slots outside are skipped."""

    def write(values, row):
        slot, x = row
        inside = (slot >= 0) & (slot < values.shape[0])
        return values.at[jnp.where(inside, slot, values.shape[0])].set(x, mode="drop"), None

    return jax.lax.scan(write, values, (slots, new))[0]
