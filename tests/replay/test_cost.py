"""One compilation for any number of calls; what a call costs beside its work; the memory that an insertion takes."""

import dataclasses
import logging
import subprocess
import sys
import textwrap
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gear_jax as gear
from gear_jax.replay import _memory
from gear_jax.selectors import Fifo, Prioritized

TRACES = []


@dataclasses.dataclass(frozen=True)
class Counted(Fifo):
    """A selector of the user's own; tracing it leaves a mark."""

    def mass(self, priority, selectable):
        TRACES.append("mass")
        return super().mass(priority, selectable)

    def select(self, state, index, key, batch_size, axis=None):
        TRACES.append("select")
        return super().select(state, index, key, batch_size, axis)


def test_one_compilation_for_any_number_of_calls(make, rows, caplog):
    replay = make(Counted(), streams=1)
    one = {"number": np.array([5], np.int32), "pair": np.zeros((1, 2), np.float32)}

    def turn(state, i):
        state, h = replay.add(state, rows([i, i + 1, i + 2]), np.full(3, i % 5 + 1, np.int32))
        state, _ = replay.sample(state, jax.random.key(i), 6)
        state = replay.update_priorities(state, h, np.full(3, i + 1, np.float32))
        state, _ = replay.append(state, np.zeros(1, np.int32), one, np.array([i % 3 == 0]))
        replay.stats(state), replay.can_sample(state)
        return state

    state = turn(replay.init(), 1)
    traced = list(TRACES)
    assert "select" in traced
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        for i in range(2, 12):
            state = turn(state, i)
        assert traced == TRACES
        assert not [r for r in caplog.records if "Compiling" in r.getMessage()]
        # The log does show compilations.
        state, _ = replay.sample(state, jax.random.key(0), 7)
        assert [r for r in caplog.records if "Compiling" in r.getMessage()]


def test_what_a_call_does_not_change_are_the_same_arrays(make, rows, filled):
    replay = make(Prioritized())
    first, handles = filled(replay, 4)
    second, _ = replay.sample(first, jax.random.key(0), 6)
    third = replay.update_priorities(second, handles, np.ones(4, np.float32))
    same = {f.name for f in dataclasses.fields(first) if getattr(first, f.name) is getattr(second, f.name)}
    assert same == {f.name for f in dataclasses.fields(first)} - {"counters", "ticket"}
    same = {f.name for f in dataclasses.fields(first) if getattr(second, f.name) is getattr(third, f.name)}
    assert {"columns", "length", "generation", "sequence", "cursor", "clock"} <= same


def test_a_state_that_a_call_has_returned_is_not_looked_at_again(make, rows, filled, monkeypatch):
    replay, keeping = make(), make(donate=False)
    looked = []
    monkeypatch.setattr(_memory, "place", lambda config, placement, state: looked.append(1) or state)
    state, _ = filled(replay, 4)
    assert len(looked) == 1  # at what init made
    for i in range(3):
        state, _ = replay.sample(state, jax.random.key(i), 6)
        state, _ = replay.add(state, rows([i]), np.ones(1, np.int32))
    assert len(looked) == 1
    state, _ = replay.sample(state.replace(max_priority=state.max_priority + 1), jax.random.key(0), 6)
    assert len(looked) == 2
    for _ in range(2):  # another replay's, and then an old one
        keeping.sample(state, jax.random.key(0), 6)
    assert len(looked) == 4
    last = weakref.ref(state)
    del state
    assert last() is None  # the replay keeps no table that nobody else has


def test_numbers_of_numpy_go_into_a_call_as_they_are(make, rows, monkeypatch):
    """JAX takes longer to make an array of them than a small call takes."""
    replay = make(max_staleness=3)
    one, numbers = np.ones(1, np.int64), rows([1, 2, 3])

    def turn(state, version):
        state, _ = replay.add(state, numbers, 2 * one, version=version * one, rows=one)
        state, _ = replay.add(state, numbers, [1, 2, 3], version=version)
        return replay.expire(state, version)

    state = turn(replay.init(), 1)
    with monkeypatch.context() as m:
        m.setattr(jnp, "asarray", lambda *_, **__: pytest.fail("made an array"))
        m.setattr(jnp, "broadcast_to", lambda *_, **__: pytest.fail("made an array"))
        state = turn(state, 2)
    assert replay.stats(state)["inserted"] == 8 and replay.stats(state)["version"] == 2


@pytest.mark.cpu
def test_a_small_call_stays_on_the_thread_that_makes_it():
    """XLA hands kernels to another thread where more than eight could run at once. A kernel of a few numbers is done
    before that thread is awake."""
    code = """
    import os, pathlib
    import jax, jax.numpy as jnp, numpy as np
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    import gear_jax as gear

    def wakes():
        count = 0
        for thread in pathlib.Path("/proc/self/task").iterdir():
            if (thread / "comm").read_text().startswith("tf_XLAEigen"):
                lines = (thread / "status").read_text().splitlines()
                count += int(next(x for x in lines if x.startswith("voluntary_ctxt_switches")).split()[1])
        return count

    table = gear.TableSpec({"a": gear.ColumnSpec((4,), jnp.float32), "b": gear.ColumnSpec((), jnp.int32)}, 4, 4096)
    for selector in (gear.selectors.Uniform(), gear.selectors.Prioritized()):
        replay = gear.make_replay(table, selector, streams=64)
        plain = gear.make_replay(table, selector)
        states = {"plain": plain.init(), "streams": replay.init()}

        def add(rows):
            batch = {"a": np.ones((rows, 4, 4), np.float32), "b": np.ones((rows, 4), np.int32)}
            states["plain"], _ = plain.add(states["plain"], batch, np.full(rows, 4, np.int32))

        def append(rows):
            step = {"a": np.ones((rows, 4), np.float32), "b": np.ones(rows, np.int32)}
            stream = np.arange(rows, dtype=np.int32)
            states["streams"], _ = replay.append(states["streams"], stream, step, np.ones(rows, bool))

        def draw(rows):
            states["plain"], sample = plain.sample(states["plain"], jax.random.key(0), rows)
            states["plain"] = plain.update_priorities(states["plain"], sample.handles, sample.weight)

        for call in (add, append, draw):
            for rows in (1, 16, 64):
                for _ in range(5):
                    call(rows)
                before = wakes()
                for _ in range(50):
                    call(rows)
                jax.block_until_ready(states)
                assert wakes() - before < 25, (selector, call.__name__, rows, wakes() - before)
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.cpu
def test_a_table_takes_no_more_memory_than_itself_and_a_batch():
    code = """
    import jax, jax.numpy as jnp, numpy as np
    import gear_jax as gear

    def peak():  # of this program; ru_maxrss would count what its parent had before it
        with open("/proc/self/status") as status:
            return 1024 * int(next(line for line in status if line.startswith("VmHWM")).split()[1])

    def fill(steps, capacity, rows, turns):
        table = gear.TableSpec({"a": gear.ColumnSpec((1024,), jnp.float32)}, steps, capacity)
        replay = gear.make_replay(table)
        state = replay.init()
        batch = {"a": jnp.ones((rows, steps, 1024), jnp.float32)}
        for _ in range(turns):
            state, _ = replay.add(state, batch, np.full(rows, steps, np.int32))
        state.ticket.block_until_ready()
        assert np.asarray(state.columns["a"])[0, -1, -1, -1] == 1

    fill(2, 4, 2, 3)
    before = peak()
    fill(64, 1024, 128, 20)
    print(peak() - before)
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    table, batch = 64 * 1024 * 4096, 64 * 128 * 4096
    taken = int(run.stdout)
    assert table < taken <= (table + batch) * 1.1, taken / 2**20


def test_a_selector_of_the_users_own(make, filled):
    state, handles = filled(replay := make(Counted()), 3)
    _, s = replay.sample(state, jax.random.key(0), 6)
    assert s.handles.slot.tolist() == [*handles.slot.tolist(), -1, -1, -1]
    assert isinstance(replay.config.selector, gear.selectors.Selector)
