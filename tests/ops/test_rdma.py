"""`ops.rdma_read` and `ops.rdma_fetch` against the reference, under every transformation; their errors.

The peers are other memory of this process (a memory reader); tests/replay has them in processes of their own.
"""

import itertools
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gear_jax import _native, ops
from gear_jax.ops import _place, _reference
from gear_jax.specs import PADS, Window
from gear_jax.testing._peers import Peers
from gear_jax.testing.ops import DTYPES, assert_same_bits, dtype_of, random_values
from gear_jax.transport import missing

GPU = jax.default_backend() == "gpu"
HOST = "pinned_host" if GPU else "device"  # memory that other processes can read
TABLE = (2, 3, 7)  # P, S, T
FAILED = (jax.errors.JaxRuntimeError, ValueError)
numbers = itertools.count(1_000_000)
PLAIN = ("eager", "jit", "scan", "cond", "vmap", "eager_vmap", "nested_vmap")


def module():
    return _native.load("cpu")


class Job:
    """Shards of one table: `devices` of this process, which is peer 1, and one each of peers 0 and 2.

    Args:
      dtypes: of the columns.
      memory: kind of this process's own columns.
    """

    def __init__(self, dtypes=("float32", "uint8"), devices=1, step_shape=(3,), table=TABLE, seed=0, memory=HOST):
        rng = np.random.default_rng(seed)
        self.table, self.devices, self.number = table, devices, next(numbers)
        n = devices + 2
        self.columns = {d: random_values(rng, (n, *table, *step_shape), dtype_of(d)) for d in dtypes}
        self.generation = rng.integers(1, 5, (n, *table[:2])).astype(np.uint32)
        self.stamp = 2 * self.generation
        busy = rng.integers(0, 6, self.stamp.shape)
        self.stamp = np.where(busy == 0, self.stamp - 1, np.where(busy == 1, self.stamp + 1, self.stamp))
        sharding = jax.sharding.NamedSharding(self.mesh(), jax.sharding.PartitionSpec("x"), memory_kind=memory)
        own = jax.tree.map(lambda x: x[1 : 1 + devices].reshape(-1, *x.shape[2:]), (self.columns, self.stamp))
        self.own = jax.tree.map(lambda x: jax.device_put(jnp.array(x), sharding), own)
        regions = [[], [], []]
        for d in range(devices):
            for x in jax.tree.leaves(self.own):
                shard = x.addressable_shards[d].data
                regions[1].append((shard.unsafe_buffer_pointer(), shard.nbytes))
        self.remote_arrays = {p: jax.tree.map(lambda x: x[at].copy(), (self.columns, self.stamp))  # noqa: B023
                              for p, at in ((0, 0), (2, n - 1))}  # fmt: skip
        for p, arrays in self.remote_arrays.items():
            regions[p] = [(x.ctypes.data, x.nbytes) for x in jax.tree.leaves(arrays)]
        each = len(regions[0])
        peers = (0, *(1,) * devices, 2)
        self.remote = ops.Remote(self.number, peers, (0, *(d * each for d in range(devices)), 0))
        module().add_memory_reader(self.number, 1, regions)

    def mesh(self):
        return jax.sharding.Mesh(np.array(jax.devices()[: self.devices]), ("x",))

    def lose(self, peer):
        module().set_peer_alive(self.number, peer, False)
        return np.asarray([p == peer for p in self.remote.peers])

    def rows(self, lead, n, seed=0, shards=None):
        """Rows of any shard; some of none, some with another generation."""
        rng, (p, s, t) = np.random.default_rng(seed), self.table
        shape = (*lead, n)
        shard = rng.integers(-1, len(self.remote.peers) + 1, shape) if shards is None else rng.choice(shards, shape)
        slot = rng.integers(-1, p * s + 1, shape)
        flat = self.generation.reshape(len(self.remote.peers), -1)
        generation = flat[np.clip(shard, 0, len(flat) - 1), np.clip(slot, 0, p * s - 1)]
        generation = generation - (rng.integers(0, 8, shape) == 0).astype(np.uint32)
        ids = (shard, slot, rng.integers(-3, t + 3, shape), rng.integers(-1, t + 2, shape))
        return (*(x.astype(np.int32) for x in ids), generation.astype(np.uint32))

    def wanted(self, rows, window, lost=None, any_generation=False):
        lost = np.zeros(len(self.remote.peers), bool) if lost is None else lost
        rows = [jnp.asarray(x) for x in rows]
        rows[4] = None if any_generation else rows[4]
        whole = window is None or window.length is None
        args = (0, self.table[2], "around", False) if whole else (window.offset, window.length, window.pad)
        got = {
            d: _reference.fetch(jnp.asarray(c), jnp.asarray(self.stamp), jnp.asarray(lost), rows, *args)
            for d, c in self.columns.items()
        }
        one = next(iter(got.values()))
        return {d: x[0] for d, x in got.items()}, {d: x[1] for d, x in got.items()}, one[2]


@pytest.fixture
def job():
    """Makes jobs; their sessions end with the test."""
    made = []

    def make(*args, **kwargs):
        made.append(Job(*args, **kwargs))
        return made[-1]

    yield make
    for j in made:
        module().remove_reader(j.number)


def fetch(j, window=None, any_generation=False, **options):
    """The op as a function of (columns, stamp) and rows."""

    def run(own, rows):
        shards, slots, starts, lengths, generations = rows
        generations = None if any_generation else generations
        return ops.rdma_fetch(j.remote, *own, shards, slots, starts, lengths, window, generations, **options)[:3]

    return run


def two_halves(j, window=None):
    def run(own, rows):
        shards, slots, starts, lengths, generations = rows
        pending, _ = ops.rdma_fetch_start(j.remote, *own, shards, slots, starts, lengths, window, generations, queue=9)
        data, mask, valid, ok = ops.rdma_fetch_done(pending)
        return data, mask, valid & ok

    return run


def transformed(name, f, own, rows):
    """Runs f on each of 4 elements of rows `[4, n]`."""
    if name in ("eager", "jit", "cond"):
        wrap = {"eager": f, "jit": jax.jit(f), "cond": jax.jit(lambda o, r: jax.lax.cond(True, f, f, o, r))}[name]
        return jax.tree.map(lambda *x: jnp.stack(x), *(wrap(own, [x[i] for x in rows]) for i in range(4)))
    if name == "scan":
        return jax.jit(lambda o, r: jax.lax.scan(lambda c, x: (c, f(o, x)), 0, r)[1])(own, rows)
    if name == "nested_vmap":
        g = jax.jit(jax.vmap(jax.vmap(f, (None, 0)), (None, 0)))
        got = g(own, [x.reshape(2, 2, *x.shape[1:]) for x in rows])
        return jax.tree.map(lambda x: x.reshape(4, *x.shape[2:]), got)
    g = jax.vmap(f, (None, 0))
    return (g if name == "eager_vmap" else jax.jit(g))(own, list(rows))


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("any_generation", [False, True])
def test_transformations(job, name, any_generation):
    j, window = job(), Window(-2, 4)
    rows = j.rows((4,), 12)
    got = transformed(name, fetch(j, window, any_generation), j.own, rows)
    for i in range(4):
        element = [x[i] for x in rows]
        wanted = j.wanted(element, window, any_generation=any_generation)
        assert_same_bits(jax.tree.map(lambda x: x[i], got), wanted, f"{name} {i}: ")  # noqa: B023


@pytest.mark.parametrize("name", ["eager", "jit", "scan", "cond"])
def test_two_halves(job, name):
    j, window = job(), Window(-2, 4)
    rows = j.rows((4,), 12)
    got = transformed(name, two_halves(j, window), j.own, rows)
    for i in range(4):
        assert_same_bits(jax.tree.map(lambda x: x[i], got), j.wanted([x[i] for x in rows], window))  # noqa: B023
    ops.release_queue(9)


def structs(tree):
    """What stands for a process's own arrays, of one device."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.sharding.shard_shape(x.shape), x.dtype), tree)


@pytest.mark.parametrize("how", ["pmap", "shard_map", "jit"])
@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("devices", [1, pytest.param(4, marks=pytest.mark.devices(4))])
def test_without_the_arrays(job, devices, halves, how):
    """Shapes and dtypes stand for what the session exposes: a pmap on a GPU takes nothing in pinned_host."""
    j, window = job(devices=devices, step_shape=(5,)), Window(-1, 5)
    rows = j.rows((devices,), 40)
    whole = two_halves(j, window) if halves else fetch(j, window)
    f = lambda rows: whole(structs(j.own), rows)  # noqa: E731
    if how == "shard_map":
        spec = jax.sharding.PartitionSpec("x")
        run = jax.jit(jax.shard_map(f, mesh=j.mesh(), in_specs=(spec,), out_specs=spec))
        got = run([x.reshape(-1) for x in rows])
        got = jax.tree.map(lambda x: np.asarray(x).reshape(devices, -1, *x.shape[1:]), got)
    elif how == "pmap":
        # In NumPy before it is cut: XLA, which cuts what lies on several devices, may flush what is denormal.
        got = jax.tree.map(np.asarray, jax.pmap(f, devices=jax.devices()[:devices])(list(rows)))
    else:
        got = jax.tree.map(lambda *x: jnp.stack(x), *(jax.jit(f)([x[i] for x in rows]) for i in range(devices)))
    for i in range(devices):
        assert_same_bits(jax.tree.map(lambda x: x[i], got), j.wanted([x[i] for x in rows], window))  # noqa: B023


@pytest.mark.parametrize("how", ["pmap", "jit"])
def test_read_without_the_arrays(job, how):
    j = job()
    j.lose(2)
    f = lambda ticket: ops.rdma_read(j.remote, structs(j.own), ticket=ticket)  # noqa: E731
    run = jax.jit(f) if how == "jit" else jax.pmap(f, devices=jax.devices()[:1])
    (columns, stamp), here, ticket = run(jnp.zeros((1, 1)[how == "jit" :], jnp.int32))
    one = (lambda x: x) if how == "jit" else (lambda x: x[0])
    np.testing.assert_array_equal(one(here), [True, True, False])
    for name, x in columns.items():
        assert_same_bits(one(x)[:2], j.columns[name][:2])
    assert_same_bits(one(stamp)[:2], j.stamp[:2])
    assert not one(stamp)[2].any() and not one(ticket).any()


def test_arrays_and_what_stands_for_them_do_not_mix(job):
    j = job()
    rows, (columns, stamp) = list(j.rows((), 3)), j.own
    text = r"rdma_fetch: {}: got .*, wanted a jax.ShapeDtypeStruct, as others are\. Pass arrays, or"
    with pytest.raises(TypeError, match=text.format("stamp")):
        fetch(j)((structs(columns), stamp), rows)
    with pytest.raises(TypeError, match=text.format(r"columns\[0\]")):
        fetch(j)((columns, structs(stamp)), rows)
    with pytest.raises(ValueError, match=r"stamp: got uint32\[2, 4\], wanted uint32\[2, 3\]"):
        fetch(j)((structs(columns), jax.ShapeDtypeStruct((2, 4), np.uint32)), rows)
    wrong = {name: jax.ShapeDtypeStruct((2, 3, 8, 3), x.dtype) for name, x in columns.items()}
    with pytest.raises(FAILED, match=r"region 0 of process 0: got .* bytes, wanted"):
        jax.block_until_ready(fetch(j)((wrong, structs(stamp)), rows))


@pytest.mark.parametrize("how", ["shard_map", "pmap"])
@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.devices(4)
def test_over_devices(job, how, halves):
    j, window = job(devices=4), Window(-1, 5)
    rows = j.rows((4,), 9)
    f = two_halves(j, window) if halves else fetch(j, window)
    if how == "pmap" and GPU:
        pytest.skip("pmap takes no arrays in pinned_host: test_without_the_arrays")
    if how == "shard_map":
        spec = jax.sharding.PartitionSpec("x")
        run = jax.jit(jax.shard_map(f, mesh=j.mesh(), in_specs=(spec, spec), out_specs=spec))
        got = run(j.own, [x.reshape(-1) for x in rows])
        got = jax.tree.map(lambda x: np.asarray(x).reshape(4, -1, *x.shape[1:]), got)
    else:
        # A column of a pmap is one array for each device, stacked.
        split = jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), j.own)
        pmapped = jax.pmap(f)
        own = jax.pmap(lambda x: x)(split)
        regions = [[], [], []]
        for d in range(4):
            shards = [x.addressable_shards[d].data for x in jax.tree.leaves(own)]
            regions[1] += [(x.unsafe_buffer_pointer(), x.nbytes) for x in shards]
        for p, arrays in j.remote_arrays.items():
            regions[p] = [(x.ctypes.data, x.nbytes) for x in jax.tree.leaves(arrays)]
        module().add_memory_reader(j.number, 1, regions)
        got = pmapped(own, list(rows))
    for i in range(4):
        assert_same_bits(jax.tree.map(lambda x: x[i], got), j.wanted([x[i] for x in rows], window))  # noqa: B023


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(job, dtype, memory):
    j, window = job((dtype,), step_shape=(), memory=HOST if GPU else memory), Window(-2, 4, pad="head")
    rows = j.rows((), 20)
    assert_same_bits(jax.jit(fetch(j, window))(j.own, list(rows)), j.wanted(rows, window))


@pytest.mark.parametrize("pad", PADS)
@pytest.mark.parametrize("n", [0, 1, 2, 31, 300])
def test_sizes(job, n, pad):
    j, window = job(step_shape=(17,)), Window(-2, 6, pad=pad)
    rows = j.rows((), n)
    assert_same_bits(jax.jit(fetch(j, window))(j.own, list(rows)), j.wanted(rows, window))


@pytest.mark.parametrize("shards", [[1], [0], [0, 2], [0, 1, 2]], ids=["local", "one peer", "all remote", "mixed"])
def test_large_rows(job, shards):
    j = job(("uint8",), step_shape=(30_001,))
    rows = j.rows((), 24, shards=shards)
    for run in (fetch(j), two_halves(j)):
        assert_same_bits(jax.jit(run)(j.own, list(rows)), j.wanted(rows, None))
    counts = ops.rdma_counters(j.number)
    assert counts["rows"] == 48
    assert (counts["remote_rows"] == 0) == (shards == [1])


def test_a_lost_peer_gives_padding(job):
    j, window = job(), Window(0, 4)
    lost = j.lose(2)
    rows = j.rows((), 60)
    for run in (fetch(j, window), two_halves(j, window)):
        got = jax.jit(run)(j.own, list(rows))
        assert_same_bits(got, j.wanted(rows, window, lost))
    assert ops.rdma_counters(j.number)["lost_rows"] > 0
    module().set_peer_alive(j.number, 2, True)
    assert_same_bits(jax.jit(fetch(j, window))(j.own, list(rows)), j.wanted(rows, window))


def test_a_lost_peer_is_an_error_on_demand(job):
    j = job()
    j.remote = ops.Remote(j.number, j.remote.peers, j.remote.regions, "error")
    rows = j.rows((), 60)
    for run in (fetch(j), two_halves(j)):
        assert_same_bits(jax.jit(run)(j.own, list(rows)), j.wanted(rows, None))
    j.lose(2)
    for run in (fetch(j), two_halves(j)):
        with pytest.raises(FAILED, match=r"rdma_fetch: got no answer from process\(es\) 2 within the deadline"):
            jax.block_until_ready(jax.jit(run)(j.own, list(rows)))
    for _ in range(3):  # as long as it is gone
        with pytest.raises(FAILED, match="rdma_read: got no answer"):
            jax.block_until_ready(ops.rdma_read(j.remote, j.own))
    j.remote = ops.Remote(j.number, j.remote.peers, j.remote.regions)
    assert not ops.rdma_read(j.remote, j.own)[1].all()


@pytest.mark.skipif(missing("ucx") != "", reason=f"no transport: {missing('ucx')}")
def test_a_loss_that_is_known_late():
    """On a GPU the call that meets it has returned: the next one that is to fail for it does, and no other."""
    shape, sizes = (1, 8, 1, 64), (512, 32)
    own = [ops.zeros(shape, jnp.uint8, HOST), ops.zeros((1, 8), jnp.uint32, HOST)]
    memory = [(x.unsafe_buffer_pointer(), x.nbytes) for x in jax.block_until_ready(own)]
    one, zero = jnp.ones(4, jnp.int32), jnp.zeros(4, jnp.int32)
    with Peers("ucx", sizes, environment={"UCX_TLS": "tcp,self"}, deadline=1.0, memory=memory) as peers:
        peers.ask(1, do="fill", region=1, value=0)
        fails, goes_on = (ops.Remote(0, (0, 1), (0, 0), on_loss) for on_loss in ("error", "invalid"))
        fetch = jax.jit(lambda remote, own: ops.rdma_fetch(remote, *own, one, zero, zero, one)[2], static_argnums=0)
        run = lambda remote: fetch(remote, own)  # noqa: E731
        assert run(fails).all() and run(goes_on).all()
        peers.signal(1, signal.SIGSTOP)
        if GPU:
            assert not run(fails).any()
        else:
            with pytest.raises(FAILED, match=r"rdma_fetch: got no answer from process\(es\) 1 within the deadline"):
                jax.block_until_ready(run(fails))
        assert not run(goes_on).any()
        peers.signal(1, signal.SIGCONT)
        peers.wait_until(1, True)
        if GPU:
            with pytest.raises(FAILED, match=r"rdma_fetch: got no answer from process\(es\) 1 within the deadline"):
                jax.block_until_ready(run(fails))
        assert run(fails).all() and run(goes_on).all()


def test_only_what_a_window_shows_travels(job):
    j = job(("uint8",), step_shape=(1000,))
    poisoned = j.remote_arrays[0][0]["uint8"]
    rows = [np.asarray(x) for x in ([0], [1], [2], [7], [j.generation[0].reshape(-1)[1]])]
    rows = [x.astype(np.uint32 if i == 4 else np.int32) for i, x in enumerate(rows)]
    data, _, _ = fetch(j, Window(0, 3), True)(j.own, rows)
    np.testing.assert_array_equal(data["uint8"][0], poisoned[0, 1, 2:5])


def test_generations_tell_what_is_stale(job):
    j = job()
    j.remote_arrays[0][1][:] = 6  # the stamps of peer 0: generation 3 everywhere
    rows = [jnp.zeros(3, jnp.int32)] * 3 + [jnp.full(3, 7, jnp.int32), jnp.asarray([2, 3, 4], jnp.uint32)]
    _, mask, valid = fetch(j)(j.own, rows)
    np.testing.assert_array_equal(valid, [False, True, False])
    assert not mask["float32"][0].any() and mask["float32"][1].all()
    counts = ops.rdma_counters(j.number)
    assert (counts["stale"], counts["torn"], counts["retries"]) == (1, 1, 7)


@pytest.mark.parametrize("name", PLAIN)
def test_rdma_read_mirrors_all_shards(job, name):
    j = job()
    run = transformed(name, lambda own, _: ops.rdma_read(j.remote, own)[:2], j.own, [jnp.arange(4)])
    for i in range(4):
        assert_same_bits(jax.tree.map(lambda x: x[i], run[0]), (j.columns, j.stamp))  # noqa: B023
        assert run[1][i].all()


def test_rdma_read_of_a_lost_peer_is_zero(job):
    j = job()
    lost = j.lose(0)
    got, here, _ = jax.jit(lambda own: ops.rdma_read(j.remote, own))(j.own)
    np.testing.assert_array_equal(here, ~lost)
    kept = jax.tree.map(lambda x: np.where(lost.reshape(-1, *[1] * (x.ndim - 1)), np.zeros((), x.dtype), x),
                        (j.columns, j.stamp))  # fmt: skip
    assert_same_bits(got, kept)


def test_a_write_after_a_fetch_leaves_the_column_where_it_is(job):
    """The ticket orders them: no copy, and the next call finds the columns where they are exposed."""
    j = job()
    rows = j.rows((), 9)

    def step(own, rows):
        (columns, stamp), (shards, slots, starts, lengths, generations) = own, rows
        data, _, valid, ticket = ops.rdma_fetch(
            j.remote, columns, stamp, shards, slots, starts, lengths, None, generations
        )
        values = jax.tree.map(lambda x: x[:1], data)
        new = ops.scatter(columns, jnp.zeros(1, jnp.int32), values, stamps=(stamp, jnp.full(1, 8, jnp.uint32)),
                          ticket=ticket)  # fmt: skip
        return new, valid

    run = jax.jit(step, donate_argnums=0)
    own = j.own
    before = jax.tree.map(lambda x: x.unsafe_buffer_pointer(), own)
    for _ in range(3):
        own, _ = run(own, list(rows))
    assert jax.tree.map(lambda x: x.unsafe_buffer_pointer(), own) == before


def test_a_started_fetch_is_not_changed_by_a_later_write(job):
    j = job()
    rows = j.rows((), 30, shards=[1])

    def step(own, rows):
        (columns, stamp), (shards, slots, starts, lengths, generations) = own, rows
        pending, ticket = ops.rdma_fetch_start(
            j.remote, columns, stamp, shards, slots, starts, lengths, None, generations
        )
        everything = jnp.arange(6, dtype=jnp.int32)
        zeros = jax.tree.map(lambda x: jnp.zeros((6, *x.shape[2:]), x.dtype), columns)
        new = ops.scatter(columns, everything, zeros, ticket=ticket)
        return (new, stamp), ops.rdma_fetch_done(pending, after=new)[:3]

    wanted = j.wanted(rows, None)
    _, got = jax.jit(step, donate_argnums=0)(j.own, list(rows))
    assert_same_bits(got, wanted)


def test_a_queue_drops_the_oldest(job):
    j = job()
    rows = [jnp.asarray(x) for x in j.rows((), 5)]
    start = lambda: ops.rdma_fetch_start(j.remote, *j.own, *rows[:4], None, rows[4], queue=11, depth=2)[0]  # noqa: E731
    first, second, third = start(), start(), start()
    data, mask, valid, ok = ops.rdma_fetch_done(first)
    assert not ok and not valid.any() and not jax.tree.reduce(lambda a, x: a | x.any(), mask, False)
    assert all((np.asarray(x) == 0).all() for x in jax.tree.leaves(data))
    for pending in (third, second):
        assert ops.rdma_fetch_done(pending)[3]
        assert not ops.rdma_fetch_done(pending)[3], "it has been handed out"
    fourth = start()
    ops.release_queue(11)
    assert not ops.rdma_fetch_done(fourth)[3]


def test_checks_name_the_row(job, checks):
    j = job()
    zero, one = jnp.zeros(2, jnp.int32), jnp.ones(2, jnp.uint32)
    for shards, slots in (([0, 3], [0, 0]), ([0, 0], [0, 6]), ([0, -2], [0, 0])):
        with pytest.raises(FAILED, match="rdma_fetch: row 1: got shard"):
            ids = jnp.asarray(shards, jnp.int32), jnp.asarray(slots, jnp.int32)
            jax.block_until_ready(fetch(j)(j.own, [*ids, zero, zero, one]))
    _, _, valid = fetch(j)(j.own, [jnp.asarray([-1, 7], jnp.int32), jnp.asarray([0, -1], jnp.int32), zero, zero, one])
    assert not valid.any()


def test_arrays_that_are_not_exposed_are_refused(job):
    j = job()
    rows = [jnp.asarray(x) for x in j.rows((), 3)]
    other = jax.tree.map(lambda x: jax.device_put(np.asarray(x) + np.ones((), x.dtype), x.sharding), j.own)
    for run in (lambda: fetch(j)(other, rows), lambda: ops.rdma_read(j.remote, other)):
        with pytest.raises(FAILED, match=r"operand 0: got an array at .*replay.connect\(state\)"):
            jax.block_until_ready(run())


def test_a_session_that_is_not_open_is_named(job):
    j = job()
    rows = [jnp.asarray(x) for x in j.rows((), 3)]
    module().remove_reader(j.number)
    with pytest.raises(FAILED, match=rf"session: got number {j.number}, which is no open session of this process"):
        jax.block_until_ready(fetch(j)(j.own, rows))
    with pytest.raises(FAILED, match="rdma_read: session"):
        jax.block_until_ready(ops.rdma_read(j.remote, j.own))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"stamp": jnp.zeros((2, 3), jnp.int32)}, r"stamp: got int32\[2, 3\], wanted uint32\[2, 3\]"),
        ({"stamp": jnp.zeros((6,), jnp.uint32)}, r"stamp: got uint32\[6\], wanted uint32\[2, 3\]"),
        ({"shards": jnp.zeros((3,), jnp.int32)}, r"shards: got shape \(3,\), wanted shape \(2,\)"),
        ({"generations": jnp.zeros((2,), jnp.int32)}, r"generations: got int32\[2\], wanted uint32\[2\]"),
        ({"tries": 0}, "tries: got 0, wanted an integer"),
        ({"remote": 3}, "rdma_fetch: remote: got int, wanted a Remote"),
    ],
)
def test_what_does_not_fit_is_refused(change, text):
    zero = jnp.zeros(2, jnp.int32)
    columns, stamp = ops.zeros((2, 3, 7), jnp.float32, HOST), ops.zeros((2, 3), jnp.uint32, HOST)
    args = {
        "remote": ops.Remote(1, (0,), (0,)), "columns": columns, "stamp": stamp,
        "shards": zero, "slots": zero, "starts": zero, "lengths": zero,
    }  # fmt: skip
    with pytest.raises((TypeError, ValueError), match=text):
        ops.rdma_fetch(**{**args, **change})


def test_a_remote_is_checked():
    with pytest.raises(ValueError, match=r"Remote\.regions: got 1 for 2 shards"):
        ops.Remote(1, (0, 1), (0,))
    with pytest.raises(ValueError, match="on_loss: got 'ignore'"):
        ops.Remote(1, (0,), (0,), "ignore")


def test_batched_columns_under_vmap_are_refused(job):
    j = job()
    rows = [jnp.asarray(x) for x in j.rows((4,), 3)]
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=HOST)
    own = jax.tree.map(lambda x: jax.device_put(np.stack([np.asarray(x)] * 4), sharding), j.own)
    with pytest.raises(ValueError, match=r"ops\.rdma_fetch under vmap: got batched columns"):
        jax.vmap(fetch(j))(own, rows)
    with pytest.raises(ValueError, match=r"ops\.rdma_read under vmap: got batched arrays"):
        jax.vmap(lambda x: ops.rdma_read(j.remote, x))(own)
    with pytest.raises(ValueError, match=r"ops\.rdma_fetch_start under vmap"):
        jax.vmap(two_halves(j), (None, 0))(j.own, rows)


def test_memory_of_a_gpu_is_refused_at_trace_time(monkeypatch):
    class Gpu:
        platform = "gpu"

    monkeypatch.setattr(_place, "default_device", Gpu)
    remote, zero = ops.Remote(1, (0,), (0,)), jnp.zeros(2, jnp.int32)
    columns, stamp = jnp.zeros((2, 3, 7)), jnp.zeros((2, 3), jnp.uint32)
    for name in ("rdma_fetch", "rdma_fetch_start"):
        run = getattr(ops, name)
        with pytest.raises(ValueError, match=rf"{name}: columns\[0\]: got an array in the GPU's memory"):
            run(remote, columns, stamp, zero, zero, zero, zero)
    with pytest.raises(ValueError, match=r"rdma_read: fields\[0\]: .* wanted one in pinned_host"):
        ops.rdma_read(remote, columns)
