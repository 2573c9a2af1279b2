"""Trajectories that leave by themselves, where other parts of the table are concerned."""

import jax
import numpy as np
import pytest

import gear_jax as gear
from gear_jax.selectors import Queue, Uniform


def number_of(sample):
    """The numbers of the trajectories drawn; -1 where there is none."""
    return np.where(np.asarray(sample.valid), np.asarray(sample.data["number"])[:, 0] // 100, -1).tolist()


def test_a_queue_of_streams_fills_the_places_that_are_free_first(make):
    # Stream 0's trajectory is the last to be closed, and in the way of the cursor, when the others are gone.
    replay = make(Queue(), 4, gear.Window(0, 3), anchor="start", streams=2)
    state = replay.init()

    def append(state, stream, number, done):
        step = {"number": np.array([100 * number], np.int32), "pair": np.zeros((1, 2), np.float32)}
        return replay.append(state, np.array([stream]), step, np.array([done]))[0]

    state = append(state, 0, 0, False)
    for number in (1, 2, 3):
        state = append(state, 1, number, True)
        state, sample = replay.sample(state, jax.random.key(0), 1)
        assert number_of(sample) == [number]
    state = append(state, 0, 0, True)
    for number in (4, 5, 6):
        state = append(state, 1, number, True)
    assert replay.stats(state)["evicted"] == 0
    assert sorted(number_of(replay.sample(state, jax.random.key(1), 4)[1])) == [0, 4, 5, 6]


@pytest.mark.parametrize("selector", [Uniform, Queue], ids=lambda x: x.__name__)
def test_a_state_of_more_times_does_not_draw_for_ever(make, filled, selector):
    twice, once = (make(selector(times=n), 4, gear.Window(0, 3), anchor="start") for n in (2, 1))
    state, sample = twice.sample(filled(twice, 4)[0], jax.random.key(0), 4)
    drawn = set(number_of(sample))
    state, first = once.sample(state, jax.random.key(1), 4)
    state, second = once.sample(state, jax.random.key(2), 4)
    assert sorted({*number_of(first), *number_of(second)} - {-1}) == sorted({0, 1, 2, 3} - drawn)
    assert not once.can_sample(state) and once.stats(state)["trajectories"] == 0
