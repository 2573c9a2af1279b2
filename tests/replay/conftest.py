"""A small table that all tests of the replay share, so that each program is compiled once, and a model of it."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

import gear_jax as gear
from gear_jax.testing.ops import to_numpy

STEPS = 5  # T


@functools.cache
def _make(selector, capacity, windows, columns, options):
    specs = {name: gear.ColumnSpec(*spec) for name, spec in columns}
    table = gear.TableSpec(specs, STEPS, capacity)
    if isinstance(windows, tuple):
        windows = dict(windows)
    return gear.make_replay(table, selector, windows, **dict(options))


@pytest.fixture(scope="session")
def make():
    """make(selector, capacity=8, windows=..., columns=..., **options) -> Replay, the same one for the same arguments.

    The columns: "number" int32[] is trajectory * 100 + step + 1, "pair" float32[2] is (trajectory, step).
    """

    def run(selector=None, capacity=8, windows=None, columns=None, **options):
        columns = {"number": ((), "int32"), "pair": ((2,), "float32")} if columns is None else columns
        windows = tuple(windows.items()) if isinstance(windows, dict) else windows
        return _make(selector, capacity, windows, tuple(columns.items()), tuple(sorted(options.items())))

    return run


@pytest.fixture(scope="session")
def stack():
    """Stacks trees of arrays leaf by leaf. Columns may lie in host memory, where JAX computes nothing: NumPy does."""

    def run(*trees):
        def leaf(*x):
            stacked = np.stack(to_numpy(x))
            return jax.device_put(stacked, x[0].sharding) if isinstance(x[0], jax.Array) else stacked

        return jax.tree.map(leaf, *trees)

    return run


@pytest.fixture(scope="session")
def element():
    """element(tree, v) -> element v of each leaf, as NumPy arrays."""
    return lambda tree, v: jax.tree.map(lambda x: x[v], to_numpy(tree))


@pytest.fixture(scope="session")
def rows():
    """rows(trajectories, steps=T) -> the columns of numbered trajectories, as NumPy arrays."""

    def run(trajectories, steps=STEPS):
        number = np.asarray(trajectories, np.int32)[:, None]
        step = np.arange(steps, dtype=np.int32)[None]
        pair = np.stack(np.broadcast_arrays(number, step), -1).astype(np.float32)
        return {"number": number * 100 + step + 1, "pair": pair}

    return run


@pytest.fixture(scope="session")
def filled(rows):
    """filled(replay, A, lengths=3, priorities=None) -> (state, handles) with trajectories 0 ... A - 1."""

    def run(replay, a, lengths=3, priorities=None, key=None):
        lengths = np.broadcast_to(np.asarray(lengths, np.int32), (a,))
        priorities = None if priorities is None else np.asarray(priorities, np.float32)
        return replay.add(replay.init(key), rows(range(a)), lengths, priorities)

    return run


@dataclasses.dataclass
class _Held:
    trajectory: int
    length: int
    priority: np.float32


class Model:
    """The table again, in plain Python, row by row: placement, eviction in ring order, handles, priorities."""

    def __init__(self, partitions, slots, streams=0):
        self.p, self.s, self.n = partitions, slots, streams
        self.held = {}  # global slot -> _Held
        self.generation = [0] * (partitions * slots)
        self.cursor = [0] * partitions
        self.inserted = [0] * partitions
        self.evicted = self.stale = self.rejected = 0
        self.max_priority = np.float32(1)
        self.open = {}  # stream -> [slot, trajectory, length]

    def partition(self, a, rows):
        low, high = a * self.p // rows, (a + 1) * self.p // rows
        return min(range(low, max(high, low + 1)), key=lambda p: (self.inserted[p], p))

    def next_slot(self, p):
        while p * self.s + self.cursor[p] in {slot for slot, *_ in self.open.values()}:
            self.cursor[p] = (self.cursor[p] + 1) % self.s
        slot = p * self.s + self.cursor[p]
        self.cursor[p] = (self.cursor[p] + 1) % self.s
        return slot

    def add(self, trajectories, lengths, priorities=None):
        """Returns the handles, as pairs."""
        rows = len(trajectories)
        partition = [self.partition(a, rows) for a in range(rows)]
        top = self.max_priority
        slots = [self.next_slot(p) if n > 0 else -1 for p, n in zip(partition, lengths, strict=True)]
        handles = []
        for a, slot in enumerate(slots):
            given = top if priorities is None else np.float32(priorities[a])
            good = np.isfinite(given) and given >= 0
            if slot >= 0:
                self.inserted[partition[a]] += 1
                self.rejected += not good
                if good:
                    self.max_priority = max(self.max_priority, given)
            if slot < 0 or slot in slots[a + 1 :]:
                self.evicted += slot >= 0
                handles.append((-1, 0))
                continue
            self.evicted += slot in self.held
            self.generation[slot] += 1
            self.held[slot] = _Held(trajectories[a], lengths[a], given if good else np.float32(0))
            handles.append((slot, self.generation[slot]))
        return handles

    def update(self, handles, priorities):
        for (slot, generation), priority in zip(handles, priorities, strict=True):
            if slot == -1:
                continue
            if not 0 <= slot < self.p * self.s or generation == 0 or self.generation[slot] != generation:
                self.stale += 1
            elif not (np.isfinite(priority) and priority >= 0):
                self.rejected += 1
            else:
                self.held[slot].priority = np.float32(priority)
                self.max_priority = max(self.max_priority, np.float32(priority))

    def append(self, streams, trajectories, done, steps=STEPS):
        """One step for each of `streams`; new slots open with `trajectories`. Returns the handles of closed ones."""
        partition = [self.partition(a, self.n) for a in range(self.n)]
        needs = sorted(k for k in streams if 0 <= k < self.n and k not in self.open)
        new = {k: self.next_slot(partition[k]) for k in needs}
        for k, slot in new.items():
            self.evicted += self.held.pop(slot, None) is not None
            self.generation[slot] += 1
            self.open[k] = [slot, trajectories[streams.index(k)], 0]
        handles, top = [], self.max_priority
        for k, end in zip(streams, done, strict=True):
            handles.append((-1, 0))
            if k not in self.open:
                continue
            self.open[k][2] += 1
            if end or self.open[k][2] == steps:
                slot, trajectory, length = self.open.pop(k)
                self.held[slot] = _Held(trajectory, length, top)
                self.inserted[slot // self.s] += 1
                handles[-1] = (slot, self.generation[slot])
        return handles

    def check(self, replay, state):
        """Compares a state with the model."""
        length, priority = np.asarray(state.length).reshape(-1), np.asarray(state.priority).reshape(-1)
        columns = to_numpy(state.columns)
        number, pair = columns["number"].reshape(len(length), -1), columns["pair"].reshape(len(length), -1, 2)
        np.testing.assert_array_equal(np.asarray(state.generation).reshape(-1), self.generation)
        for slot in range(len(length)):
            held = self.held.get(slot, _Held(-1, 0, np.float32(0)))
            assert length[slot] == held.length, slot
            assert priority[slot] == held.priority, slot
            steps = np.arange(held.length)
            np.testing.assert_array_equal(number[slot, : held.length], held.trajectory * 100 + steps + 1)
            np.testing.assert_array_equal(pair[slot, : held.length, 0], held.trajectory)
            np.testing.assert_array_equal(pair[slot, : held.length, 1], steps)
        got = replay.stats(state)
        assert got["trajectories"] == len(self.held)
        assert got["steps"] == sum(h.length for h in self.held.values())
        assert got["inserted"] == sum(self.inserted)
        assert got["evicted"] == self.evicted
        assert got["stale_updates"] == self.stale
        assert got["rejected_priorities"] == self.rejected
        assert got["max_priority"] == self.max_priority
        if self.n:
            assert got["open_streams"] == len(self.open)


@pytest.fixture(scope="session")
def model():
    return Model


@pytest.fixture(scope="session")
def pairs():
    """Handles as a list of (slot, generation)."""
    return lambda h: list(zip(np.asarray(h.slot).tolist(), np.asarray(h.generation).tolist(), strict=True))


@pytest.fixture(scope="session")
def same():
    """Asserts that two trees hold the same values."""

    def check(got, wanted):
        for (path, g), w in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_array_equal(*to_numpy((g, w)), err_msg=jax.tree_util.keystr(path))

    return check
