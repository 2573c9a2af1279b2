"""The engines that need no environment of their own pass their checks, and a broken one does not."""

import numpy as np
import pytest

from gear_jax.bench.check import Batch, WrongBatch
from gear_jax.bench.engines import ENGINES, load
from gear_jax.bench.engines.base import Unsupported
from gear_jax.bench.timing import time_calls


@pytest.mark.parametrize("name", ["gear_jax", "numpy", "memcpy"])
def test_an_engine_passes_its_checks(name, tiny):
    engine = load(name)(tiny)
    engine.fill()
    checked = 0
    for row in tiny.rows:
        try:
            calls = engine.calls(row)
        except Unsupported:
            assert name == "memcpy"
            continue
        for call in calls:
            engine.check(row, call)
            seconds, count = time_calls(call.run, 0.0, call.pipeline)
            assert seconds > 0 and count == 3
            checked += 1
    assert checked or name == "memcpy"
    assert engine.versions()


@pytest.mark.parametrize(("name", "samples", "updates"), [("gear_jax", 4, 2), ("numpy", 1, 2)])
def test_priorities_are_measured_with_stratified_draws_too(tiny, name, samples, updates):
    if tiny.alpha is None:
        pytest.skip("has no priorities")
    engine = load(name)(tiny)
    engine.fill()
    for row in tiny.rows:
        variants = {call.variant for call in engine.calls(row)}
        assert len(variants) == {"sample": samples, "update": updates}[row.op]
        assert name != "gear_jax" or 2 * sum("stratified" in v for v in variants) == len(variants)


def test_an_engine_that_adds_nothing_is_found(tiny):
    adds = [row for row in tiny.rows if row.op == "add"]
    if not adds:
        pytest.skip("nothing is added")
    engine = load("numpy")(tiny)
    engine.fill()
    call = engine.calls(adds[0])[0]
    engine.table = {name: column.copy() for name, column in engine.table.items()}  # adds go to the old arrays
    with pytest.raises(WrongBatch, match="never appear"):
        engine.check(adds[0], call)


def test_an_engine_that_ignores_updates_is_found(tiny):
    if tiny.alpha is None:
        pytest.skip("has no priorities")
    engine = load("numpy")(tiny)
    engine.fill()
    row = next(row for row in tiny.rows if row.op == "update")
    call = engine.calls(row)[0]
    engine.set_priorities = lambda ids, priorities: None
    with pytest.raises(WrongBatch, match="ignored"):
        engine.check(row, call)


def test_a_sample_with_wrong_bytes_is_found(tiny):
    engine = load("numpy")(tiny)
    engine.fill()
    row = next(row for row in tiny.rows if row.op == "sample")
    spoilt = next((c.name for c in tiny.columns if c.name != tiny.code_column), tiny.code_column)
    if tiny.alpha is not None:
        pytest.skip("its only column is a number that any trajectory might have")
    engine.table[spoilt].reshape(tiny.stored, tiny.steps, -1)[:, :, -1] += 1
    with pytest.raises(WrongBatch):
        for call in engine.calls(row):
            engine.check(row, call)


def test_every_engine_names_a_file():
    import pathlib

    import gear_jax.bench.engines as engines

    folder = pathlib.Path(engines.__file__).parent
    assert all((folder / f"{module}.py").exists() for module, _, _ in ENGINES.values())
    assert isinstance(Batch({"x": np.zeros((1, 1))}).data, dict)
