"""`ops.sumtree_update` and `ops.sumtree_sample`: layout, rounding, drift, distribution, partitions held apart."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
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
sample = jax.jit(ops.sumtree_sample)


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
    slot, drawn, total = map(np.asarray, sample(mass, sums, bits))
    flat = np.asarray(mass).reshape(-1)
    assert (slot >= 0).all() and (flat[slot] > 0).all()
    np.testing.assert_array_equal(drawn, flat[slot])
    assert total[0] > 0


def test_denormal_masses():
    """XLA's threads take denormals for zero: they have no mass, and draws beside them are right."""
    mass = np.zeros((1, 64), np.float32)
    mass[0, 3:9] = 1e-40
    slot, drawn, total = sample(*tree_of(mass), random_bits(0, 5000))
    assert (slot == -1).all() and not np.asarray(drawn).any() and total[0] == 0
    mass[0, 40] = 1e-30
    slot, _, _ = sample(*tree_of(mass), random_bits(0, 5000))
    assert (slot == 40).all()


def test_sums_that_were_formed_where_denormals_count():
    mass = np.zeros((1, 64), np.float32)
    mass[0, 20:28] = 1e-38
    slot, drawn, _ = map(np.asarray, sample(jnp.asarray(mass), jnp.asarray(sums_oracle(mass)), random_bits(0, 5000)))
    assert ((slot >= 20) & (slot < 28)).all()
    np.testing.assert_array_equal(drawn.view(np.uint32), mass[0, slot].view(np.uint32))


@pytest.mark.parametrize("leaves", [1, 15, 17, 257, 1000])
def test_distribution_on_a_grid(leaves):
    check_sumtree_sample(ops.sumtree_sample, partitions=5, leaves=leaves, draws=1 << 15)


@pytest.mark.parametrize("seed", range(3))
def test_distribution_by_chi_square(seed):
    rng, draws = np.random.default_rng(seed), 400_000
    mass = rng.gamma(0.5, size=(4, 150)).astype(np.float32) * (rng.uniform(size=(4, 150)) < 0.7)
    mass, sums = tree_of(mass)
    slot, _, _ = sample(mass, sums, random_bits(seed, draws))
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
    np.testing.assert_array_equal(sample(mass, sums, bits)[0], [0, 1])
    mass, sums = tree_of(np.array([[2.0**-40, 1.0]], np.float32))
    assert sample(mass, sums, np.array([[0, 1 << 12]], np.uint32))[0][0] == 0
    assert sample(mass, sums, np.array([[0, 1 << 26]], np.uint32))[0][0] == 1


@pytest.mark.parametrize("draws", [0, 1, 31, 33, 1023, 1025, 5000])
def test_draws_do_not_depend_on_each_other_or_on_threads(draws):
    """5000 draws are spread over threads and groups; where in them a draw stands does not matter."""
    mass, sums = tree_of(np.random.default_rng(0).uniform(size=(8, 333)).astype(np.float32))
    bits = np.asarray(random_bits(7, draws))
    order = np.random.default_rng(1).permutation(draws)
    one, other = sample(mass, sums, bits), sample(mass, sums, bits[order])
    assert_same_bits(other, (*(np.asarray(x)[order] for x in one[:2]), one[2]))


def _from_key(**options):
    return jax.jit(lambda m, s, k: ops.sumtree_sample(m, s, k, **options))


@pytest.mark.parametrize("draws", [0, 1, 31, 33, 5000])
def test_a_key_gives_the_words_of_stream_0(draws):
    mass, sums = tree_of(np.random.default_rng(0).uniform(size=(3, 333)).astype(np.float32))
    key = jax.random.key(5)
    got = _from_key(draws=draws)(mass, sums, _random.fold(key))
    assert_same_bits(got, sample(mass, sums, _random.words(key, 0, draws)))


@pytest.mark.parametrize("leaves", [1, 16, 257, 4097])
def test_strata(leaves):
    """A slot is drawn as often as its probability says, within the strata at its ends; slots ascend."""
    rng, draws = np.random.default_rng(leaves), 3000
    mass = (rng.gamma(0.5, size=(3, leaves)) * (rng.uniform(size=(3, leaves)) < 0.7)).astype(np.float32)
    mass[0, 0] = 0.5
    mass, sums = tree_of(mass)
    slot, drawn, _ = map(np.asarray, _from_key(draws=draws, stratified=True)(mass, sums, jnp.array([1, 2], jnp.uint32)))
    flat = np.asarray(mass, np.float64).reshape(-1)
    count = np.bincount(slot, minlength=flat.size)
    assert (np.abs(count - draws * flat / flat.sum()) <= 2.01).all()
    assert not count[flat == 0].any()
    assert (np.diff(slot) >= 0).all()
    np.testing.assert_array_equal(drawn, np.asarray(mass).reshape(-1)[slot])


def test_masses_whose_sum_is_infinite():
    mass, sums = tree_of(np.where(np.arange(600).reshape(2, 300) % 2, 3e38, 0).astype(np.float32))
    for stratified in (False, True):
        slot, _, _ = _from_key(draws=3000, stratified=stratified)(mass, sums, jnp.array([1, 2], jnp.uint32))
        assert (np.asarray(mass).reshape(-1)[slot] > 0).all()


def test_no_mass():
    for shape in ((1, 1), (3, 17), (8, 300)):
        slot, drawn, total = sample(*tree_of(np.zeros(shape, np.float32)), random_bits(0, 5000))
        assert (slot == -1).all() and not drawn.any() and total[0] == 0
    slot, _, _ = ops.sumtree_sample(jnp.zeros((0, 4)), jnp.zeros((0, 16)), random_bits(0, 3))
    np.testing.assert_array_equal(slot, [-1] * 3)


def test_partitions_without_mass_are_passed_over():
    mass = np.zeros((8, 20), np.float32)
    mass[[2, 5]] = 1
    slot, _, _ = sample(*tree_of(mass), random_bits(0, 5000))
    assert set(np.unique(np.asarray(slot) // 20)) == {2, 5}


@pytest.mark.parametrize("stratified", [False, True])
@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_partitions_held_apart_draw_what_the_whole_table_draws(parts, stratified):
    sample = jax.jit(functools.partial(ops.sumtree_sample, stratified=stratified))
    rng = np.random.default_rng(parts)
    mass = rng.uniform(size=(8, 37)).astype(np.float32)
    mass[3] = 0
    mass, sums = tree_of(mass)
    roots, bits = ops.sumtree_roots(sums), random_bits(1, 4000)
    slot, drawn, total = map(np.asarray, sample(mass, sums, bits))
    held, seen = 8 // parts, np.zeros(4000, int)
    for first in range(0, 8, held):
        here = slice(first, first + held)
        got = sample(mass[here], sums[here], bits, roots=roots, first=jnp.int32(first))
        mine = (slot // 37 >= first) & (slot // 37 < first + held)
        seen += mine
        assert_same_bits(got, (np.where(mine, slot, -1), np.where(mine, drawn, np.float32(0)), total))
    assert (seen == 1).all()


@pytest.mark.parametrize("devices", [pytest.param(n, marks=pytest.mark.devices(n)) for n in (1, 2, 4, 8)])
def test_draws_under_shard_map_are_those_of_one_device(devices):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("x",))
    spec, everywhere = jax.sharding.PartitionSpec("x"), jax.sharding.PartitionSpec()
    mass, sums = tree_of(np.random.default_rng(0).uniform(size=(8, 37)).astype(np.float32))
    bits = random_bits(1, 999)

    def draw(mass, sums, bits):
        roots = jax.lax.all_gather(ops.sumtree_roots(sums), "x", tiled=True)
        first = jax.lax.axis_index("x") * mass.shape[0]
        slot, drawn, total = ops.sumtree_sample(mass, sums, bits, roots=roots, first=first)
        return jax.lax.pmax(slot, "x"), jax.lax.psum(drawn, "x"), total

    f = jax.shard_map(draw, mesh=mesh, in_specs=(spec, spec, everywhere), out_specs=(everywhere, everywhere, spec))
    slot, drawn, total = jax.jit(f)(mass, sums, bits)
    wanted = sample(mass, sums, bits)
    assert_same_bits((slot, drawn), wanted[:2])
    np.testing.assert_array_equal(total, np.repeat(wanted[2], devices))


def test_sums_of_another_mass_stay_inside_the_arrays():
    for leaves in (1, 17, 300, 5000):
        sums = jnp.ones((2, ops.sumtree_width(leaves)), jnp.float32)
        for mass in (0.0, 1.0, np.inf, np.nan):
            slot, _, _ = sample(jnp.full((2, leaves), mass, jnp.float32), sums, random_bits(0, 3000))
            assert ((slot >= 0) & (slot < 2 * leaves)).all()


def test_a_first_partition_outside_the_table_holds_nothing():
    mass, sums = tree_of(np.ones((2, 4), np.float32))
    for first in (-2, 8):
        slot, _, total = sample(mass, sums, random_bits(0, 50), roots=jnp.ones(8, jnp.float32), first=first)
        assert (slot == -1).all() and total[0] == 8


@pytest.mark.devices(4)
def test_a_wrong_out_spec_of_shard_map_raises():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec, everywhere = jax.sharding.PartitionSpec("x"), jax.sharding.PartitionSpec()
    mass, sums = tree_of(np.ones((4, 5), np.float32))
    one = jnp.ones(1, jnp.float32)
    draw = lambda m, s: ops.sumtree_sample(m, s, random_bits(0, 8))  # noqa: E731
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


@pytest.mark.parametrize(
    ("text", "call"),
    [
        (r"mass: got shape \(17,\), wanted \[P, S\]", lambda: ops.sumtree_sample(_floats(17), _floats(1, 32), _BITS)),
        (r"sums: got float32\[1, 16\], wanted float32\[1, 32\]",
         lambda: ops.sumtree_sample(_floats(1, 17), _floats(1, 16), _BITS)),
        (r"mass: got int32\[1, 17\], wanted float32", lambda: ops.sumtree_sample(
            np.ones((1, 17), np.int32), _floats(1, 32), _BITS)),
        (r"bits: got int32\[2, 2\], wanted uint32\[B, 2\]",
         lambda: ops.sumtree_sample(_floats(1, 4), _floats(1, 16), _BITS.astype(np.int32))),
        (r"bits: got uint32\[2\]", lambda: ops.sumtree_sample(_floats(1, 4), _floats(1, 16), _BITS[0])),
        (r"roots: got int32\[2\]", lambda: ops.sumtree_sample(
            _floats(1, 4), _floats(1, 16), _BITS, roots=np.ones(2, np.int32))),
        (r"roots: got float32\[1, 2\]", lambda: ops.sumtree_sample(
            _floats(1, 4), _floats(1, 16), _BITS, roots=_floats(1, 2))),
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
