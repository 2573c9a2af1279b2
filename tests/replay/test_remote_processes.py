"""`exchange="rdma"` over processes: draws as one process's, hosts out of step, deaths, returns; nothing torn or leaked.

For the long forms: `REMOTE_FETCHES=4000 pytest -k stress -s` reads 10^5 rows while they are overwritten, and
`REMOTE_FETCHES=10000` makes 10^4 fetches of one process pass through the same checks of descriptors and memory.
"""

import contextlib
import importlib.util
import os
import pathlib
import pickle
import re
import secrets
import sys
import time

import jax
import numpy as np
import pytest

from gear_jax import transport
from gear_jax.testing.processes import Processes, free_ports

WORKER, LIVES = (pathlib.Path(__file__).with_name(name) for name in ("remote_worker.py", "remote_lives.py"))
pytestmark = pytest.mark.skipif(transport.missing("ucx") != "", reason=f"no transport: {transport.missing('ucx')}")
SECONDS = 280
DEVICES = 1 if jax.default_backend() == "cpu" else None  # of a process; GPUs are shared


@pytest.fixture(scope="module")
def worker():
    """What the processes run, for the same calls in this one."""
    spec = importlib.util.spec_from_file_location("remote_worker", WORKER)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Launch:
    """Starts the processes of one job, and some of them again; `script` has the tasks."""

    def __init__(self, folder):
        self.folder, self.script = folder, WORKER
        self.environment = {"REMOTE_SECRET": secrets.token_hex(32)}
        self.ports = None

    def __call__(self, task, processes):
        self.ports = ",".join(map(str, free_ports(processes)))
        return Processes(self.words(task, "{process}"), processes, DEVICES, self.environment)

    def again(self, task, rank):
        return Processes(self.words(task, str(rank)), 1, DEVICES, self.environment)

    def words(self, task, rank):
        return [sys.executable, "-W", "error", str(self.script), task, rank, self.ports, str(self.folder)]


@pytest.fixture
def lives(launch):
    """`launch`, of processes that end and come back."""
    launch.script = LIVES
    return launch


@pytest.fixture
def launch(tmp_path):
    before = _segments()
    yield Launch(tmp_path)
    until = time.monotonic() + 30
    while left := _segments() - before - _mapped():  # those of others on this machine are mapped
        assert time.monotonic() < until, f"shared memory is left behind: {left}"
        time.sleep(0.1)


def _segments():
    return {x for x in os.listdir("/dev/shm") if x.startswith("ucx")}


def _mapped():
    """The names of files in /dev/shm that a process has mapped."""
    names = set()
    for maps in pathlib.Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            names.update(re.findall(r" /dev/shm/(\S+)", maps.read_text()))
    return names


def ended(started):
    codes = started.wait(SECONDS)
    assert set(codes) == {0}, started.report()


def test_processes_draw_as_one_that_holds_the_whole_table(launch, worker):
    """Slots, probabilities, weights, anchors, data, bit for bit, of updates that went through outboxes too."""
    processes = 3
    with launch("calls", processes) as started:
        wanted = worker.alone(processes)
        ended(started)
    told = [pickle.loads((launch.folder / f"{rank}.pickle").read_bytes()) for rank in range(processes)]
    for rank, (got, _) in enumerate(told):
        assert got.keys() == wanted.keys()
        for name in wanted:
            first = np.concatenate([firsts[name] for _, firsts in told])  # generations begin there
            for turn, (a, b) in enumerate(zip(got[name], wanted[name], strict=True)):
                slot, generation = b.handles.slot, b.handles.generation
                generation = np.where(slot < 0, generation, generation + first[slot // (worker.CAPACITY // processes)])
                b = b.replace(handles=b.handles.replace(generation=generation))
                for (path, x), y in zip(jax.tree.leaves_with_path(a), jax.tree.leaves(b), strict=True):
                    where = f"process {rank}, {name}, turn {turn}, {jax.tree_util.keystr(path)}"
                    np.testing.assert_array_equal(x, y, err_msg=where)


def test_the_processes_of_jax_distributed_are_a_job(launch):
    launch.ports = "{coordinator}/{processes}"
    with Processes(launch.words("distributed", "{process}"), 2, 1) as started:
        ended(started)


def test_hosts_need_not_be_in_step(launch):
    with launch("out_of_step", 3) as started:
        ended(started)


def test_a_killed_process_hurts_no_other_and_comes_back(lives):
    with lives("killed", 3) as started:
        started.wait_for("all alive=[True, True, True]", SECONDS, among=[0, 1])
        started.wait_for("open=", 30, among=[0, 1])
        before = _opened(started)
        started.kill(2)
        started.wait_for("without [2] alive=[True, True, False]", 30, among=[0, 1])
        with lives.again("killed", 2) as second:
            second.wait_for("added", SECONDS)
            _until(started, lambda: all(started.output(i).count("all alive=[True, True, True]") >= 2 for i in (0, 1)))
            # A connection to a process that was started again is a new one; nothing of the old one stays.
            _until(started, lambda: all(a <= b + 2 for a, b in zip(_opened(started), before, strict=True)))
            (lives.folder / "stop").touch()
            assert second.wait(60) == [0], second.report()
        assert started.wait(60, among=[0, 1]) == [0, 0], started.report()
        for i in (0, 1):
            assert "'reconnects': 1" in started.output(i), started.report()


def _opened(started):
    """How many descriptors processes 0 and 1 say they have open."""
    return [int(re.findall(r"open=(\d+)", started.output(i))[-1]) for i in (0, 1)]


def _until(started, condition):
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until, started.report()
        time.sleep(0.02)


def test_stress_a_writer_overwrites_what_is_fetched(launch):
    """0 torn rows are delivered as valid, and fetches take neither descriptors nor memory."""
    with launch("stress", 2) as started:
        ended(started)
        print(started.report())


def test_a_process_may_end_without_closing(lives):
    with lives("not_closed", 2) as started:
        ended(started)


@pytest.mark.parametrize("tls", [None, "tcp,self"])
def test_a_state_may_be_let_go(lives, tls):
    """What a call of the replay has returned stays; else rows are refused, and nobody dies of it."""
    lives.environment |= {} if tls is None else {"UCX_TLS": tls}
    with lives("let_go", 2) as started:
        ended(started)


def test_samples_in_flight_are_whole_after_connect_and_close(lives):
    lives.environment |= {"UCX_TLS": "tcp,self"}  # rows take their time
    with lives("connected_meanwhile", 2) as started:
        ended(started)


def test_a_restored_part_goes_on_after_connect(lives):
    with lives("restored", 2) as started:
        ended(started)


def test_handles_of_an_earlier_life_are_stale(lives):
    with lives("started_again", 2) as started:
        ended(started)


def test_a_lost_process_is_an_error_on_demand(lives):
    with lives("error_on_loss", 2) as started:
        ended(started)
