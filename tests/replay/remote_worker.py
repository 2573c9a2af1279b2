"""What one process of a job does in `test_remote_processes.py`.

remote_worker.py TASK RANK PORTS FOLDER; the job's secret is in REMOTE_SECRET. The task "distributed" takes
COORDINATOR/PROCESSES instead of ports.
"""

import os
import pathlib
import pickle
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

import gear_jax as gear
from gear_jax import selectors
from gear_jax.transport import Job

STEPS, CAPACITY, BATCH, TURNS, EACH = 5, 72, 24, 4, 6
TABLE = gear.TableSpec(
    {"number": gear.ColumnSpec((), jnp.int32), "vector": gear.ColumnSpec((3,), jnp.float32)}, STEPS, CAPACITY
)
WINDOWS = {"number": gear.Window(-2, 3), "vector": gear.Window(0, 2, pad="head", pad_value=7)}
SELECTORS = {
    "prioritized": selectors.Prioritized(),
    "uniform": selectors.Uniform(),
    "top_k": selectors.TopK(),
    "permutation": selectors.Permutation(),
}
DEADLINE = 2.0


def rows(turn, process):
    """What a process adds in a turn: trajectories, lengths, priorities."""
    rng = np.random.default_rng((turn, process))
    columns = {
        "number": rng.integers(1, 99, (EACH, STEPS)).astype(np.int32),
        "vector": rng.normal(size=(EACH, STEPS, 3)).astype(np.float32),
    }
    lengths = rng.integers(0, STEPS + 1, EACH).astype(np.int32)
    return columns, lengths, rng.uniform(0, 3, EACH).astype(np.float32)


def joined(turn, processes):
    """The same of all of them, one after another."""
    return jax.tree.map(lambda *x: np.concatenate(x), *(rows(turn, p) for p in range(processes)))


def priorities(turn):
    return np.random.default_rng((turn, 99)).uniform(0, 3, BATCH).astype(np.float32)


def make(name, job=None, **options):
    return gear.make_replay(TABLE, SELECTORS[name], WINDOWS, exchange="rdma", job=job, deadline=DEADLINE, **options)


def alone(processes):
    """What one process draws that holds the whole table."""
    got = {}
    for name, selector in SELECTORS.items():
        replay = gear.make_replay(TABLE, selector, WINDOWS, partitions=least_partitions(processes))
        state, drawn = replay.init(), []
        for turn in range(TURNS):
            state, _ = replay.add(state, *joined(turn, processes))
            state, sample = replay.sample(state, jax.random.key(turn), BATCH)
            drawn.append(jax.tree.map(np.asarray, sample))
            state = replay.update_priorities(state, sample.handles, priorities(turn))
        got[name] = drawn
    return got


def least_partitions(processes):
    return -(-8 // processes) * processes


class Step:
    """A barrier over files, behind what `state` has been through: calls return before they have run."""

    def __init__(self, folder, rank, processes):
        self.folder, self.rank, self.processes, self.number = folder, rank, processes, 0

    def __call__(self, state):
        jax.block_until_ready(state)
        self.number += 1
        (self.folder / f"step{self.number}.{self.rank}").touch()
        wait_for(lambda: all((self.folder / f"step{self.number}.{p}").exists() for p in range(self.processes)))


def wait_for(condition, seconds=60):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.005)


def calls(job, folder):
    """In step, so that all draw the same: adds, samples, and updates by one process, which go to the others."""
    step, got, n = Step(folder, job.rank, len(job.addresses)), {}, len(job.addresses)
    first = {}
    for name in SELECTORS:
        replay = make(name, job)
        state, drawn, own = replay.init(), [], []
        first[name] = np.unique(state.generation)
        assert first[name].shape == (1,) and first[name] > 0
        for turn in range(TURNS):
            state, handles = replay.add(state, *rows(turn, job.rank))
            own.append(np.asarray(handles.slot))
            step(state)
            state, sample = replay.sample(state, jax.random.key(turn), BATCH)
            drawn.append(jax.tree.map(np.asarray, sample))
            step(state)
            if turn % n == job.rank:
                state = replay.update_priorities(state, sample.handles, priorities(turn))
            step(state)
        got[name] = drawn
        assert replay.session.alive.all() and replay.stats(state)["missed_updates"] == 0
        assert bool(replay.can_sample(state))
        held = CAPACITY // n
        assert all(((s == -1) | (s // held == job.rank)).all() for s in own), "a row went to another process"
        counters = replay.counters()
        assert counters["remote_rows"] > 0 and counters["bytes"] > 0, counters
        step(state)
        replay.close()
    (folder / f"{job.rank}.pickle").write_bytes(pickle.dumps((got, first)))


def out_of_step(job, folder):
    """Process 0 samples and updates as fast as it can; the others add when they like."""
    step = Step(folder, job.rank, len(job.addresses))
    replay = make("prioritized", job)
    state = replay.init()
    state, _ = replay.add(state, *rows(0, job.rank))
    step(state)
    done = folder / "done"
    if job.rank == 0:
        valid = rows_in_all = 0
        for i in range(200):
            state, sample = replay.sample(state, jax.random.key(i), BATCH)
            state = replay.update_priorities(state, sample.handles, priorities(i))
            check(sample)
            valid, rows_in_all = valid + int(sample.valid.sum()), rows_in_all + BATCH
        done.touch()
        assert valid > rows_in_all // 2, (valid, replay.counters())
        print("valid", valid, "of", rows_in_all, replay.counters(), flush=True)
    else:
        for turn in range(1, 100_000):
            state, _ = replay.add(state, *marked(turn, job.rank))
            if done.exists():
                break
            time.sleep(0.002 * job.rank)
        print(replay.stats(state), flush=True)
    step(state)
    replay.close()


def marked(turn, process):
    """Trajectories whose every word is the same number."""
    columns, _, priority = rows(turn, process)
    number = np.arange(EACH, dtype=np.int32) + np.int32(turn * EACH)
    columns = {
        "number": np.broadcast_to(number[:, None], (EACH, STEPS)).copy(),
        "vector": np.broadcast_to(number[:, None, None], (EACH, STEPS, 3)).astype(np.float32),
    }
    return columns, np.full(EACH, STEPS, np.int32), priority


def check(sample):
    """No row is a mixture, and one that is not valid is padding throughout."""
    data, mask = jax.tree.map(np.asarray, (sample.data, sample.mask))
    valid = np.asarray(sample.valid)
    assert not mask["number"][~valid].any() and not mask["vector"][~valid].any()
    assert (data["number"][~valid] == 0).all() and (data["vector"][~valid] == 7).all()
    assert (np.asarray(sample.handles.slot)[~valid] == -1).all()
    assert (np.asarray(sample.probability)[~valid] == 0).all() and (np.asarray(sample.weight)[~valid] == 0).all()


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def memory():
    fields = pathlib.Path("/proc/self/status").read_text().split("VmRSS:")[1]
    return int(fields.split()[0]) // 1024  # MiB


def stress(job, folder, fetches=None):
    """Process 1 overwrites its slots while process 0 fetches: every row that is valid is whole. Also what it takes."""
    fetches = int(os.environ.get("REMOTE_FETCHES", "150")) if fetches is None else fetches
    step = Step(folder, job.rank, len(job.addresses))
    table = gear.TableSpec({"number": gear.ColumnSpec((2000,), jnp.int32)}, 4, 16)
    replay = gear.make_replay(table, selectors.Uniform(), exchange="rdma", job=job, partitions=2)
    state = replay.init()
    ones = np.ones((4, 4, 2000), np.int32)
    state, _ = replay.add(state, {"number": ones}, np.full(4, 4, np.int32))
    step(state)
    done = folder / "done"
    if job.rank == 1:
        turn = 1
        while not done.exists():
            turn += 1
            state, _ = replay.add(state, {"number": ones * np.int32(turn)}, np.full(4, 4, np.int32))
        print("turns", turn, flush=True)
    else:
        whole = rejected = mixed = 0
        first = None
        for i in range(fetches):
            state, sample = replay.sample(state, jax.random.key(i), 32)
            data, valid = np.asarray(sample.data["number"]), np.asarray(sample.valid)
            same = (data == data[:, :1, :1]).all((1, 2))
            whole, rejected, mixed = whole + valid.sum(), rejected + (~valid).sum(), mixed + (valid & ~same).sum()
            if i == min(fetches // 10, 200):
                first = descriptors(), memory()
        last = descriptors(), memory()
        done.touch()
        print(f"whole={whole} rejected={rejected} mixed={mixed} first={first} last={last}", flush=True)
        print(replay.counters(), flush=True)
        assert mixed == 0 and whole > 0
        assert last[0] <= first[0] and last[1] < first[1] + 64, (first, last)
    step(state)
    replay.close()


def distributed(rank, processes, folder):
    """The job is that of jax.distributed."""
    step = Step(folder, rank, processes)
    replay = make("uniform")
    state = replay.init()
    state, _ = replay.add(state, rows(0, rank)[0], np.full(EACH, STEPS, np.int32))
    step(state)
    state, sample = replay.sample(state, jax.random.key(rank), 200)
    owners = set((np.asarray(sample.handles.slot) // (CAPACITY // processes)).tolist())
    assert sample.valid.all() and owners == set(range(processes)), owners
    step(state)
    replay.close()


def run(tasks):
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    task, rank, ports, where = sys.argv[1:]
    if task == "distributed":
        coordinator, processes = ports.split("/")
        jax.distributed.initialize(coordinator, int(processes), int(rank))
        distributed(int(rank), int(processes), pathlib.Path(where))
    else:
        addresses = tuple(("127.0.0.1", int(port)) for port in ports.split(","))
        tasks[task](Job(int(rank), addresses, bytes.fromhex(os.environ["REMOTE_SECRET"])), pathlib.Path(where))
    print("done", flush=True)


if __name__ == "__main__":
    run(globals())
