import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gear_jax.bench.gpu import tables
from gear_jax.bench.gpu.findings import Wrong

LAYOUTS = {
    "bytes": tables.main_layout(5, 6, 7),
    "windows": tables.window_layout(4, 9),
    "words": tables.Layout(6, 1, {"x": (3, "uint32")}),
    "narrow": tables.Layout(8, 1, {"x": (0, "int32")}),
}


@pytest.fixture(params=LAYOUTS)
def layout(request):
    return LAYOUTS[request.param]


def _everything(layout, name):
    slots = np.arange(layout.slots)
    return tables.expected(layout, name, slots, np.tile(np.arange(layout.steps), (layout.slots, 1)))


@pytest.mark.parametrize("memory", ["pinned_host", "device"])
def test_numpy_knows_every_value_of_a_table(layout, memory):
    columns = tables.make(layout, memory)
    assert sum(x.nbytes for x in columns.values()) == layout.size
    for name, column in columns.items():
        assert column.sharding.memory_kind == memory
        space = jax.memory.Space.Host if memory == "pinned_host" else jax.memory.Space.Device
        assert jax.typeof(column).memory_space == space
        np.testing.assert_array_equal(np.asarray(column)[0], _everything(layout, name), strict=True)


def test_values_differ_by_slot_step_cell_and_salt():
    layout = tables.main_layout(40, 30, 8)
    values = _everything(layout, "x").astype(int)
    for axis in range(3):
        assert (np.diff(values, axis=axis) != 0).mean() > 0.9
    other = _everything(dataclasses.replace(layout, salt=1), "x")
    assert (values != other).mean() > 0.9


def test_trajectories_are_what_the_slots_would_hold(layout):
    slots = jnp.asarray([2, 0, 3], jnp.int32)
    got = jax.jit(lambda slots: tables.trajectories(layout, slots))(slots)
    for name in layout.columns:
        np.testing.assert_array_equal(np.asarray(got[name]), _everything(layout, name)[[2, 0, 3]], strict=True)
    some = next(iter(layout.columns))
    assert list(jax.jit(lambda s: tables.trajectories(layout, s, (some,)))(slots)) == [some]


def test_bytes_of_a_step():
    layout = LAYOUTS["windows"]
    assert layout.step_bytes() == 64
    assert layout.step_bytes(("observation", "action", "reward")) == 60
    assert layout.size == 4 * 9 * 64


def _batch(layout, rows=6):
    rng = np.random.default_rng(0)
    slots = rng.integers(0, layout.slots, rows)
    starts = rng.integers(2, layout.steps, rows)
    spans = dict.fromkeys(layout.columns, (-2, 3))
    steps = starts[:, None] + np.arange(-2, 1)[None]
    return {n: tables.expected(layout, n, slots, steps) for n in layout.columns}, slots, starts, spans


def test_a_right_batch_passes():
    layout = LAYOUTS["windows"]
    data, slots, starts, spans = _batch(layout)
    masks = {name: jnp.ones((6, 3), bool) for name in data}
    tables.check(layout, data, slots, starts, spans, masks)


@pytest.mark.parametrize("name", ["observation", "time"])
@pytest.mark.parametrize("row", [0, 5])
def test_one_wrong_value_is_named(name, row):
    layout = LAYOUTS["windows"]
    data, slots, starts, spans = _batch(layout)
    data[name][row, 1] += 1
    with pytest.raises(Wrong, match=f"column '{name}': 1 of 6 rows differ, the first is row {row}"):
        tables.check(layout, data, slots, starts, spans)


def test_another_shape_and_a_mask_are_wrong():
    layout = LAYOUTS["windows"]
    data, slots, starts, spans = _batch(layout)
    with pytest.raises(Wrong, match="wanted float32"):
        tables.check(layout, data | {"action": data["action"][:, :2]}, slots, starts, spans)
    masks = {name: np.ones((6, 3), bool) for name in data}
    masks["time"][5, 0] = False
    with pytest.raises(Wrong, match="the mask hides"):
        tables.check(layout, data, slots, starts, spans, masks)


def test_large_batches_are_checked_at_both_ends(monkeypatch):
    monkeypatch.setattr(tables, "_CHECKED_BYTES", 1)
    monkeypatch.setattr(tables, "_COPIED_BYTES", 1)
    layout = LAYOUTS["windows"]
    data, slots, starts, spans = _batch(layout)
    data["reward"][5] += 1
    with pytest.raises(Wrong, match="1 of 2 rows differ"):
        tables.check(layout, {n: jnp.asarray(x) for n, x in data.items()}, slots, starts, spans)


def test_a_view_is_the_columns_own_memory(layout):
    for name, column in tables.make(layout, "pinned_host").items():
        view = tables.host_view(column)
        assert view.ctypes.data == tables.pointer(column)
        np.testing.assert_array_equal(view[0], _everything(layout, name), strict=True)
