"""What processes of a job do in `test_remote_processes.py` that end and come back, or whose states do.

Run as `remote_worker.py` is.
"""

import gc
import time

import jax
import jax.numpy as jnp
import numpy as np
from remote_worker import BATCH, CAPACITY, EACH, Step, check, descriptors, make, marked, rows, run, wait_for

import gear_jax as gear


def killed(job, folder):
    """Process 2 is killed, and started again; the others say how their samples fare, and what they have open."""
    replay = make("uniform", job)
    state = replay.init()
    print("connected", flush=True)
    state, _ = replay.add(state, *marked(1 if job.rank < 2 else 2, job.rank))
    print("added", flush=True)
    i, held, last, opened = 0, CAPACITY // 3, None, None
    while not (folder / "stop").exists():
        i += 1
        if job.rank == 2:
            time.sleep(0.01)
            continue
        begin = time.monotonic()
        state, sample = replay.sample(state, jax.random.key(i), BATCH)
        jax.block_until_ready(sample)
        seconds = time.monotonic() - begin
        assert seconds < 5 or i == 1, f"a sample took {seconds} s"  # the first one compiles
        check(sample)
        slot, valid = np.asarray(sample.handles.slot), np.asarray(sample.valid)
        probability = np.asarray(sample.probability)
        if not valid.all():
            now = "lost"
        elif np.allclose(probability * 3 * EACH, 1, rtol=1e-6):
            now = "all"
        elif last is None:  # others have yet to add
            continue
        else:  # the trajectories of two processes are left, and their probabilities sum to 1
            missing = sorted({0, 1, 2} - set((slot // held).tolist()))
            assert missing
            now = f"without {missing}"
            np.testing.assert_allclose(probability * 2 * EACH, 1, rtol=1e-6)
        if now != last:
            print(f"{now} alive={replay.session.alive.tolist()} seconds={seconds:.2f}", flush=True)
            last = now
        if opened != (opened := descriptors()):
            print(f"open={opened}", flush=True)
    print("counters", replay.counters(), flush=True)
    Step(folder, job.rank, 3)(())  # nobody samples from one that has closed
    replay.close()


def restored(job, folder):
    """A checkpoint of each part, restored into a replay that then connects anew; the other goes on meanwhile."""
    from gear_jax import checkpoint

    step = Step(folder, job.rank, len(job.addresses))
    replay = make("prioritized", job)
    state = replay.init()
    state, _ = replay.add(state, *rows(0, job.rank))
    step(state)
    state, before = replay.sample(state, jax.random.key(5), BATCH)
    step(state)
    if job.rank == 1:
        checkpoint.save(folder / "part1", 1, state, replay)
        state = checkpoint.restore(folder / "part1", replay)
        for call in (replay.sample, jax.jit(replay.sample, static_argnums=2)):
            try:
                jax.block_until_ready(call(state, jax.random.key(1), BATCH)[1])
            except (jax.errors.JaxRuntimeError, ValueError) as e:
                assert "replay.connect(state)" in str(e), e
            else:
                raise AssertionError("a state that is not exposed was sampled")
        state = replay.connect(state)
    step(state)
    wait_for(lambda: replay.session.alive.all())
    step(state)
    state, after = replay.sample(state, jax.random.key(5), BATCH)
    old = before.handles.generation
    slot, generation = np.asarray(after.handles.slot), np.asarray(after.handles.generation)
    restored = slot // (CAPACITY // 2) == 1
    np.testing.assert_array_equal(generation[~restored], np.asarray(old)[~restored])
    assert np.unique(generation[restored] - np.asarray(old)[restored]).size == 1
    after = after.replace(handles=after.handles.replace(generation=old))
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    step(state)
    # What process 0 says of trajectories that it drew before is for what was there, whatever is there now.
    if job.rank == 0:
        state = replay.update_priorities(state, before.handles, np.full(BATCH, 50, np.float32))
    step(state)
    if job.rank == 1:
        columns, _, priority = rows(1, job.rank)
        state, _ = replay.add(state, columns, np.zeros(EACH, np.int32), priority)
        assert replay.stats(state)["stale_updates"] == restored.sum() > 0, replay.stats(state)
        assert np.asarray(state.priority).max() < 50
    step(state)
    replay.close()


def started_again(job, folder):
    """Process 1 begins anew, and puts other trajectories where those were that process 0 has handles of."""
    step = Step(folder, job.rank, len(job.addresses))
    replay = make("prioritized", job)
    state = replay.init()
    state, _ = replay.add(state, *marked(1, job.rank))
    step(state)
    state, sample = replay.sample(state, jax.random.key(5), BATCH)
    before = jax.tree.map(np.asarray, sample.handles)
    theirs = before.slot // (CAPACITY // 2) == 1
    assert theirs.any()
    step(state)
    if job.rank == 1:
        state = replay.init()
        state, handles = replay.add(state, *marked(2, job.rank))
        assert set(before.slot[theirs].tolist()) <= set(np.asarray(handles.slot).tolist())
    step(state)
    wait_for(lambda: replay.session.alive.all())
    if job.rank == 0:
        state = replay.update_priorities(state, gear.Handle(*map(jnp.asarray, (before.slot, before.generation))),
                                         np.full(BATCH, 50, np.float32))  # fmt: skip
    step(state)
    if job.rank == 1:
        state, _ = replay.add(state, marked(3, job.rank)[0], np.zeros(EACH, np.int32))
        assert replay.stats(state)["stale_updates"] == theirs.sum(), replay.stats(state)
        assert np.asarray(state.priority).max() < 50
    step(state)
    replay.close()


def let_go(job, folder):
    """Process 1 lets its state go, and the other reads on: one that a call of the replay returned, then one that a step
    of its own did."""
    step, large = Step(folder, job.rank, len(job.addresses)), 1 << 14
    table = gear.TableSpec({"number": gear.ColumnSpec((large,), jnp.int32)}, 2, 1024)  # the system takes it back
    replay = gear.make_replay(table, exchange="rdma", job=job, deadline=10.0)
    state = replay.init()
    given = {"number": np.full((EACH, 2, large), job.rank, np.int32)}, np.full(EACH, 2, np.int32)
    own_step = jax.jit(lambda state: replay.add(state, *jax.tree.map(jnp.asarray, given))[0], donate_argnums=0)
    for kept in (True, False):
        if job.rank == 1:
            state = replay.init() if state is None else state
            state = replay.add(state, *given)[0] if kept else own_step(state)
            jax.block_until_ready(state)
            state = None
            gc.collect()
            step(())
        else:
            state, _ = replay.add(state, *given)
            step(state)
            wait_for(lambda: replay.session.alive.all())
            owners = set()
            for i in range(40):
                state, sample = replay.sample(state, jax.random.key(i), BATCH)
                valid, data = np.asarray(sample.valid), np.asarray(sample.data["number"])
                owner = (np.asarray(sample.handles.slot) // 512)[valid]
                assert (data[valid] == owner[:, None, None]).all() and (valid.all() or not kept)
                owners.update(owner.tolist())
            assert owners == ({0, 1} if kept else {0}), owners
        step(())
    print(replay.counters(), flush=True)
    replay.close()


def connected_meanwhile(job, folder):
    """Process 0 calls `connect`, and then `close`, while its sample is on its way."""
    step, large = Step(folder, job.rank, len(job.addresses)), 1 << 16
    table = gear.TableSpec({"number": gear.ColumnSpec((large,), jnp.int32)}, 1, 16)
    replay = gear.make_replay(table, exchange="rdma", job=job, deadline=30.0)
    state = replay.init()
    given = np.full((EACH, 1, large), 1 + job.rank, np.int32)
    state, _ = replay.add(state, {"number": given}, np.ones(EACH, np.int32))
    step(state)
    if job.rank == 0:
        for end in (replay.connect, lambda state: replay.close()):
            state, pending = replay.sample_start(state, jax.random.key(0), 256)
            after = end(state)
            sample = replay.sample_done(pending)
            owner = np.asarray(sample.handles.slot) // 8
            assert sample.valid.all() and set(owner.tolist()) == {0, 1}, replay.counters()
            assert (np.asarray(sample.data["number"]) == 1 + owner[:, None, None]).all()
            state = after
    step(())
    replay.close()


def error_on_loss(job, folder):
    """With on_loss="error" a sample raises while a process is gone."""
    step = Step(folder, job.rank, len(job.addresses))
    replay = make("uniform", job, on_loss="error")
    state = replay.init()
    state, _ = replay.add(state, *rows(0, job.rank))
    step(state)
    state, sample = replay.sample(state, jax.random.key(0), BATCH)
    assert sample.valid.all()
    step(state)
    if job.rank == 1:
        replay.close()
    else:
        wait_for(lambda: not replay.session.alive[1])
        for turn in range(3):
            try:
                jax.block_until_ready(replay.sample(state, jax.random.key(1), BATCH)[1])
            except (jax.errors.JaxRuntimeError, ValueError) as e:
                assert "got no answer from process(es) 1 within the deadline" in str(e), e
            else:
                raise AssertionError("it did not raise")
            state, _ = replay.add(state, *rows(1 + turn, job.rank))  # needs nobody
            jax.block_until_ready(state)
        replay.close()
    step(state)


def not_closed(job, folder):
    """A process that ends without a word: it ends well, and the other goes on."""
    step = Step(folder, job.rank, len(job.addresses))
    replay = make("uniform", job)
    state = replay.init()
    state, _ = replay.add(state, *marked(1, job.rank))
    step(state)
    if job.rank == 1:
        return
    wait_for(lambda: not replay.session.alive[1])
    for i in range(20):
        state, sample = replay.sample(state, jax.random.key(i), BATCH)
        check(sample)
    assert sample.valid.all()


if __name__ == "__main__":
    run(globals())
