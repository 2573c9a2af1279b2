"""What the programs of a table over a mesh hold: no copy, no all-gather of a column, few collectives, little moved."""

import collections
import math
import re

import jax
import numpy as np
import pytest

import gear_jax as gear
from gear_jax import selectors

COLLECTIVE = re.compile(
    r" (all-gather|all-reduce|all-to-all|ragged-all-to-all|collective-permute|reduce-scatter)[-a-z]*\("
)


def text_of(f, *args):
    return jax.jit(f, donate_argnums=0).lower(*args).compile().as_text()


def collectives(text):
    return collections.Counter(COLLECTIVE.findall(text))


def first(case):
    _, rows, lengths, priorities = next(t for t in case.turns() if t[3] is not None)
    return rows, lengths, priorities


@pytest.mark.parametrize(("selector", "options"), [
    (selectors.Prioritized(), {"exchange": "peer"}),
    (selectors.Prioritized(), {"exchange": "collective"}),
    (selectors.Permutation(), {"exchange": "collective"}),
    (selectors.Prioritized(), {"exchange": "rdma"}),
    (selectors.Prioritized(), {"selection": "decentralized"}),
], ids=str)  # fmt: skip
def test_no_column_is_copied_or_gathered(case, memory, options, selector):
    if jax.default_backend() == "gpu" and memory == "device" and options.get("exchange") in ("peer", "rdma"):
        pytest.skip("columns in a GPU's own memory have no peers")
    replay = case.make(case.mesh(4), selector=selector, memory=memory, **options)
    state, (rows, lengths, _) = replay.init(), first(case)

    def step(state, key):
        state, _ = replay.add(state, rows, lengths)
        state, sample = replay.sample(state, key, 16)
        state = replay.update_priorities(state, sample.handles, sample.probability)
        state, _ = replay.add(state, rows, lengths)
        return replay.sample(state, key, 16)

    gear.assert_in_place(step, state, jax.random.key(0))
    gear.assert_in_place(lambda s, k: jax.lax.scan(step, s, jax.random.split(k, 3)), state, jax.random.key(0))
    pointers = [x.data.unsafe_buffer_pointer() for x in state.columns["vector"].addressable_shards]
    state, _ = jax.jit(step, donate_argnums=0)(state, jax.random.key(0))
    assert [x.data.unsafe_buffer_pointer() for x in state.columns["vector"].addressable_shards] == pointers


def test_assert_in_place_sees_a_copied_shard(case):
    replay = case.make(case.mesh(4))

    def step(state):
        return jax.tree.map(lambda x: x + np.ones((), x.dtype), state.columns)

    with pytest.raises(ValueError, match="assert_in_place: column 'number'"):
        gear.assert_in_place(step, replay.init())


def test_insertion_does_not_communicate(case):
    replay = case.make(case.mesh(4))
    state, (rows, lengths, priorities) = replay.init(), first(case)
    assert not collectives(text_of(lambda s: replay.add(s, rows, lengths), state))
    # One number: the largest priority seen.
    text = text_of(lambda s: replay.add(s, rows, lengths, priorities), state)
    assert collectives(text) == {"all-reduce": 1}
    assert re.search(r"= f32\[\] all-reduce", text)


def test_what_selection_exchanges_does_not_grow_with_the_table(case):
    """P roots, and what was drawn: no row of the index but those of the batch."""
    for capacity in (64, 4096):
        table = gear.TableSpec(case.table.columns, case.steps, capacity)
        replay = gear.make_replay(table, selectors.Prioritized(), mesh=case.mesh(4), exchange="peer")
        text = text_of(lambda s, r=replay: r.sample(s, jax.random.key(0), 16), replay.init())
        sizes = [
            math.prod(map(int, shape.split(","))) if shape else 1
            for shape in re.findall(r"= [a-z0-9]+\[([\d,]*)\]\S* (?:all-gather|all-reduce)[-a-z]*\(", text)
        ]
        # P roots; slot and probability, length and generation of each row; n pointers of 2 columns; n tickets.
        assert sizes and max(sizes) <= 4 * 16, sizes


def test_decentralized_selection_exchanges_one_number_at_most(case):
    options = {"selection": "decentralized"}
    state = case.make(case.mesh(4), **options).init()
    for selector, wanted in ((selectors.Prioritized(), {"all-reduce": 1}), (selectors.Uniform(), {})):
        replay = case.make(case.mesh(4), selector=selector, **options)
        text = text_of(lambda s, r=replay: r.sample(s, jax.random.key(0), 16), state)
        assert collectives(text) == wanted


@pytest.mark.cpu
def test_bytes_of_the_padded_exchange(case):
    """Per turn each device sends about 1.5 times its share; a batch that falls evenly takes one turn."""
    replay = gear.make_replay(
        gear.TableSpec({"x": gear.ColumnSpec((100,), np.float32)}, 5, 64), mesh=case.mesh(4), exchange="collective"
    )
    text = text_of(lambda s: replay.sample(s, jax.random.key(0), 64), replay.init())
    moved = [math.prod(map(int, shape.split(","))) for shape in re.findall(r"f32\[([\d,]+)\]\S* all-to-all", text)]
    assert moved and max(moved) <= 1.5 * 16 * 5 * 100 + 4 * 2 * 5 * 100, moved


def test_rows_that_are_read_travel_by_no_collective(case):
    """What does is the sums of the blocks, 16 bytes for each row that is drawn, and the barrier."""
    replay = case.make(case.mesh(4), exchange="rdma")
    text = text_of(lambda s: replay.sample(s, jax.random.key(0), 64), replay.init())
    moved = [math.prod(map(int, shape.split(","))) for shape in re.findall(r"\w+\[([\d,]+)\]\S* all-\w+\(", text)]
    assert collectives(text)["all-to-all"] == 0 and moved and max(moved) <= 4 * 64, moved


@pytest.mark.parametrize("exchange", ["peer", "rdma"])
@pytest.mark.parametrize(
    "what", [lambda s: s, lambda s: s.data, lambda s: s.data["number"]], ids=["all", "data", "column"]
)
def test_who_drops_the_state_keeps_the_barrier(case, what, exchange):
    """Else a device could end its program, and write its columns in the next, while others still read them."""
    replay = case.make(case.mesh(4), exchange=exchange)
    state = replay.init()
    whole = collectives(text_of(lambda s: replay.sample(s, jax.random.key(0), 16), state))
    dropped = text_of(lambda s: what(replay.sample(s, jax.random.key(0), 16)[1]), state)
    assert re.search(r"s32\[1\]\S* all-reduce", dropped)
    assert collectives(dropped) == whole
