"""Where rows go and what they displace, against row-by-row models in Python."""

import collections

import jax
import numpy as np
import pytest

from gear_jax.selectors import Fifo, LowestPriority, TopK
from gear_jax.testing.ops import to_numpy


@pytest.mark.parametrize("partitions", [1, 2, 4, 8])
def test_the_rule_of_placement(make, rows, model, pairs, partitions):
    """Row a of A goes to partitions floor(aP/A) ... floor((a+1)P/A) - 1, the one with the fewest insertions."""
    replay = make(partitions=partitions, capacity=16)
    rng = np.random.default_rng(partitions)
    state, reference, number = replay.init(), model(partitions, 16 // partitions), 0
    sizes = [1, 3, 8, 21]  # fewer than P, not a divisor, P, more than there is room for
    for a in rng.permutation(sizes * 4).tolist():
        lengths = rng.integers(0, 6, a) * (rng.uniform(size=a) < 0.8)  # some rows are skipped
        ids = list(range(number, number + a))
        state, handles = replay.add(state, rows(ids), lengths.astype(np.int32))
        assert pairs(handles) == reference.add(ids, lengths.tolist())
        reference.check(replay, state)
        number += a


@pytest.mark.parametrize("partitions", [1, 2])
def test_eviction_is_first_in_first_out_within_a_partition(make, rows, partitions):
    replay = make(partitions=partitions)
    s = 8 // partitions
    queues = [collections.deque(maxlen=s) for _ in range(partitions)]
    state = replay.init()
    for turn in range(9):
        ids = [turn * 3 + i for i in range(3)]
        state, _ = replay.add(state, rows(ids), np.full(3, 5, np.int32))
        for a, i in enumerate(ids):
            # For P = 2, A = 3: rows 0 and 1 to partition 0, row 2 to partition 1.
            queues[a * partitions // 3].append(i)
        held = to_numpy(state.columns)["number"][:, :, 0] // 100
        length = np.asarray(state.length)
        for p in range(partitions):
            assert sorted(held[p][length[p] > 0].tolist()) == sorted(queues[p])


def test_one_row_at_a_time_goes_round_the_partitions(make, rows):
    replay = make(partitions=4)
    state, slots = replay.init(), []
    for i in range(10):
        state, handles = replay.add(state, rows([i]), np.array([1], np.int32))
        slots.append(int(handles.slot[0]))
    assert slots == [0, 2, 4, 6, 1, 3, 5, 7, 0, 2]


def test_the_fewest_insertions_are_found_beyond_32_bits(make, rows):
    """Counts far apart, some past 2**32: they are compared as 64-bit numbers."""
    replay = make(partitions=4)
    state = replay.init()
    words = np.asarray(state.counters).copy()
    words[:, 0] = [[1, 0], [0, 2**32 - 1], [0, 2**32 - 2], [2, 5]]
    state = state.replace(counters=jax.numpy.asarray(words))
    slots = []
    for i in range(4):
        state, handles = replay.add(state, rows([i]), np.array([1], np.int32))
        slots.append(int(handles.slot[0]) // 2)
    assert slots == [2, 1, 2, 0]


def test_a_batch_larger_than_the_table_keeps_the_last_rows(make, rows):
    replay = make()
    state, handles = replay.add(replay.init(), rows(range(21)), np.full(21, 2, np.int32))
    assert (np.asarray(handles.slot)[:13] == -1).all() and (np.asarray(handles.generation)[:13] == 0).all()
    assert sorted(np.asarray(handles.slot)[13:].tolist()) == list(range(8))
    held = to_numpy(state.columns)["number"][0, :, 0] // 100
    np.testing.assert_array_equal(held[np.asarray(handles.slot)[13:]], np.arange(13, 21))
    got = replay.stats(state)
    assert (got["inserted"], got["evicted"], got["trajectories"]) == (21, 13, 8)


def test_a_batch_larger_than_each_partition_keeps_the_last_of_each(make, rows):
    replay = make(partitions=4)
    _, handles = replay.add(replay.init(), rows(range(21)), np.full(21, 2, np.int32))
    partition = np.arange(21) * 4 // 21
    for p in range(4):
        slots = np.asarray(handles.slot)[partition == p]
        assert (slots[:-2] == -1).all() and sorted(slots[-2:].tolist()) == [2 * p, 2 * p + 1]


@pytest.mark.parametrize("partitions", [1, 2])
def test_lowest_priority_eviction(make, rows, partitions):
    replay = make(eviction=LowestPriority(), partitions=partitions)
    s = 8 // partitions
    rng = np.random.default_rng(0)
    state, held, inserted = replay.init(), {}, [0] * partitions  # held: slot -> priority
    for turn in range(12):
        # Priorities that differ, but for some zeros, one of them negative.
        priority = np.float32(0 if turn % 5 == 3 else -0.0 if turn % 5 == 1 else 1 + rng.permutation(99)[0])
        state, handles = replay.add(state, rows([turn]), np.array([2], np.int32), np.array([priority]))
        p = min(range(partitions), key=lambda p: (inserted[p], p))
        inserted[p] += 1
        mine = {c: v for c, v in held.items() if c // s == p}
        free = [c for c in range(p * s, p * s + s) if c not in held]
        wanted = free[0] if free else min(mine, key=lambda c: (mine[c], c))
        assert int(handles.slot[0]) == wanted, turn
        held[wanted] = abs(priority)


def test_lowest_priority_eviction_of_a_batch(make, rows):
    replay = make(eviction=LowestPriority())
    priorities = np.array([5, 1, 4, 0, 3, 7, 6, 2], np.float32)
    state, _ = replay.add(replay.init(), rows(range(8)), np.full(8, 2, np.int32), priorities)
    state, handles = replay.add(state, rows([20, 21, 22]), np.array([2, 0, 2], np.int32))
    assert handles.slot.tolist() == [3, -1, 1]
    state, handles = replay.add(state, rows(range(30, 51)), np.full(21, 2, np.int32))
    assert sorted(handles.slot.tolist()) == [-1] * 13 + list(range(8)) and (handles.slot[:13] == -1).all()


def test_every_selector_with_a_rank_is_a_policy(make, rows):
    state, _ = (replay := make(eviction=TopK())).add(
        replay.init(), rows(range(8)), np.full(8, 2, np.int32), np.arange(8, dtype=np.float32)
    )
    state, handles = replay.add(state, rows([20, 21, 22]), np.full(3, 2, np.int32))
    assert handles.slot.tolist() == [7, 6, 5]
    assert make(eviction=Fifo()).config == make().config


def test_partitions_that_divide_decide_alike(make, rows, same):
    """The same table in 1, 2, 4 and 8 partitions holds the same trajectories while none is evicted."""
    held = []
    for partitions in (1, 2, 4, 8):
        replay = make(partitions=partitions)
        state, _ = replay.add(replay.init(), rows(range(8)), np.arange(8, dtype=np.int32) % 5 + 1)
        held.append(np.sort(to_numpy(state.columns)["number"][..., 0].reshape(-1)))
    same(held[1:], [held[0]] * 3)
