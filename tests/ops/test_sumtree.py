"""`ops.sumtree_update` and `ops.sumtree_sample`: layout, rounding, drift, distribution, partitions held apart."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy import stats

from gear_jax import _random, ops
from gear_jax.ops import _reference
from gear_jax.testing.ops import (
    TRANSFORMS,
    assert_same_bits,
    check_sumtree_sample,
    check_sumtree_update,
    sums_oracle,
)

LEAVES = (1, 2, 15, 16, 17, 255, 256, 257, 4095, 4096, 4097)
update = jax.jit(ops.sumtree_update)


@functools.partial(jax.jit, static_argnames=("draws", "stratified"))
def _sample(mass, sums, bits, **options):
    return ops.sumtree_sample(mass, sums, *fields_of(mass), bits, **options)


_drawn_rows = jax.jit(_reference.drawn_rows)


def fields_of(mass):
    """A length and a generation for each slot, no two alike."""
    number = np.arange(mass.size, dtype=np.int32).reshape(mass.shape)
    return jnp.asarray(number + 1), jnp.asarray(~number.view(np.uint32))


def sample(mass, sums, bits, **options):
    """Draws from a table of which all is held here; what is said of the slots is checked."""
    got = _sample(mass, sums, bits, **options)
    normal = (mass == 0) | (mass >= np.finfo(np.float32).tiny)  # a CPU's XLA takes others for 0
    if mass.size and np.isfinite(mass).all() and normal.all() and got.total[0] < 2.0**126:
        wanted = _drawn_rows(got.slot, got.total, mass, *fields_of(mass))
        partition, probability, length, generation, least = wanted
        assert_same_bits((got.partition, got.length, got.generation), (partition, length, generation))
        # A GPU's XLA divides in its own way; that a GPU draws the CPU's bits is tested in C++ (cuda/tests).
        close = assert_same_bits if jax.default_backend() == "cpu" else functools.partial(assert_allclose, rtol=3e-7)
        close(got.probability, probability)
        close(got.least, least)
    np.testing.assert_array_equal(got.ticket, [0])
    return got


def _empty(p, s):
    width = ops.sumtree_width(s)
    return jnp.zeros((p, s), jnp.float32), jnp.zeros((p, s), jnp.float32), jnp.zeros((p, width), jnp.float32)


def tree_of(mass):
    """(mass, sums) with the sums formed by the op."""
    mass = jnp.asarray(mass, jnp.float32)
    p, s = mass.shape
    _, mass, sums = update(*_empty(p, s), jnp.arange(p * s, dtype=jnp.int32), mass.reshape(-1), mass.reshape(-1))
    return mass, sums


def random_bits(seed, draws):
    return jax.random.bits(jax.random.key(seed), (draws, 2), jnp.uint32)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_update_under_transformations(transform):
    check_sumtree_update(ops.sumtree_update, transform)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_sample_under_transformations(transform):
    check_sumtree_sample(ops.sumtree_sample, transform)


@pytest.mark.parametrize("writes", [0, 1, 5, 1000])
@pytest.mark.parametrize("leaves", [1, 15, 16, 17, 257, 4097])
def test_update_sizes(leaves, writes):
    """Few writes take the path of each, many form all sums anew: the bits are the same."""
    check_sumtree_update(ops.sumtree_update, "jit", partitions=3, leaves=leaves, writes=writes)


@pytest.mark.parametrize("leaves", LEAVES)
def test_layout(leaves):
    mass = np.random.default_rng(leaves).uniform(size=(2, leaves)).astype(np.float32)
    _, sums = tree_of(mass)
    assert sums.shape == (2, ops.sumtree_width(leaves))
    assert_same_bits(sums, _reference.sums(jnp.asarray(mass)))
    assert_same_bits(sums, sums_oracle(mass))
    np.testing.assert_array_equal(ops.sumtree_roots(sums), sums[:, -16])
    np.testing.assert_allclose(ops.sumtree_roots(sums), mass.sum(1, dtype=np.float64), rtol=1e-6)


def test_the_last_of_several_writes_stays():
    for count in (6, 6000):  # a path each, a rebuild
        rng = np.random.default_rng(count)
        slots = jnp.asarray(rng.integers(-1, 65, count), jnp.int32)
        new = jnp.asarray(rng.uniform(size=(2, count)), jnp.float32)
        priority, mass, sums = update(*_empty(1, 64), slots, *new)
        assert_same_bits(priority[0], _reference.last_write(jnp.zeros(64, jnp.float32), slots, new[0]))
        assert_same_bits(mass[0], _reference.last_write(jnp.zeros(64, jnp.float32), slots, new[1]))
        assert_same_bits(sums, sums_oracle(np.asarray(mass)))


@pytest.mark.parametrize("writes", [7, 2000])
def test_no_drift_after_many_updates(writes):
    """After 200 rounds of masses over 12 orders of magnitude the sums are those of a tree that was built at once."""

    def round_(tree, key):
        a, b, c = jax.random.split(key, 3)
        slots = jax.random.randint(a, (writes,), 0, 2 * 700, jnp.int32)
        new = 10.0 ** jax.random.uniform(b, (writes,), jnp.float32, -6, 6)
        new = new * jax.random.bernoulli(c, 0.8, (writes,)).astype(jnp.float32)
        return ops.sumtree_update(*tree, slots, new, new), None

    tree, _ = jax.jit(lambda t, k: jax.lax.scan(round_, t, k))(_empty(2, 700), jax.random.split(jax.random.key(0), 200))
    _, mass, sums = tree
    assert (np.asarray(mass) > 0).sum() > 500
    assert_same_bits(sums, sums_oracle(np.asarray(mass)))
    cleared = update(*tree, jnp.arange(1400, dtype=jnp.int32), jnp.zeros(1400), jnp.zeros(1400))
    assert not np.asarray(cleared[2]).any()


def test_the_history_does_not_show():
    rng = np.random.default_rng(1)
    mass = rng.uniform(size=300).astype(np.float32)
    tree = _empty(1, 300)
    for slots in np.array_split(rng.permutation(300).astype(np.int32), 60):
        tree = update(*tree, slots, mass[slots] * np.float32(3), mass[slots] * np.float32(3))
    tree = update(*tree, np.arange(300, dtype=np.int32), mass, mass)
    assert_same_bits(tree[2], tree_of(mass[None])[1])


def test_updates_are_in_place():
    run = jax.jit(ops.sumtree_update, donate_argnums=(0, 1, 2))
    tree = jax.tree.map(lambda x: x + 0, _empty(2, 50))
    before = [x.unsafe_buffer_pointer() for x in tree]
    got = run(*tree, jnp.zeros(1, jnp.int32), jnp.ones(1, jnp.float32), jnp.ones(1, jnp.float32))
    assert [x.unsafe_buffer_pointer() for x in got] == before


@pytest.mark.parametrize("leaves", [1, 15, 16, 17, 256, 257, 4097])
@pytest.mark.parametrize("kind", ["even", "one_tiny", "one_huge", "sparse", "powers", "last", "first", "smallest"])
def test_a_slot_without_mass_is_never_drawn(kind, leaves):
    rng = np.random.default_rng(leaves)
    mass = np.zeros((3, leaves), np.float32)
    tiny = np.finfo(np.float32).tiny
    if kind == "even":
        mass[:, ::2] = 1
    elif kind == "one_tiny":
        mass[1, leaves // 2] = tiny
    elif kind == "one_huge":
        mass[:, ::3], mass[1, leaves // 2] = 1e-30, 3e38
    elif kind == "sparse":
        mass[rng.uniform(size=mass.shape) < 0.05] = 0.1
        mass[2, -1] = 0.1
    elif kind == "powers":
        mass = (2.0 ** -rng.integers(0, 60, mass.shape)).astype(np.float32) * (rng.uniform(size=mass.shape) < 0.5)
        mass[0, 0] = 1
    elif kind == "last":
        mass[0, 0], mass[1, -1] = 1e-20, 0.3
    elif kind == "first":
        mass[0, 0] = 0.7
    else:
        mass[:, ::2] = tiny
    mass, sums = tree_of(mass.astype(np.float32))
    # Random draws, and the ends of the range, where rounding may leave a draw beyond the last slot with mass.
    edge = np.array([[0, 0], [0, 1], [2**32 - 1] * 2, [2**32 - 1, 0], [2**31, 0]], np.uint32)
    bits = np.concatenate([edge, random_bits(0, 20000)])
    got = sample(mass, sums, bits)
    slot, flat = np.asarray(got.slot), np.asarray(mass).reshape(-1)
    assert (slot >= 0).all() and (flat[slot] > 0).all()
    assert got.total[0] > 0


def test_denormal_masses():
    """XLA's threads take denormals for zero: they have no mass, and draws beside them are right."""
    mass = np.zeros((1, 64), np.float32)
    mass[0, 3:9] = 1e-40
    assert_nothing_drawn(sample(*tree_of(mass), random_bits(0, 5000)))
    mass[0, 40] = 1e-30
    assert (sample(*tree_of(mass), random_bits(0, 5000)).slot == 40).all()


def test_denormal_probabilities_are_zero():
    mass = np.zeros((1, 64), np.float32)
    mass[0, 3], mass[0, 9] = 1e-30, 1e30
    got = sample(*tree_of(mass), np.array([[0, 0], [1 << 31, 0]], np.uint32))
    np.testing.assert_array_equal(got.slot, [3, 9])
    np.testing.assert_array_equal(got.probability, [0, 1])
    np.testing.assert_array_equal(got.least, [1])


def test_a_total_whose_reciprocal_is_denormal():
    mass = np.zeros((1, 64), np.float32)
    mass[0, 3], mass[0, 9] = 1e38, 2e38
    got = sample(*tree_of(mass), np.array([[0, 0], [1 << 31, 0]], np.uint32))
    np.testing.assert_array_equal(got.probability, mass[0, [3, 9]] / np.asarray(got.total))


def assert_nothing_drawn(got):
    assert (got.slot == -1).all() and (got.partition == -1).all() and (got.least == np.inf).all() and got.total[0] == 0
    assert not any(np.asarray(x).any() for x in (got.probability, got.length, got.generation))


def test_sums_that_were_formed_where_denormals_count():
    mass = np.zeros((1, 64), np.float32)
    mass[0, 20:28] = 1e-38
    slot = sample(jnp.asarray(mass), jnp.asarray(sums_oracle(mass)), random_bits(0, 5000)).slot
    assert ((slot >= 20) & (slot < 28)).all()


@pytest.mark.parametrize("leaves", [1, 15, 17, 257, 1000])
def test_distribution_on_a_grid(leaves):
    check_sumtree_sample(ops.sumtree_sample, partitions=5, leaves=leaves, draws=1 << 15)


@pytest.mark.parametrize("seed", range(3))
def test_distribution_by_chi_square(seed):
    rng, draws = np.random.default_rng(seed), 400_000
    mass = rng.gamma(0.5, size=(4, 150)).astype(np.float32) * (rng.uniform(size=(4, 150)) < 0.7)
    mass, sums = tree_of(mass)
    slot = sample(mass, sums, random_bits(seed, draws)).slot
    wanted = draws * np.asarray(_reference.probabilities(mass), np.float64)
    count = np.bincount(np.asarray(slot), minlength=600)
    assert not count[wanted == 0].any()
    order = np.argsort(wanted)  # slots of little mass are counted together, 20 draws and more at a time
    bins = np.floor(np.cumsum(wanted[order]) / 20).astype(int)
    got, expected = np.bincount(bins, count[order]), np.bincount(bins, wanted[order])
    got, expected = got[expected > 5], expected[expected > 5]
    chi2 = ((got - expected) ** 2 / expected).sum()
    assert 1e-4 < stats.chi2.sf(chi2, len(got) - 1) < 1 - 1e-4


def test_small_probabilities_are_resolved():
    """The low word counts: a slot of 2**-40 of the mass is drawn by its share of the words, not by rounding."""
    mass, sums = tree_of(np.array([[1.0, 1.0]], np.float32))
    bits = np.array([[2**31 - 2**10, 0], [2**31, 0]], np.uint32)
    np.testing.assert_array_equal(sample(mass, sums, bits).slot, [0, 1])
    mass, sums = tree_of(np.array([[2.0**-40, 1.0]], np.float32))
    assert sample(mass, sums, np.array([[0, 1 << 12]], np.uint32)).slot[0] == 0
    assert sample(mass, sums, np.array([[0, 1 << 26]], np.uint32)).slot[0] == 1


@pytest.mark.parametrize("draws", [0, 1, 31, 33, 1023, 1025, 5000])
def test_draws_do_not_depend_on_each_other_or_on_threads(draws):
    """5000 draws are spread over threads and groups; where in them a draw stands does not matter."""
    mass, sums = tree_of(np.random.default_rng(0).uniform(size=(8, 333)).astype(np.float32))
    bits = np.asarray(random_bits(7, draws))
    order = np.random.default_rng(1).permutation(draws)
    one, other = sample(mass, sums, bits), sample(mass, sums, bits[order])
    assert_same_bits(other[:5], tuple(np.asarray(x)[order] for x in one[:5]))
    assert_same_bits(other.total, one.total)


@pytest.mark.parametrize("draws", [0, 1, 31, 33, 5000])
def test_a_key_gives_the_words_of_stream_0(draws):
    mass, sums = tree_of(np.random.default_rng(0).uniform(size=(3, 333)).astype(np.float32))
    key = jax.random.key(5)
    got = sample(mass, sums, _random.fold(key), draws=draws)
    assert_same_bits(got, sample(mass, sums, _random.words(key, 0, draws)))


@pytest.mark.parametrize("leaves", [1, 16, 257, 4097])
def test_strata(leaves):
    """A slot is drawn as often as its probability says, within the strata at its ends; slots ascend."""
    rng, draws = np.random.default_rng(leaves), 3000
    mass = (rng.gamma(0.5, size=(3, leaves)) * (rng.uniform(size=(3, leaves)) < 0.7)).astype(np.float32)
    mass[0, 0] = 0.5
    mass, sums = tree_of(mass)
    slot = np.asarray(sample(mass, sums, jnp.array([1, 2], jnp.uint32), draws=draws, stratified=True).slot)
    flat = np.asarray(mass, np.float64).reshape(-1)
    count = np.bincount(slot, minlength=flat.size)
    assert (np.abs(count - draws * flat / flat.sum()) <= 2.01).all()
    assert not count[flat == 0].any()
    assert (np.diff(slot) >= 0).all()


def test_masses_whose_sum_is_infinite():
    mass, sums = tree_of(np.where(np.arange(600).reshape(2, 300) % 2, 3e38, 0).astype(np.float32))
    for stratified in (False, True):
        got = sample(mass, sums, jnp.array([1, 2], jnp.uint32), draws=3000, stratified=stratified)
        assert (np.asarray(mass).reshape(-1)[got.slot] > 0).all()


def test_no_mass():
    for shape in ((1, 1), (3, 17), (8, 300), (0, 4)):
        assert_nothing_drawn(sample(*tree_of(np.zeros(shape, np.float32)), random_bits(0, 5000)))


def test_partitions_without_mass_are_passed_over():
    mass = np.zeros((8, 20), np.float32)
    mass[[2, 5]] = 1
    slot = sample(*tree_of(mass), random_bits(0, 5000)).slot
    assert set(np.unique(np.asarray(slot) // 20)) == {2, 5}


@pytest.mark.parametrize("stratified", [False, True])
@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_partitions_held_apart_draw_what_the_whole_table_draws(parts, stratified):
    draw = jax.jit(functools.partial(ops.sumtree_sample, stratified=stratified))
    rng = np.random.default_rng(parts)
    mass = rng.uniform(size=(8, 37)).astype(np.float32)
    mass[3] = 0
    mass, sums = tree_of(mass)
    fields, roots, bits = fields_of(mass), ops.sumtree_roots(sums), random_bits(1, 4000)
    whole = ops.Draws(*map(np.asarray, sample(mass, sums, bits, stratified=stratified)))
    held, seen = 8 // parts, np.zeros(4000, int)
    for first in range(0, 8, held):
        here = slice(first, first + held)
        got = draw(mass[here], sums[here], *(x[here] for x in fields), bits, roots=roots, first=jnp.int32(first))
        mine = (whole.partition >= first) & (whole.partition < first + held)
        seen += mine
        probability = np.where(mine, whole.probability, np.float32(0))
        least = [np.min(p[p > 0], initial=np.inf) for p in np.split(probability, range(512, 4000, 512))]
        wanted = whole._replace(
            slot=np.where(mine, whole.slot, -1),
            probability=probability,
            length=np.where(mine, whole.length, 0),
            generation=np.where(mine, whole.generation, np.uint32(0)),
            least=np.asarray(least, np.float32),
        )
        assert_same_bits(got, wanted)
    assert (seen == 1).all()


@pytest.mark.parametrize("devices", [pytest.param(n, marks=pytest.mark.devices(n)) for n in (1, 2, 4, 8)])
def test_draws_under_shard_map_are_those_of_one_device(devices):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("x",))
    spec, everywhere = jax.sharding.PartitionSpec("x"), jax.sharding.PartitionSpec()
    mass, sums = tree_of(np.random.default_rng(0).uniform(size=(8, 37)).astype(np.float32))
    bits = random_bits(1, 999)

    def draw(mass, sums, length, generation, bits):
        roots = jax.lax.all_gather(ops.sumtree_roots(sums), "x", tiled=True)
        first = jax.lax.axis_index("x") * mass.shape[0]
        got = ops.sumtree_sample(mass, sums, length, generation, bits, roots=roots, first=first)
        whole = jax.lax.pmax(got.slot, "x"), jax.lax.psum(got.probability, "x"), jax.lax.psum(got.length, "x")
        return *whole, jax.lax.psum(got.generation, "x"), jax.lax.pmin(got.least, "x"), got.partition, got.total

    specs = (everywhere,) * 5 + (spec,) * 2
    f = jax.shard_map(draw, mesh=mesh, in_specs=(spec,) * 4 + (everywhere,), out_specs=specs)
    *whole, partition, total = jax.jit(f)(mass, sums, *fields_of(mass), bits)
    wanted = sample(mass, sums, bits)
    assert_same_bits(whole, [wanted.slot, wanted.probability, wanted.length, wanted.generation, wanted.least])
    np.testing.assert_array_equal(partition, np.tile(wanted.partition, devices))
    np.testing.assert_array_equal(total, np.repeat(wanted.total, devices))


def test_sums_of_another_mass_stay_inside_the_arrays():
    for leaves in (1, 17, 300, 5000):
        sums = jnp.ones((2, ops.sumtree_width(leaves)), jnp.float32)
        for mass in (0.0, 1.0, np.inf, np.nan):
            slot = sample(jnp.full((2, leaves), mass, jnp.float32), sums, random_bits(0, 3000)).slot
            assert ((slot >= 0) & (slot < 2 * leaves)).all()


def test_a_first_partition_outside_the_table_holds_nothing():
    mass, sums = tree_of(np.ones((2, 4), np.float32))
    for first in (-2, 8):
        got = _sample(mass, sums, random_bits(0, 50), roots=jnp.ones(8, jnp.float32), first=first)
        assert (got.slot == -1).all() and (got.partition >= 0).all() and got.total[0] == 8


def test_the_ticket_goes_through():
    mass, sums = tree_of(np.ones((2, 4), np.float32))
    assert _sample(mass, sums, random_bits(0, 5), ticket=jnp.array([7], jnp.int32)).ticket == 7


@pytest.mark.devices(4)
def test_a_wrong_out_spec_of_shard_map_raises():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec, everywhere = jax.sharding.PartitionSpec("x"), jax.sharding.PartitionSpec()
    mass, sums = tree_of(np.ones((4, 5), np.float32))
    one = jnp.ones(1, jnp.float32)
    draw = lambda m, s: ops.sumtree_sample(m, s, *fields_of(m), random_bits(0, 8))  # noqa: E731
    write = lambda m, s: ops.sumtree_update(m, m, s, jnp.zeros(1, jnp.int32), one, one)  # noqa: E731
    for f in (draw, write):
        run = functools.partial(jax.shard_map, f, mesh=mesh, in_specs=(spec, spec))
        jax.jit(run(out_specs=spec))(mass, sums)
        with pytest.raises(ValueError, match="out_specs"):
            jax.jit(run(out_specs=everywhere))(mass, sums)


def _floats(*shape):
    return np.ones(shape, np.float32)


_SLOTS = np.zeros(2, np.int32)
_BITS = np.zeros((2, 2), np.uint32)


def _fields(*shape):
    return np.ones(shape, np.int32), np.ones(shape, np.uint32)


@pytest.mark.parametrize(
    ("text", "call"),
    [
        (r"mass: got shape \(17,\), wanted \[P, S\]",
         lambda: ops.sumtree_sample(_floats(17), _floats(1, 32), *_fields(1, 17), _BITS)),
        (r"sums: got float32\[1, 16\], wanted float32\[1, 32\]",
         lambda: ops.sumtree_sample(_floats(1, 17), _floats(1, 16), *_fields(1, 17), _BITS)),
        (r"mass: got int32\[1, 17\], wanted float32", lambda: ops.sumtree_sample(
            np.ones((1, 17), np.int32), _floats(1, 32), *_fields(1, 17), _BITS)),
        (r"bits: got int32\[2, 2\], wanted uint32\[B, 2\]",
         lambda: ops.sumtree_sample(_floats(1, 4), _floats(1, 16), *_fields(1, 4), _BITS.astype(np.int32))),
        (r"bits: got uint32\[2\]", lambda: ops.sumtree_sample(_floats(1, 4), _floats(1, 16), *_fields(1, 4), _BITS[0])),
        (r"length: got int32\[1, 3\], wanted int32\[1, 4\]", lambda: ops.sumtree_sample(
            _floats(1, 4), _floats(1, 16), *_fields(1, 3), _BITS)),
        (r"generation: got int32\[1, 4\], wanted uint32\[1, 4\]", lambda: ops.sumtree_sample(
            _floats(1, 4), _floats(1, 16), *_fields(1, 4)[:1] * 2, _BITS)),
        (r"roots: got int32\[2\]", lambda: ops.sumtree_sample(
            _floats(1, 4), _floats(1, 16), *_fields(1, 4), _BITS, roots=np.ones(2, np.int32))),
        (r"roots: got float32\[1, 2\]", lambda: ops.sumtree_sample(
            _floats(1, 4), _floats(1, 16), *_fields(1, 4), _BITS, roots=_floats(1, 2))),
        (r"priority: got float32\[1, 2\], wanted float32\[1, 4\]", lambda: ops.sumtree_update(
            _floats(1, 2), _floats(1, 4), _floats(1, 16), _SLOTS, _floats(2), _floats(2))),
        (r"new_priority: got float32\[1\], wanted float32\[2\]", lambda: ops.sumtree_update(
            _floats(1, 4), _floats(1, 4), _floats(1, 16), _SLOTS, _floats(1), _floats(2))),
        (r"new_mass: got int32\[2\], wanted float32\[2\]", lambda: ops.sumtree_update(
            _floats(1, 4), _floats(1, 4), _floats(1, 16), _SLOTS, _floats(2), _SLOTS)),
        (r"slots: got 0, wanted at least 1", lambda: ops.sumtree_width(0)),
    ],
)  # fmt: skip
def test_bad_arguments(text, call):
    with pytest.raises(ValueError, match=text):
        call()
