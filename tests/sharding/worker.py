"""What one process of several does in `test_processes.py`; the same calls without a mesh are what it is compared with.

worker.py TASK COORDINATOR PROCESSES PROCESS FOLDER
"""

import pathlib
import pickle
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

import gear_jax as gear
from gear_jax import selectors, sharding

STEPS, CAPACITY, PARTITIONS, BATCH, ROOM = 5, 32, 8, 24, 8
TABLE = gear.TableSpec(
    {"number": gear.ColumnSpec((), jnp.int32), "vector": gear.ColumnSpec((3,), jnp.float32)}, STEPS, CAPACITY
)
WINDOWS = {"number": gear.Window(-2, 3), "vector": gear.Window(0, 2, pad="head", pad_value=7)}
# How many rows each of two processes has, turn by turn.
ROWS = ((8, 8), (8, 3), (0, 8), (5, 0))
SELECTORS = {
    "prioritized": selectors.Prioritized(),
    "uniform": selectors.Uniform(),
    "stratified": selectors.Prioritized(alpha=1.0, beta=1.0, stratified=True),
    "top_k": selectors.TopK(),
    "lowest": selectors.LowestPriority(),
    "fifo": selectors.Fifo(),
    "lifo": selectors.Lifo(),
    "permutation": selectors.Permutation(),
}


def make(mesh, **options):
    return gear.make_replay(TABLE, windows=WINDOWS, mesh=mesh, partitions=PARTITIONS, **options)


def rows(turn, process):
    """The rows of a process in a turn: trajectories, lengths, priorities (None in even turns)."""
    rng = np.random.default_rng((turn, process))
    a = ROWS[turn][process]
    columns = {
        "number": rng.integers(1, 99, (a, STEPS)).astype(np.int32),
        "vector": rng.normal(size=(a, STEPS, 3)).astype(np.float32),
    }
    priorities = rng.uniform(0, 3, a).astype(np.float32) if turn % 2 else None
    return columns, rng.integers(1, STEPS + 1, a), priorities


def padded(x):
    """`[a, ...]` as `[ROOM, ...]`."""
    return np.concatenate([x, np.zeros((ROOM - len(x), *x.shape[1:]), x.dtype)])


def given(replay, turn):
    """What is added: this process's own rows, or in one process those of both."""
    if jax.process_count() > 1:
        return sharding.process_rows(replay, *rows(turn, jax.process_index()), rows=ROOM)
    of_both = [jax.tree.map(padded, rows(turn, p)) for p in range(2)]
    columns, lengths, priorities = jax.tree.map(lambda *x: np.concatenate(x), *of_both)
    return columns, lengths.astype(np.int32), priorities


def seen(x):
    """The shards of an array that this process has: {place: values}."""
    if not isinstance(x, jax.Array):
        return {None: np.asarray(x)}
    return {
        tuple(i.indices(size)[:2] for i, size in zip(s.index, x.shape, strict=True)): np.asarray(s.data)
        for s in x.addressable_shards
    }


def record(tree):
    return {jax.tree_util.keystr(path): seen(x) for path, x in jax.tree.leaves_with_path(tree)}


def draw(replays):
    """A little with each of some replays, in one program: what came back, and the statistics, by name."""
    rows = given(next(iter(replays.values())), 1)

    @jax.jit
    def run(rows, key):
        states, got = {}, {}
        for name, replay in replays.items():
            state, handles = replay.add(replay.init(key), *rows)
            states[name], sample = replay.sample(state, key, BATCH)
            got[name] = handles, sample
        return states, got

    states, got = run(rows, jax.random.key(3))
    return {name: {"got": [record(got[name])], "stats": replays[name].stats(states[name])} for name in replays}


def play(replay, turns=4):
    """Every call: what came back, the statistics on the way, and the last state."""
    state, got, stats, known = replay.init(), [], [], []
    for turn in range(turns):
        state, handles = replay.add(state, *given(replay, turn))
        key = jax.random.key(turn) if turn % 2 else jax.random.PRNGKey(turn)
        state, sample = replay.sample(state, key, BATCH)
        # Handles as they came, those of the other process among them; and as NumPy arrays, the same on all.
        state = replay.update_priorities(state, sample.handles, sample.probability * 3)
        known.append(jax.tree.map(whole, handles))
        for some in known[-1], known[0]:  # the first turn's are stale in the end
            state = replay.update_priorities(state, some, np.linspace(0, 4, len(some.slot), dtype=np.float32))
        got.append(record((handles, sample, replay.can_sample(state))))
        stats.append(replay.stats(state))
    return {"got": got, "stats": stats, "state": record(state.replace(ticket=None, stamp=None))}


def stream(replay):
    """Steps one at a time."""
    state, got = replay.init(), []
    for turn in range(7):
        step = {"number": np.arange(8, dtype=np.int32) + turn, "vector": np.full((8, 3), turn, np.float32)}
        done = np.arange(8) == turn
        number = np.arange(8, dtype=np.int32)
        if jax.process_count() > 1:
            own = slice(4 * jax.process_index(), 4 * jax.process_index() + 4)
            at = jax.sharding.NamedSharding(replay.placement.mesh, replay.placement.held)
            step, done, number = jax.tree.map(
                lambda x, own=own, at=at: jax.make_array_from_process_local_data(at, x[own]), (step, done, number)
            )
        state, handles = replay.append(state, number, step, done)
        state, sample = replay.sample(state, jax.random.key(turn), BATCH)
        got.append(record((handles, sample)))
    return {"got": got, "stats": replay.stats(state)}


def whole(x):
    return np.asarray(x) if x.is_fully_addressable else multihost_utils.process_allgather(x, tiled=True)


def compiled_add(replay, turn):
    """The program of `add` with the rows of a turn."""
    state = replay.init()
    return jax.jit(replay.add, donate_argnums=0).lower(state, *given(replay, turn)).compile().as_text()


def everything(mesh):
    """What all calls gave, by name; the same over a mesh as without."""
    prioritized = SELECTORS["prioritized"]
    results = draw({name: make(mesh, selector=s) for name, s in SELECTORS.items()})
    results["play"] = play(make(mesh, selector=prioritized))
    results["pinned"] = play(make(mesh, selector=prioritized, memory="pinned_host"), turns=1)
    options = {} if mesh is None else {"exchange": "rdma", "deadline": 60.0}
    results["rdma"] = play(make(mesh, selector=prioritized, **options))
    results["rdma_streams"] = stream(make(mesh, selector=prioritized, streams=PARTITIONS, **options))
    results["streams"] = stream(make(mesh, selector=prioritized, streams=PARTITIONS))
    return results


def apart(mesh):
    """With decentralized selection."""
    return draw({"apart": make(mesh, selector=SELECTORS["prioritized"], selection="decentralized")})


def task_calls(mesh):
    results = everything(mesh)
    results |= apart(mesh)
    replay = make(mesh, selector=SELECTORS["prioritized"])
    return {"results": results, "add": [compiled_add(replay, turn) for turn in (0, 1)], "exchange": replay.exchange}


def task_disagree(mesh):
    """The errors of tables, keys and devices in which the two processes differ, and of a process that does not come."""
    mine = jax.process_index()
    other = gear.TableSpec(TABLE.columns, STEPS, CAPACITY * (1 + mine))
    copies = make(jax.make_mesh((2, 4), ("other", "replay")))
    turned = jax.make_mesh((8,), ("replay",), devices=jax.devices()[:: 1 - 2 * mine])
    cases = {
        "table": lambda: gear.make_replay(other, mesh=mesh, selector=list(SELECTORS.values())[mine]).init(),
        "key": lambda: make(mesh).init(jax.random.key(mine)),
        "mesh": lambda: make(turned).init(),
        "copies": lambda: sharding.process_rows(copies, *rows(0, mine)),
        "nobody": lambda: time.sleep(6) if mine else make(mesh).init(),
    }
    errors = {}
    for name, case in cases.items():
        started = time.monotonic()
        try:
            case()
            errors[name] = None
        except (RuntimeError, ValueError) as e:
            errors[name] = str(e)
        print(name, time.monotonic() - started)
    return errors


def task_die(mesh):
    replay = make(mesh, selector=SELECTORS["prioritized"])
    state, _ = replay.add(replay.init(), *given(replay, 0))
    for turn in range(10**6):
        state, sample = replay.sample(state, jax.random.key(turn), BATCH)
        jax.block_until_ready(sample)
        if turn == 3:
            print("sampling")


def main(task, coordinator, processes, process, folder):
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.distributed.initialize(
        coordinator, int(processes), int(process), initialization_timeout=60, heartbeat_timeout_seconds=10,
        shutdown_timeout_seconds=60,
    )  # fmt: skip
    result = globals()[f"task_{task}"](jax.make_mesh((jax.device_count(),), ("replay",)))
    (pathlib.Path(folder) / f"{process}.pickle").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
