"""Any sequence of what actors and learners do, dying in between, loses and doubles nothing. The core, without jax."""

import os
import tempfile
import time

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import gear_jax as gear
from gear_jax.actors import make_ring
from gear_jax.actors._errors import core

LANES, SLOTS, STEPS = 3, 2, 2
LANE, OWNER = 384, 0  # offset of the lanes, and of the owner's word in one (test_ring checks the layout)
LEARNER = 192
NOBODY = 1 << 40  # process 1, started at another time than it was


class Machine(RuleBasedStateMachine):
    """The model: for each lane what its writer has open, and the list of what is committed and not consumed."""

    def __init__(self):
        super().__init__()
        self.directory = tempfile.mkdtemp(dir="/dev/shm", prefix="gear_jax_test.")
        table = gear.TableSpec({"x": gear.ColumnSpec((), "int64")}, STEPS, 1)
        self.ring = make_ring(table, LANES, SLOTS, directory=self.directory)
        self.words = self.ring.held.bytes()[:4096].view(np.uint64)
        self.actors = [core().Actor(self.ring.held, i) for i in range(LANES)]
        self.learner = core().Learner(self.ring.held)
        self.opened = [{} for _ in range(LANES)]  # slot: whether it is lost (its writer has died)
        self.sequence = [0] * LANES
        self.pending, self.number, self.code = [], 0, 0

    def teardown(self):
        self.learner.leave()
        for actor in self.actors:
            actor.leave()
        self.ring.unlink()
        os.rmdir(self.directory)

    def taken(self, i):
        return len(self.opened[i]) + sum(p["lane"] == i for p in self.pending)

    @rule(i=st.integers(0, LANES - 1))
    def begin(self, i):
        slot = self.actors[i].begin(time.monotonic_ns())
        if self.taken(i) == SLOTS:
            assert slot == -1
        else:
            assert slot // SLOTS == i and slot not in self.opened[i]
            assert slot not in [p["slot"] for p in self.pending]
            self.opened[i][slot] = False

    @rule(i=st.integers(0, LANES - 1), version=st.integers(-(2**63), 2**63 - 1), length=st.integers(1, STEPS))
    def commit(self, i, version, length):
        mine = [slot for slot, lost in self.opened[i].items() if not lost]
        if not mine:
            return
        slot, self.code, self.number = mine[-1], self.code + 1, self.number + 1
        self.ring.columns[0][slot] = self.code
        assert self.actors[i].commit(slot, length, 0, 0.0, version, self.code) == self.number
        del self.opened[i][slot]
        self.pending.append(
            {"slot": slot, "lane": i, "number": self.number, "sequence": self.sequence[i], "length": length,
             "version": version, "checksum": self.code}
        )  # fmt: skip
        self.sequence[i] += 1

    @rule(i=st.integers(0, LANES - 1))
    def abandon(self, i):
        mine = [slot for slot, lost in self.opened[i].items() if not lost]
        if mine:
            self.actors[i].abandon(mine[0])
            del self.opened[i][mine[0]]

    @rule(i=st.integers(0, LANES - 1))
    def die(self, i):
        self.words[(LANE + 128 * i + OWNER) // 8] = NOBODY
        self.actors[i] = core().Actor(self.ring.held, i)
        self.opened[i] = dict.fromkeys(self.opened[i], True)
        self.sequence[i] = 0

    @rule(most=st.integers(1, 4))
    def drain(self, most):
        batch = self.learner.collect(most)
        self.compare(batch.fields(), self.pending[:most])
        for slot, checksum in zip(batch.fields()["slot"], batch.fields()["checksum"], strict=True):
            assert (self.ring.columns[0][slot] == checksum).all()
        self.learner.consume(batch)
        self.pending = self.pending[most:]

    @rule()
    def reclaim(self):
        lost = sum(sum(slots.values()) for slots in self.opened)
        assert self.learner.reclaim() == lost
        self.opened = [{s: gone for s, gone in slots.items() if not gone} for slots in self.opened]

    @rule(count=st.integers(0, 3))
    def learner_dies(self, count):
        """Between the count of what is consumed and the freeing of the slots."""
        count = min(count, len(self.pending))
        consumed = LEARNER + 8
        self.words[consumed // 8] += count
        self.words[LEARNER // 8] = NOBODY
        self.learner = core().Learner(self.ring.held)
        self.pending = self.pending[count:]
        self.opened = [{s: gone for s, gone in slots.items() if not gone} for slots in self.opened]

    @invariant()
    def all_is_there(self):
        assert self.learner.pending == len(self.pending)
        self.compare(self.learner.collect(100).fields(), self.pending)

    @staticmethod
    def compare(fields, wanted):
        for name in ("slot", "lane", "number", "sequence", "length", "version", "checksum"):
            assert fields[name].tolist() == [w[name] for w in wanted]


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=40)
