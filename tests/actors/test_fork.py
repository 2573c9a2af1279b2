"""A child that was forked has copies of a writer and a learner: it must not give up, or use, what is its parent's."""

import resource
import subprocess
import sys

import numpy as np
import pytest

from gear_jax.actors import RingForeignError, Writer, make_ring
from gear_jax.actors._errors import core, translated

# In a process without jax, whose threads a fork would not survive.
PROGRAM = """
import os, sys
import gear_jax as gear
from gear_jax.actors import RingBusyError, Writer, make_ring
from gear_jax.actors._errors import core

ring = make_ring(gear.TableSpec({"x": gear.ColumnSpec((), "int32")}, 2, 4), 1, 2, directory=sys.argv[1])
writer, learner = Writer(ring), core().Learner(ring.held)
writer.append({"x": 1})
child = os.fork()
if child == 0:
    refused = 0
    for call in (writer.commit, lambda: writer.append({"x": 2}), writer.begin, lambda: writer.abandon()):
        try:
            call()
        except RingBusyError as e:
            refused += "a call in a forked process" in str(e)
    writer.close()
    del writer, learner  # as at the end of a child that ends like any other program
    os._exit(refused)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
report = ring.report()
assert report["learner"] == "running" and report["actors"][0]["life"] == "running", report
assert report["actors"][0]["open"] == 1, report
assert writer.commit() == 1
assert learner.collect(10).fields()["length"].tolist() == [1]
ring.unlink()
"""


def test_a_forked_child_leaves_its_parent_s_ring_alone(shm):
    done = subprocess.run([sys.executable, "-c", PROGRAM, shm], timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_process_without_files_left_takes_nobody_for_dead():
    word = core().owner_of(0)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(OSError):
            open("/proc/self/stat")
        life = core().life_of(word)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert life == "running"


def test_a_length_that_no_slot_has_is_damage(shm, table):
    ring = make_ring(table, 1, 2, directory=shm)
    with Writer(ring) as writer:
        writer.begin()
        writer.commit(1)
    learner = core().Learner(ring.held)
    slots_at = int(ring.held.bytes()[64:72].view(np.uint64)[0])
    length = ring.held.bytes()[slots_at + 20 : slots_at + 24].view(np.uint32)
    assert length[0] == 1
    length[0] = ring.steps + 1
    with pytest.raises(RingForeignError, match="something else has written to the file"), translated():
        learner.collect(10)
    ring.unlink()
