"""`gear_jax.testing.check_selector` on selectors that read their rows themselves, leave that to the table, or lie."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gear_jax as gear
from gear_jax.selectors import Selection, Selector, Uniform
from gear_jax.testing.selectors import check_selector


@dataclasses.dataclass(frozen=True)
class Own(Selector):
    """Draws as `Uniform` does, and changes what it says of the rows: a field's name, or "nothing" to say nothing."""

    wrong: str = "nothing"

    def mass(self, priority, selectable):
        return Uniform().mass(priority, selectable)

    def select(self, state, index, key, batch_size, axis=None):
        got, state = Uniform().select(state, index, key, batch_size, axis)
        if self.wrong == "nothing":
            return Selection(got.slot, got.probability), state
        if self.wrong == "ticket":
            return got._replace(ticket=None), state
        x = getattr(got, self.wrong)
        return got._replace(**{self.wrong: x + jnp.ones((), x.dtype)}), state


def test_a_selector_may_leave_the_rows_to_the_table():
    check_selector(Own())


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ("length", "length is not that of the slot"),
        ("generation", "generation is not that of the slot"),
        ("found", "found is not the number"),
        ("least", "least is .* not the least probability"),
        ("ticket", "all or none"),
    ],
)
def test_what_a_selector_says_of_its_rows_is_checked(wrong, text):
    with pytest.raises(AssertionError, match=text):
        check_selector(Own(wrong))


def test_samples_are_the_same_whoever_reads_the_rows():
    table = gear.TableSpec({"a": gear.ColumnSpec((), jnp.int32)}, 4, 16)
    lengths = jnp.arange(12, dtype=jnp.int32) % 5
    samples, stats = [], []
    for selector in (Uniform(), Own()):
        replay = gear.make_replay(table, selector)
        state = replay.init()
        state, _ = replay.add(state, {"a": jnp.arange(48, dtype=jnp.int32).reshape(12, 4)}, lengths)
        state, sample = replay.sample(state, jax.random.key(1), 20)
        samples.append(sample)
        stats.append(replay.stats(state))
    jax.tree.map(np.testing.assert_array_equal, *samples)
    assert stats[0] == stats[1] and stats[0]["sampled"] == 20
