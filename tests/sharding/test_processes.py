"""Tables over two processes of four devices each: the same as in one process, errors on all, and no silent waiting."""

import importlib.util
import pathlib
import pickle
import re
import sys

import jax
import numpy as np
import pytest

from gear_jax import _env
from gear_jax.testing.processes import Processes, run_processes

WORKER = pathlib.Path(__file__).with_name("worker.py")
COLLECTIVE = re.compile(r"= (.+?) ((?:all|collective|reduce-scatter|ragged)[\w-]*)\(")

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def worker():
    """What the processes run, for the same calls in this one."""
    spec = importlib.util.spec_from_file_location("worker", WORKER)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def command(task, folder):
    words = "{coordinator}", "{processes}", "{process}"
    return [sys.executable, "-W", "error", str(WORKER), task, *words, str(folder)]


def results(folder):
    return [pickle.loads((folder / f"{i}.pickle").read_bytes()) for i in range(2)]


def test_two_processes_are_as_one_device(tmp_path, worker):
    """Handles, probabilities, weights, data, states: each process has its shards of what one device has, bit for bit.

    One launch for all that it shows: starting processes is what costs time here.
    """
    with Processes(command("calls", tmp_path), 2, 4) as started:
        wanted = worker.everything(None)
        wanted |= worker.apart(jax.make_mesh((8,), ("replay",)))  # where n is part of the rule
        assert started.wait(300) == [0, 0], started.report()
    for i, process in enumerate(results(tmp_path)):
        assert process["results"].keys() == wanted.keys()
        for name in wanted:
            compare(process["results"][name], wanted[name], f"process {i}, {name}")
        assert process["exchange"] == "collective"
        check_half_of_a_batch(process["results"]["play"]["got"][0], i, worker.BATCH // 2)
        check_insertion_needs_no_communication(*process["add"])
    # Evictions, stale handles and open streams were among it.
    last = wanted["play"]["stats"][-1]
    assert last["evicted"] > 0 and last["stale_updates"] > 0 and last["inserted"] == 40
    assert wanted["streams"]["stats"]["open_streams"] > 0


def compare(got, wanted, what):
    assert got["stats"] == wanted["stats"], what
    records = lambda x: [*x["got"], *([x["state"]] if "state" in x else [])]  # noqa: E731
    for mine, whole in zip(records(got), records(wanted), strict=True):
        assert mine.keys() == whole.keys(), what
        for name, shards in mine.items():
            full = joined(whole[name])
            for place, values in shards.items():
                part = full[tuple(slice(*bounds) for bounds in place)]
                assert values.dtype == full.dtype
                np.testing.assert_array_equal(values, part, err_msg=f"{what}: {name}")


def check_half_of_a_batch(record, process, half):
    shards = record["[1].data['vector']"]
    each = half // 4
    first = half * process
    assert {place[0] for place in shards} == {(first + each * k, first + each * (k + 1)) for k in range(4)}


def check_insertion_needs_no_communication(without, given):
    """`add` has no collective at all; with priorities, the largest of them goes round, one number."""
    assert COLLECTIVE.findall(without) == []
    assert COLLECTIVE.findall(given) == [("f32[]", "all-reduce")]


def joined(shards):
    """The array of its shards."""
    sizes = np.max([[stop for _, stop in place] for place in shards], axis=0, initial=0).astype(int)
    full = np.empty(tuple(sizes), next(iter(shards.values())).dtype)
    for place, values in shards.items():
        full[tuple(slice(*bounds) for bounds in place)] = values
    return full


def test_processes_that_disagree_are_all_told(tmp_path):
    """Of the table, the key, the mesh; and a process that never comes is not waited for without end."""
    run_processes(command("disagree", tmp_path), 2, 4, seconds=120, environment={"GEAR_JAX_TIMEOUT": "4"})
    errors = results(tmp_path)
    for i, process in enumerate(errors):
        start = r"init: got another {} on process\(es\) \[1\] than on process 0, wanted the same on all of them. "
        assert re.match(start.format("selector, slots") + rf"This process, {i}, has selector=", process["table"])
        assert re.match(start.format("key"), process["key"])
        assert re.match(start.format("mesh"), process["mesh"])
        text = rf"process_rows: replay: got process\(es\) \[{1 - i}\] with copies of this one's partitions, wanted .* "
        assert re.match(text + r"Write make_replay\(\.\.\., axis=\('other', 'replay'\)\)", process["copies"])
    start = r"init: got not all of processes \[0, 1\] within 4 s, wanted all of them to call init. "
    assert re.match(start, errors[0]["nobody"])
    assert errors[1]["nobody"] is None


@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_dies_ends_the_others(tmp_path, victim):
    """Killed in a loop of samples. JAX ends the others, with a message, within its heartbeat timeout (10 s here)."""
    with Processes(command("die", tmp_path), 2, 4) as started:
        started.wait_for("sampling", 120)
        started.kill(victim)
        code = started.wait(60, [1 - victim])
        assert code != [0], started.report()
        assert "another task died" in started.output(1 - victim), started.report()


def test_the_launcher_shows_all_outputs():
    say = [sys.executable, "-c", "import sys; print('I am {process} of {processes}'); sys.exit({process})"]
    text = r"(?s)process 0: ended with 0\nI am 0 of 2.*process 1: ended with 1\nI am 1 of 2"
    with pytest.raises(RuntimeError, match=text):
        run_processes(say, 2, seconds=60)
    wait = [sys.executable, "-c", "import time; print('waiting'); time.sleep(600)"]
    with Processes(wait, 2) as started:
        started.wait_for("waiting", 60)
        text = r"(?s)still runs.*process 0: running\nwaiting.*process 1: running\nwaiting"
        with pytest.raises(TimeoutError, match=text):
            started.wait(0.1)
        with pytest.raises(TimeoutError, match="did not print 'done'"):
            started.wait_for("done", 0.1)
    with Processes([sys.executable, "-c", ""], 1) as started:
        with pytest.raises(RuntimeError, match="ended before it printed"):
            started.wait_for("anything", 60)


@pytest.mark.parametrize("value", ["0", "-1", "soon", ""])
def test_timeouts_that_are_none(monkeypatch, value):
    monkeypatch.setenv("GEAR_JAX_TIMEOUT", value)
    with pytest.raises(ValueError, match="GEAR_JAX_TIMEOUT: got"):
        _env.timeout()
