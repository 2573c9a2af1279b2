import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gear_jax.selectors import Permutation
from gear_jax.selectors._permutation import permute
from gear_jax.testing.selectors import check_selector


def walk(draw, selectable, batches, size, seed=0, first_key=0):
    """The slots of so many batches, one after another, and the last state."""
    state = Permutation().init(jax.random.bits(jax.random.key(seed), (4,), "uint32"))
    slots = []
    for i in range(batches):
        (slot, probability, weight), state = draw(
            Permutation(), np.ones(np.shape(selectable)), selectable, size=size, key=first_key + i, state=state
        )
        np.testing.assert_allclose(probability, 1 / np.sum(selectable), rtol=1e-6)
        assert (weight == 1).all()
        slots.append(slot)
    return np.concatenate(slots), state


def test_contract():
    check_selector(Permutation())


def test_every_trajectory_once_an_epoch_across_batches(draw):
    selectable = np.random.default_rng(0).uniform(size=(3, 37)) < 0.2
    there = np.flatnonzero(selectable)
    slots, _ = walk(draw, selectable, batches=3 * len(there) // 8 + 1, size=8)
    epochs = [slots[i * len(there) : (i + 1) * len(there)] for i in range(3)]
    for epoch in epochs:
        np.testing.assert_array_equal(np.sort(epoch), there)
    assert (epochs[0] != epochs[1]).any() and (epochs[1] != epochs[2]).any()


def test_a_batch_of_several_epochs(draw):
    slots, _ = walk(draw, np.ones((1, 5), bool), batches=1, size=22)
    for i in range(4):
        np.testing.assert_array_equal(np.sort(slots[i * 5 : i * 5 + 5]), np.arange(5))
    assert len(set(slots[20:])) == 2


def test_the_order_comes_from_the_key_of_init_and_not_from_that_of_sample(draw):
    selectable = np.ones((2, 20), bool)
    first, _ = walk(draw, selectable, batches=4, size=8)
    other_keys, _ = walk(draw, selectable, batches=4, size=8, first_key=77)
    other_seed, _ = walk(draw, selectable, batches=4, size=8, seed=1)
    np.testing.assert_array_equal(first, other_keys)
    assert (first != other_seed).any()
    in_fives, _ = walk(draw, selectable, batches=8, size=5)  # and not from the batch size
    np.testing.assert_array_equal(first[:32], in_fives[:32])


def test_one_trajectory_and_none(draw):
    only = np.zeros((2, 20), bool)
    only[1, 7] = True
    slots, _ = walk(draw, only, batches=2, size=8)
    assert (slots == 27).all()
    (slot, probability, _), state = draw(Permutation(), np.ones((2, 20)), False)
    assert (slot == -1).all() and (probability == 0).all()
    assert int(state.epoch) == 0 and int(state.position) == 0  # waits where it is


def test_what_leaves_and_arrives_during_an_epoch(draw):
    """Nobody is met twice; who left is not met any more."""
    selectable = np.ones((1, 64), bool)
    before, state = walk(draw, selectable, batches=2, size=8)
    selectable[0, :20] = False
    left = 44 - int((before >= 20).sum())
    (after, _, _), _ = draw(Permutation(), np.ones((1, 64)), selectable, size=64, state=state)
    epoch = np.concatenate([before[before >= 20], after[:left]])
    np.testing.assert_array_equal(np.sort(epoch), np.arange(20, 64))


@pytest.mark.parametrize("bits", [2, 3, 7, 12])
def test_permute_is_a_bijection(bits):
    x = jnp.arange(1 << bits, dtype=jnp.uint32)
    for epoch in (0, 1, 2**32 - 1):
        y = permute(x, bits, jnp.arange(4, dtype=jnp.uint32), jnp.uint32(epoch))
        np.testing.assert_array_equal(np.sort(y), x)


def test_first_places_are_spread_evenly(assert_drawn_by):
    """Over many epochs each number comes first equally often, and each follows each."""
    orders = jax.vmap(lambda e: permute(jnp.arange(16, dtype=jnp.uint32), 4, jnp.arange(4, dtype=jnp.uint32), e))(
        jnp.arange(20_000, dtype=jnp.uint32)
    )
    orders = np.asarray(orders, np.int64)
    for place in (0, 5, 15):
        assert_drawn_by(orders[:, place], np.full(16, 1 / 16))
    pairs = orders[:, 0] * 16 + orders[:, 1]
    assert_drawn_by(pairs, (1 - np.eye(16)).reshape(-1) / 240)
